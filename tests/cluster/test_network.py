"""What may happen to the network between two hosts: a job goes on, or ends in time; no number is ever wrong."""

import signal
import sys
import time

import pytest

from tests.cluster.conftest import LONG
from tests.cluster.relay import Relay
from tests.faults import jobs
from tests.faults.jobs import ends, saved, step_of, told, until
from tests.processes import Process, started
from tests.tiers import exhaustive

pytestmark = pytest.mark.slow

HEARTBEAT, LAST_WORDS = 10, 10
"""Seconds: of `jobs.TINY`, and in which a job ends that has noticed."""


@pytest.fixture
def job(network, words):
    """Starts one process on each of n0 and n1. `via` is the coordinator's HOST:PORT, where the second is to find it."""

    def start(via: str = "n0:4711"):
        options = words("--mesh=2x1x1", *LONG, "--cluster.processes=2")
        command = lambda i, where: network.on(
            f"n{i}", sys.executable, "-m", "jaxdist.train", *options,
            f"--cluster.process-id={i}", f"--cluster.coordinator={where}",
        )  # fmt: skip
        return started([command(0, "n0:4711"), command(1, via)])

    yield start
    for name in ("n0", "n1"):
        network.join(name)
        network.fast(name)


def goes_on(running: list[Process], folder, steps: int = 20) -> None:
    before = step_of(folder)
    until(lambda: step_of(folder) >= before + steps, running)


def stop(running: list[Process]) -> None:
    for process in running:
        process.send_signal(signal.SIGTERM)
    assert ends(running, 120) == [85, 85], told(running)


@pytest.mark.parametrize("host", ["n0", *exhaustive([("n1",)])])
def test_a_cut_link_ends_all_in_time_and_the_run_goes_on_without(network, job, tmp_path, words, same, host):
    """Also where it is that of the coordinator."""
    folder = tmp_path / "run"
    with job() as running:
        until(lambda: saved(folder) >= 5, running)
        network.cut(host)
        began = time.monotonic()
        codes = ends(running, 4 * (HEARTBEAT + LAST_WORDS))
        assert not {0, 85} & set(codes)
        assert time.monotonic() - began > HEARTBEAT / 2  # it was the heartbeat that ended it
    same(folder)
    kept = saved(folder)
    with started(jobs.train(words("--mesh=2x1x1", *LONG))) as running:
        until(lambda: step_of(folder) >= kept + 10, running)
        running[0].send_signal(signal.SIGTERM)
        assert ends(running, 120) == [85]
        assert f"step {kept}" in running[0].said()
    same(folder)


@pytest.mark.exhaustive
def test_a_link_that_is_cut_for_less_than_a_heartbeat_and_then_slow_costs_time_only(network, job, tmp_path, same):
    folder = tmp_path / "run"
    with job() as running:
        until(lambda: step_of(folder) >= 5, running)
        network.cut("n1")
        time.sleep(HEARTBEAT / 3)
        network.join("n1")
        goes_on(running, folder)
        network.slow("n1", "2mbit")
        goes_on(running, folder)
        stop(running)
    same(folder)


@pytest.mark.exhaustive
def test_a_slow_way_to_the_coordinator_costs_time_only(network, job, tmp_path, same):
    """Every byte is held for a while by a relay."""
    folder = tmp_path / "run"
    with Relay(network, "n0:4711", seconds=0.05) as relay, job(relay.address) as running:
        goes_on(running, folder)
        stop(running)
    same(folder)


@pytest.mark.exhaustive
def test_resets_on_the_way_to_the_coordinator_end_the_job_or_cost_nothing(network, job, tmp_path, same):
    """gRPC connects anew; where it does not, the job ends like one whose link was cut."""
    folder = tmp_path / "run"
    with Relay(network, "n0:4711") as relay, job(relay.address) as running:
        until(lambda: step_of(folder) >= 5, running)
        relay.reset()
        before = step_of(folder)
        end = time.monotonic() + 4 * (HEARTBEAT + LAST_WORDS)
        while step_of(folder) < before + 20 and None in [process.poll() for process in running]:
            assert time.monotonic() < end, told(running)
            time.sleep(0.05)
        if step_of(folder) >= before + 20:
            stop(running)
        else:
            assert not {0, 85} & set(ends(running, 120))
    same(folder)
