"""A cluster for the tests: hosts with a network of their own, and a real Slurm on them. Left out, with the reason,
where there is no root or no Slurm."""

import pytest

from tests.cluster import hosts, slurm
from tests.faults import jobs
from tests.training.conftest import text

__all__ = ["text"]

NODES = 4


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
