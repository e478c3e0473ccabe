"""A cluster for the tests: hosts with a network of their own, and a real Slurm on them. Left out, with the reason,
where there is no root or no Slurm."""

import signal

import pytest

from tests.cluster import hosts, slurm
from tests.cluster.played import Played
from tests.faults import jobs
from tests.processes import started
from tests.training.conftest import text
from tests.training.curves import close, lines

__all__ = ["text"]

NODES = 4

LONG = ("--train.steps=100000", "--train.global-batch-size=6", "--optimizer.learning-rate=0.0002")
"""As good as for ever, with a batch that divides by 2 and by 3.

At the usual rate rounding grows with the steps: on 1, 2 and 3 devices that nothing stops, norms of gradients part by
1.4e-4 within 600 steps and by 7.7e-4 within 800. At this one they stay within 1e-5, losses within 1e-6, for 1000.
"""

FURTHER = 1000
"""Steps: more than a job makes in a test."""


@pytest.fixture(scope="session")
def network(tmp_path_factory):
    """The hosts n0 to n3."""
    if why := hosts.cannot():
        pytest.skip(why)
    with hosts.Hosts(NODES, tmp_path_factory.mktemp("network")) as made:
        yield made


@pytest.fixture(scope="session")
def cluster(network, tmp_path_factory):
    """Slurm on these hosts."""
    if why := slurm.cannot():
        pytest.skip(why)
    with slurm.Slurm(network, tmp_path_factory.mktemp("slurm")) as made:
        yield made


@pytest.fixture
def words(text, tmp_path):
    """argv of a small run in a folder of this test."""
    return lambda *options, folder="run": jobs.argv(tmp_path / folder, text, *options)


@pytest.fixture
def played(tmp_path, monkeypatch) -> Played:
    """Slurm's commands in a new folder, beside the one in which the test runs."""
    (tmp_path / "home").mkdir()
    (tmp_path / "played").mkdir()
    monkeypatch.chdir(tmp_path / "home")
    return Played(tmp_path / "played")


@pytest.fixture(scope="session")
def same(text, tmp_path_factory):
    """Whether the figures of each step in a folder of a `LONG` run are those of one process."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    options = ("--mesh=2x1x1", *LONG, "--checkpoint.every=1000")
    with started(jobs.train(jobs.argv(folder, text, *options))) as running:
        jobs.until(lambda: jobs.step_of(folder) >= FURTHER, running)
        running[0].send_signal(signal.SIGTERM)
        assert jobs.ends(running, 120) == [85]
    steps = lambda folder: [line for line in lines(folder) if "loss" in line]
    wanted = steps(folder)

    def look(folder) -> None:
        found = steps(folder)
        both = min(len(found), len(wanted))
        assert both >= 5
        close(found[:both], wanted[:both], norms=1e-4)

    return look
