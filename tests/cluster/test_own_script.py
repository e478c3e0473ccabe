"""A user's own script under both launchers: killed, stopped and gone on with, it learns what it does alone."""

import os
import re
import signal
import sys
from pathlib import Path

import pytest

from tests import forks
from tests.faults import jobs
from tests.processes import ROOT, Process, started

SCRIPT = ROOT / "examples" / "own_script.py"
LAST = 59
ENVIRONMENT = os.environ | {"JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1"}


def losses(said: str) -> dict[int, float]:
    """The loss that was shown last for each step."""
    return {int(step): float(loss) for step, loss in re.findall(r"^step (\d+)  loss (\S+)$", said, re.MULTILINE)}


def process_1(launcher: Process) -> int:
    """The pid of the second process that this launcher has started."""
    return int(Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()[1])


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """The losses of the script alone."""
    command = [sys.executable, SCRIPT, "--folder", tmp_path_factory.mktemp("alone")]
    done = forks.run(command, env=ENVIRONMENT, timeout=240)
    assert done.returncode == 0, done.stderr
    found = losses(done.stdout)
    assert sorted(found) == list(range(LAST + 1))
    assert found[LAST] < 0.2 * found[0]
    return found


@pytest.mark.exhaustive
def test_it_is_killed_and_stopped_and_goes_on(tmp_path, expected):
    folder = tmp_path / "its run"
    launch = [sys.executable, "-m", "jaxdist.launch", "local", "--processes=2", f"--run-dir={folder}", "--"]
    command = [*launch, str(SCRIPT), "--folder", str(folder)]
    with started([command], env=ENVIRONMENT) as [job]:
        jobs.until(lambda: 15 in losses(job.said()), [job])
        os.kill(process_1(job), signal.SIGKILL)
        jobs.until(lambda: 35 in losses(job.said()), [job])
        job.send_signal(signal.SIGTERM)
        assert jobs.ends([job], 120) == [85], job.said()
        first = job.said()
    assert re.search(r"process 1 was ended by SIGKILL; all are started again from step [123]0\n", first)
    assert first.endswith("jaxdist.launch: stopped by SIGTERM after 1 restart\n")
    stopped_at = max(losses(first))

    with started([command], env=ENVIRONMENT) as [job]:
        assert jobs.ends([job], 240) == [0], job.said()
        second = job.said()
    assert min(losses(second)) == stopped_at + 1
    found = losses(first) | losses(second)
    assert found == pytest.approx(expected, abs=2e-6)


@pytest.mark.slow
def test_its_slurm_job_is_asked_to_stop_and_requeued(cluster, tmp_path, expected):
    folder = tmp_path / "its run"
    launch = (sys.executable, "-m", "jaxdist.launch", "slurm", "--nodes=2", "--time=60", f"--run-dir={folder}")
    said = cluster.run(*launch, "--submit", "--", SCRIPT, "--folder", folder, **ENVIRONMENT)
    [number] = re.findall(r"submitted job (\d+);", said)
    log = folder / "slurm" / f"{number}.log"

    def shown() -> str:
        return log.read_text(errors="replace") if log.exists() else ""

    def steps() -> dict[int, float]:
        return losses(re.sub("^0: ", "", shown(), flags=re.MULTILINE))

    cluster.until(lambda: 15 in steps(), 240, shown)
    cluster.run("scancel", "--signal=USR1", "--batch", number)  # as Slurm does before the time is over
    cluster.until(lambda: cluster.job(number)["JobState"] == "PENDING", 60, shown)
    stopped_at = max(steps())
    assert f"exit code 85; requeued; the newest checkpoint is that of step {stopped_at + 1}\n" in shown()
    cluster.at_once(number)
    cluster.wait(number, "COMPLETED", 240, log)
    assert len(re.findall(rf"^0: step {stopped_at} ", shown(), re.MULTILINE)) == 1
    assert steps() == pytest.approx(expected, abs=2e-6)
    assert shown().endswith("done\n")
