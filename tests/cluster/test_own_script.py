"""A user's own script under `launch local`: killed, stopped and gone on with, it learns what it does alone."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults import jobs
from tests.processes import ROOT, Process, started

SCRIPT = ROOT / "examples" / "own_script.py"
LAST = 59


def losses(said: str) -> dict[int, float]:
    """The loss that was shown last for each step."""
    return {int(step): float(loss) for step, loss in re.findall(r"^step (\d+)  loss (\S+)$", said, re.MULTILINE)}


def process_1(launcher: Process) -> int:
    """The pid of the second process that this launcher has started."""
    return int(Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()[1])


@pytest.mark.slow
def test_it_is_killed_and_stopped_and_goes_on(tmp_path):
    folder = tmp_path / "its run"
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1"}
    alone = [sys.executable, SCRIPT, "--folder", tmp_path / "alone"]
    done = subprocess.run(alone, env=environment, capture_output=True, text=True, timeout=240, check=True)
    expected = losses(done.stdout)
    assert sorted(expected) == list(range(LAST + 1))
    assert expected[LAST] < 0.2 * expected[0]

    launch = [sys.executable, "-m", "jaxdist.launch", "local", "--processes=2", f"--run-dir={folder}", "--"]
    command = [*launch, str(SCRIPT), "--folder", str(folder)]
    with started([command], env=environment) as [job]:
        jobs.until(lambda: 15 in losses(job.said()), [job])
        os.kill(process_1(job), signal.SIGKILL)
        jobs.until(lambda: 35 in losses(job.said()), [job])
        job.send_signal(signal.SIGTERM)
        assert jobs.ends([job], 60) == [85], job.said()
        first = job.said()
    assert re.search(r"process 1 was ended by SIGKILL; all are started again from step [123]0\n", first)
    assert first.endswith("jaxdist.launch: stopped by SIGTERM after 1 restart\n")
    stopped_at = max(losses(first))

    with started([command], env=environment) as [job]:
        assert jobs.ends([job], 240) == [0], job.said()
        second = job.said()
    assert min(losses(second)) == stopped_at + 1
    found = losses(first) | losses(second)
    assert found == pytest.approx(expected, abs=2e-6)
