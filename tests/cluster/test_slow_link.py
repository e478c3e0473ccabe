"""Compressed gradients and local steps over a real slow link: two hosts, one process each, and what one of them sends.

`benchmarks/slow_links.py` measures the speed of the same job.
"""

from functools import cache

import numpy as np
import pytest

from jaxdist import train
from tests.cluster.slow_link import RATE, Measured, measure
from tests.faults import jobs
from tests.tiers import exhaustive
from tests.training.curves import lines

pytestmark = pytest.mark.slow

MODEL = ("--mesh=replica=2", "--model.layers=1", "--model.embed=256", "--checkpoint.every=0", "--validation.every=0")
PARAMETERS = 12 * 256**2 + 13 * 256 + (300 + 16) * 256 + 2 * 256
"""Of a layer (matrices; biases and norms), the tables of tokens and positions, and the last norm."""

RULES = {
    "exact": ((), 1, 4),
    "int8": (("--parallel.gradient-compression=int8",), 1, 4),
    "local": (("--train.local-steps=10",), 10, 20),
}
"""(options, the steps after which the counter is read)."""


@pytest.fixture(scope="module")
def measured(network, text, tmp_path_factory):
    """Of a rule: what a step takes, and the losses of the same run in one process."""

    @cache
    def of(rule: str) -> tuple[Measured, list[float]]:
        options, first, last = RULES[rule]
        folder = tmp_path_factory.mktemp(rule)
        words = jobs.argv(folder / "alone", text, *MODEL, *options, f"--train.steps={last}")
        two = measure(network, words, folder / "two", first, last)
        assert train.main(words) == 0
        return two, [line["loss"] for line in lines(folder / "alone") if "loss" in line]

    network.slow("n0", RATE)
    yield of
    network.fast("n0")


def test_an_exact_step_sends_four_bytes_of_each_parameter(measured):
    """As theory says: 2 (R-1)/R x 4. Headers of packets, and acknowledgements of what arrives, come to 7 %."""
    two, _ = measured("exact")
    assert 1 < two.bytes_per_step / (4 * PARAMETERS) < 1.1


@pytest.mark.parametrize(("rule", "most"), exhaustive([("int8", 0.28), ("local", 0.11)]))
def test_a_step_sends_a_fraction(measured, rule, most):
    """The theory: 0.254 for INT8 with its scales, 0.1 for one sum in ten steps."""
    assert measured(rule)[0].bytes_per_step <= most * measured("exact")[0].bytes_per_step


@pytest.mark.parametrize("rule", ["exact", *exhaustive([("int8",), ("local",)])])
def test_two_processes_have_the_losses_of_one(measured, rule):
    """So what crosses the link is all that has to."""
    two, alone = measured(rule)
    np.testing.assert_allclose(two.losses, alone, rtol=1e-6)
