"""Processes end when the launcher that has started them is gone."""

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from jaxdist.cluster import lifeline
from tests.faults.jobs import argv, saved, step_of, until
from tests.processes import started
from tests.tiers import exhaustive

SUBREAPER = 36
"""`prctl` option: processes whose parent ends become children of this one, which can then wait for them."""


def test_the_end_of_the_pipe_is_the_end_of_the_launcher(monkeypatch):
    gone = threading.Event()
    reading, writing = os.pipe()
    monkeypatch.setenv(lifeline.VARIABLE, str(reading))
    lifeline.watch(gone.set)
    assert lifeline.VARIABLE not in os.environ  # its own processes have no such file
    assert not gone.wait(0.2)
    os.close(writing)
    assert gone.wait(5)
    os.close(reading)


@pytest.mark.parametrize("value", [None, "", "x", "²", "99999", "9" * 5000, "1" * 30])
def test_without_a_launcher_nothing_is_watched(value, monkeypatch):
    monkeypatch.delenv(lifeline.VARIABLE, raising=False)
    if value is not None:
        monkeypatch.setenv(lifeline.VARIABLE, value)
    before = threading.active_count()
    lifeline.watch(lambda: pytest.fail("there is no launcher"))
    assert threading.active_count() == before


def test_a_file_that_is_no_pipe_is_not_watched(monkeypatch, tmp_path):
    with (tmp_path / "file").open("w") as file:
        monkeypatch.setenv(lifeline.VARIABLE, str(file.fileno()))
        before = threading.active_count()
        lifeline.watch(lambda: pytest.fail("this is no launcher"))
        assert threading.active_count() == before


def test_only_the_reading_end_is_passed_on():
    """A child that held the other end too would keep the processes of a launcher that is gone."""
    child = "import os, sys; sys.stdout.write(' '.join(os.listdir('/proc/self/fd')))"
    with lifeline.opened() as pipe:
        writing = pipe + 1
        assert os.fstat(writing).st_ino == os.fstat(pipe).st_ino
        command = [sys.executable, "-c", child]
        there = subprocess.run(command, pass_fds=[pipe], capture_output=True, text=True, check=True).stdout.split()
    assert str(pipe) in there
    assert str(writing) not in there


@pytest.fixture
def orphans():
    """Orphans are children of this process while the test runs."""
    libc = ctypes.CDLL(None)
    libc.prctl(SUBREAPER, 1, 0, 0, 0)
    yield
    libc.prctl(SUBREAPER, 0, 0, 0, 0)


def children(pid: int) -> list[int]:
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def exit_code(pid: int, seconds: float) -> int | None:
    """Of a child; None where it has not ended after so long, and is killed."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="orphans are given to the test by Linux alone")
@pytest.mark.parametrize("processes", [1, *exhaustive([(2,)])])
def test_a_killed_launcher_takes_its_processes_with_it(processes, text, tmp_path, orphans):
    folder = tmp_path / "run"
    words = argv(folder, text, "--train.steps=100000", "--checkpoint.every=5", "--log.every=1")
    command = [sys.executable, "-m", "jaxdist.launch", "local", f"--processes={processes}", *words]
    with started([command]) as running:
        until(lambda: saved(folder) and step_of(folder) > saved(folder), running)
        pids = children(running[0].pid)
        assert len(pids) == processes
        running[0].kill()
        running[0].wait()  # its processes are orphans now
        began = time.monotonic()
        newest = step_of(folder)
        codes = [exit_code(pid, began + 5 - time.monotonic()) for pid in pids]
        said = running[0].said()
    assert codes == [1] * processes, said
    assert said.count("ended because the launcher of this process is gone; nothing is saved") == processes
    assert "Traceback" not in said
    assert saved(folder) <= newest + 5  # a checkpoint that was due, and none for the end
    assert "stopped" not in said
