"""`fit` in processes of its own: killed without a word, and under the launcher, on two of them."""

import os
import re
import signal
import sys
from pathlib import Path

import pytest

from tests import forks
from tests.cluster.test_own_script import process_1
from tests.faults import jobs
from tests.fit.conftest import losses
from tests.processes import ROOT, started

ENVIRONMENT = os.environ | {"JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1"}
EXAMPLES = ROOT / "examples"

LAST = "200"
"""Steps of the script, which takes some seconds for them."""

KILLS = [(2, 0.01), (7, 0.0), (10, 0.03), (16, 0.02), (23, 0.01)]
"""After which step, and how many seconds later: within a step, while it is saved, and before the first save."""

CUTS = {"arrays": KILLS, "state_dict": KILLS[0::2], "grain iterator": KILLS[1::2]}
"""What is saved, and when, is no matter of the form: one of them is killed at all moments, two share the moments."""


def run(folder: Path, form: str, mesh: str, *kill: object, code: int = 0) -> None:
    command = [sys.executable, "-m", "tests.fit.killed", *map(str, (folder, form, mesh, *kill))]
    done = forks.run(command, env=ENVIRONMENT, cwd=ROOT, timeout=240)
    assert done.returncode == code, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("form", CUTS)
def test_kills_and_another_mesh(form, tmp_path):
    """To the bit up to the last kill; then on other devices. 4 to 7 processes, each 3 to 4 s of CPU time."""
    if form.startswith("grain"):
        pytest.importorskip("grain")
    run(tmp_path / "straight", form, "4x1x1")
    for kill in CUTS[form]:
        run(tmp_path / "cut", form, "4x1x1", *kill, code=-signal.SIGKILL)
    before = losses(tmp_path / "cut")
    wanted = losses(tmp_path / "straight")
    assert before.items() <= wanted.items()
    assert max(before) >= CUTS[form][-1][0] - 1
    run(tmp_path / "cut", form, "2x1x1")
    found = losses(tmp_path / "cut")
    assert list(found) == list(range(1, 31))
    assert found == pytest.approx(wanted, rel=1e-5)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The losses of the script in one process, and what it says."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    command = [sys.executable, EXAMPLES / "fit_script.py", "--folder", folder, "--steps", LAST]
    done = forks.run(command, env=ENVIRONMENT, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "its guess: [" in done.stdout
    found = losses(folder)
    assert list(found) == list(range(1, int(LAST) + 1))
    assert found[60] < 0.1 * found[1]
    return found


@pytest.mark.slow
def test_two_processes_are_killed_and_stopped_and_one_goes_on(tmp_path, alone):
    """The launcher starts them again after the kill, and hands the stop on. 15 s of CPU time."""
    folder = tmp_path / "its run"
    launch = [sys.executable, "-m", "jaxdist.launch", "local", "--processes=2", f"--run-dir={folder}", "--"]
    script = [str(EXAMPLES / "fit_script.py"), "--folder", str(folder), "--steps"]
    with started([[*launch, *script, LAST]], env=ENVIRONMENT) as [job]:
        jobs.until(lambda: jobs.saved(folder) >= 10, [job])
        os.kill(process_1(job), signal.SIGKILL)
        jobs.until(lambda: "restart" in job.said() or "started again" in job.said(), [job])
        jobs.until(lambda: "from the checkpoint of step" in job.said(), [job])
        last = jobs.saved(folder)
        jobs.until(lambda: jobs.saved(folder) > last, [job])
        job.send_signal(signal.SIGTERM)
        assert jobs.ends([job], 120) == [85], job.said()
        first = job.said()
    assert re.search(r"process 1 was ended by SIGKILL; all are started again from step \d+0\n", first)
    stopped = int(re.search(r"stopped by SIGTERM: step (\d+) is saved; the same command continues", first)[1])
    assert max(losses(folder)) <= stopped < int(LAST)

    done = forks.run([sys.executable, *script, LAST], env=ENVIRONMENT, timeout=240)
    assert done.returncode == 0, done.stderr
    assert f"from the checkpoint of step {stopped}\n" in done.stderr
    assert losses(folder) == pytest.approx(alone, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--by-state",)], ids=["rows", "iterator"])
def test_the_example_of_grain_learns_and_goes_on(options, tmp_path):
    """8 s of CPU time."""
    pytest.importorskip("grain")
    command = [sys.executable, EXAMPLES / "fit_grain.py", "--folder", tmp_path / "run", *options, "--steps"]
    for steps in ("30", "60"):
        done = forks.run([*command, steps], env=ENVIRONMENT, timeout=240)
        assert done.returncode == 0, done.stderr
    assert "from the checkpoint of step 30\n" in done.stderr
    assert losses(tmp_path / "run")[60] < 0.05


@pytest.mark.slow
def test_iterators_that_differ_between_processes_go_on(tmp_path):
    """Each process gets its own state back. 15 s of CPU time."""
    launch = [sys.executable, "-m", "jaxdist.launch", "local", "--processes=2"]
    for name, at in (("straight", "0"), ("cut", "7")):
        folder = tmp_path / name
        command = [*launch, f"--run-dir={folder}", "--", str(ROOT / "tests" / "fit" / "own_rows.py"), str(folder), at]
        environment = ENVIRONMENT | {"PYTHONPATH": str(ROOT)}
        done = forks.run(command, env=environment, timeout=240)
        assert done.returncode == 0, done.stderr
    said = done.stderr + done.stdout
    assert "process 1 was ended by SIGKILL" in said
    assert re.search(r"from the checkpoint of step [36]\n", said)
    assert losses(tmp_path / "cut") == losses(tmp_path / "straight")
    assert list(losses(tmp_path / "cut")) == list(range(1, 13))
