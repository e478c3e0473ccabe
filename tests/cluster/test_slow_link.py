"""Gradient compression over a real slow link: two hosts with one process each, and what their interface counts.

`benchmarks/slow_links.py` measures the same job's speed.
"""

import numpy as np
import pytest

from jaxdist import train
from tests.cluster.slow_link import RATE, measure
from tests.faults import jobs
from tests.training.curves import lines

pytestmark = pytest.mark.slow

MODEL = ("--mesh=replica=2", "--model.layers=1", "--model.embed=256", "--checkpoint.every=0", "--validation.every=0")
PARAMETERS = 12 * 256**2 + 13 * 256 + (300 + 16) * 256 + 2 * 256
"""Of a layer (matrices; biases and norms), the tables of tokens and positions, and the last norm."""

RULES = {
    "exact": (),
    "int8": ("--parallel.gradient-compression=int8",),
}


@pytest.fixture(scope="module")
def measured(network, text, tmp_path_factory):
    """What a step of each rule takes, and the losses of the same run in one process."""
    found = {}
    network.slow("n0", RATE)
    for rule, options in RULES.items():
        folder = tmp_path_factory.mktemp(rule)
        words = jobs.argv(folder / "alone", text, *MODEL, *options, "--train.steps=4")
        two = measure(network, words, folder / "two", first=1, last=4)
        assert train.main(words) == 0
        found[rule] = two, [line["loss"] for line in lines(folder / "alone") if "loss" in line]
    yield found
    network.fast("n0")


def test_an_exact_step_sends_four_bytes_of_each_parameter(measured):
    """As theory says: 2 (R-1)/R x 4. Headers of packets, and acknowledgements of what arrives, come to 7 %."""
    two, _ = measured["exact"]
    assert 1 < two.bytes_per_step / (4 * PARAMETERS) < 1.1


def test_an_int8_step_sends_a_quarter(measured):
    assert measured["int8"][0].bytes_per_step <= 0.28 * measured["exact"][0].bytes_per_step


@pytest.mark.parametrize("rule", RULES)
def test_two_processes_have_the_losses_of_one(measured, rule):
    """So what crosses the link is all that has to."""
    two, alone = measured[rule]
    np.testing.assert_allclose(two.losses, alone, rtol=1e-6)
