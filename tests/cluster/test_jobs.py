"""Jobs of a real Slurm, written by `launch slurm`: whatever happens to one, its run goes on as one process's would."""

import math
import os
import re
import shlex
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from jaxdist import train as command
from tests.cluster.conftest import LONG
from tests.faults.jobs import saved, step_of
from tests.training.curves import alike

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]

PYTHON = sys.executable
LAUNCH = (PYTHON, "-m", "jaxdist.launch", "slurm")

PATIENCE = 240
"""Seconds for a start, on machines that are busy."""


def submitted(cluster, *words: str) -> tuple[str, Path]:
    """(number, log) of a job."""
    said = cluster.run(*LAUNCH, *words, "--submit")
    number, log = re.search(r"submitted job (\d+); its log is (\S+),", said).groups()
    return number, Path(log)


def test_a_job_that_runs_out_of_time_is_requeued_loses_a_node_and_is_cancelled(cluster, network, words, tmp_path, same):
    """One run, four starts: on 3 nodes, and when one is lost on 2. None of its steps differs from one process's."""
    folder = tmp_path / "run"
    cluster.run("scontrol", "update", "nodename=n3", "state=drain", "reason=test")
    try:
        # Slurm asks to stop 110 s before the limit: at once, where the limit is two minutes away.
        options = words("--mesh=-1x1x1", *LONG, "--train.accumulation=2", "--checkpoint.grace-seconds=80")
        number, log = submitted(cluster, *options, "--nodes=2-3", "--time=60")
        said = lambda: log.read_text(errors="replace") if log.exists() else ""
        job = lambda: cluster.job(number)
        until = lambda true: cluster.until(true, PATIENCE, lambda: f"{said()}\n{job()}")

        def starts(times: int, more: int = 10) -> int:
            """Wait for a start that has made steps. The step that it went on from."""
            until(lambda: said().count("compiled ") >= times)
            before = step_of(folder)
            until(lambda: step_of(folder) >= before + more)
            until(lambda: saved(folder) >= before)
            found = re.findall(r"from the checkpoint of step (\d+)", said())
            return int(found[-1]) if found else 0

        def requeued(times: int) -> int:
            """Wait until it is, and let it start at once. The newest step that is saved."""
            until(lambda: job()["JobState"] == "PENDING" and job()["Restarts"] == str(times))
            until(lambda: not cluster.run("squeue", "-h", "--steps", f"--jobs={number}"))
            newest = saved(folder)
            cluster.run("scontrol", "update", f"jobid={number}", "TimeLimit=60")
            cluster.at_once(number)
            return newest

        assert starts(1) == 0
        assert "3 x cpu" in said()
        hours, minutes, _ = map(int, job()["RunTime"].split(":"))
        cluster.run("scontrol", "update", f"jobid={number}", f"TimeLimit={60 * hours + minutes + 2}")  # it is over soon
        newest = requeued(1)
        assert f"stopped by SIGUSR1: step {newest} is saved" in said()
        assert f"requeued, to continue from step {newest}" in said()

        assert starts(2) == newest
        cluster.run("scontrol", "requeue", number)
        newest = requeued(2)
        assert f"stopped by SIGTERM: step {newest} is saved" in said()

        assert starts(3) == newest
        network.cut("n2")
        newest = requeued(3)
        assert "NODE FAILURE" in said()

        assert starts(4) == newest
        assert "2 x cpu" in said()
        assert "note        train.accumulation is 3 in the place of 2, because" in said()
        cluster.run("scancel", number)
        assert cluster.wait(number, "CANCELLED", PATIENCE)["Restarts"] == "3"
        until(lambda: f"stopped by SIGTERM: step {saved(folder)} is saved" in said())
        time.sleep(2)
        assert job()["JobState"] == "CANCELLED"
    finally:
        network.join("n2")
        cluster.run("scontrol", "update", "nodename=n3", "state=resume")
        cluster.run("scontrol", "reconfigure")  # a node that is back is asked at once, and not in half a minute
        cluster.until(lambda: cluster.nodes("idle") == 4, 60, "nodes to come back")
    same(folder)


@pytest.mark.exhaustive
def test_an_automatic_mesh_is_planned_again_for_the_nodes_that_are_left(cluster, network, words, tmp_path, same):
    """4 nodes, and 3 after one is lost: another mesh, the same batch, and each step as of one process."""
    folder = tmp_path / "run"
    try:
        number, log = submitted(cluster, *words("--mesh=auto", *LONG), "--nodes=3-4", "--time=60")
        said = lambda: log.read_text(errors="replace") if log.exists() else ""
        until = lambda true: cluster.until(true, PATIENCE, lambda: f"{said()}\n{cluster.job(number)}")
        until(lambda: saved(folder) >= 5)
        network.cut("n2")
        until(lambda: cluster.job(number)["JobState"] == "PENDING")
        until(lambda: not cluster.run("squeue", "-h", "--steps", f"--jobs={number}"))
        newest = saved(folder)
        cluster.at_once(number)
        until(lambda: step_of(folder) >= newest + 10)
        assert f"from the checkpoint of step {newest}" in said()
        assert cluster.job(number)["NodeList"] == "n[0-1,3]"
        meshes = re.findall(r"^mesh        (.+?);", said(), re.MULTILINE)
        assert [math.prod(map(int, re.findall(r"=(\d+)", mesh))) for mesh in meshes] == [4, 3]
        cluster.run("scancel", number)
        cluster.wait(number, "CANCELLED", PATIENCE)
    finally:
        network.join("n2")
        cluster.run("scontrol", "reconfigure")
        cluster.until(lambda: cluster.nodes("idle") == 4, 60, "nodes to come back")
    same(folder)


def test_a_spare_node_takes_the_place_of_a_killed_one(cluster, network, words, tmp_path, same):
    """In the same job, which waits in no queue: 3 nodes of its 4 run. None of its steps differs from one process's."""
    folder = tmp_path / "run"
    try:
        number, log = submitted(cluster, *words("--mesh=-1x1x1", *LONG), "--nodes=3", "--spares=1", "--time=60")
        said = lambda: log.read_text(errors="replace") if log.exists() else ""
        until = lambda true: cluster.until(true, PATIENCE, lambda: f"{said()}\n{cluster.job(number)}")
        until(lambda: saved(folder) >= 5)
        network.cut("n1")
        until(lambda: "started again on " in said())
        newest = saved(folder)
        assert f"on n0 n1 n2; started again on n0 n2 n3, to continue from step {newest}" in said()
        until(lambda: step_of(folder) >= newest + 10)
        assert f"from the checkpoint of step {newest}" in said()
        assert said().count("3 x cpu") == 2
        job = cluster.job(number)
        assert (job["JobState"], job["Restarts"]) == ("RUNNING", "0")
        cluster.run("scancel", number)
        cluster.wait(number, "CANCELLED", PATIENCE)
        until(lambda: f"stopped by SIGTERM: step {saved(folder)} is saved" in said())
    finally:
        network.join("n1")
        cluster.run("scontrol", "reconfigure")
        cluster.until(lambda: cluster.nodes("idle") == 4, 60, "nodes to come back")
    same(folder)


@pytest.mark.exhaustive
def test_a_node_that_the_heartbeats_name_is_excluded_from_the_next_start(cluster, words, tmp_path):
    """One of its processes is stopped: Slurm finds the node well, and would give it to the job again."""
    folder = tmp_path / "run"
    options = words("--mesh=-1x1x1", *LONG, "--fault.heartbeat-seconds=30")
    number, log = submitted(cluster, *options, "--nodes=3", "--time=60")
    said = lambda: log.read_text(errors="replace") if log.exists() else ""
    until = lambda true: cluster.until(true, PATIENCE, lambda: f"{said()}\n{cluster.job(number)}")
    until(lambda: saved(folder) >= 5)
    (task,) = tasks_on("n1", folder)
    os.kill(task, signal.SIGSTOP)
    until(lambda: "requeued, to continue" in said())
    until(lambda: cluster.job(number)["ExcNodeList"] == "n1")
    assert re.search(r"node n1 was named: process 1 on n1 is lost or cut off at step \d+: no heartbeat for", said())
    assert (folder / "heartbeats" / "named.txt").read_text().startswith("n1 ")
    newest = saved(folder)
    until(lambda: not cluster.run("squeue", "-h", "--steps", f"--jobs={number}"))
    cluster.at_once(number)
    until(lambda: step_of(folder) >= newest + 5)
    assert cluster.job(number)["NodeList"] == "n[0,2-3]"
    assert f"from the checkpoint of step {newest}" in said()
    cluster.run("scancel", number)
    cluster.wait(number, "CANCELLED", PATIENCE)


def tasks_on(node: str, folder: Path) -> list[int]:
    """The processes of the run that Slurm has started on a node."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words = (place / "cmdline").read_text().split("\0")
            is_task = "jaxdist.train" in words and f"--run-dir={folder}" in words and words[0] == PYTHON
            if is_task and f"SLURMD_NODENAME={node}" in (place / "environ").read_text().split("\0"):
                found.append(int(place.name))
    return found


@pytest.mark.exhaustive
def test_a_sweep_whose_jobs_share_a_node(cluster, words, tmp_path):
    """`scripts/sweep.sbatch`, two rates of it, each of two processes: they do not meet those of the other."""
    rates = ("1e-4", "2e-4")
    train = [PYTHON, "-m", "jaxdist.train", *words("--mesh=2x1x1")]
    train.remove(f"--run-dir={tmp_path / 'run'}")
    script = (ROOT / "scripts" / "sweep.sbatch").read_text()
    script, found = re.subn(r"^train=\(.* (?=--optimizer)", f"train=({shlex.join(train)} ", script, flags=re.MULTILINE)
    assert found == 1
    (tmp_path / "sweep.sbatch").write_text(script)
    log = tmp_path / "%a.log"
    options = ("--array=0-1", "--ntasks-per-node=2", "--nodelist=n0", f"--output={log}", f"--chdir={tmp_path}")
    cluster.submit(*options, tmp_path / "sweep.sbatch")
    cluster.until(lambda: not cluster.run("squeue", "-h"), PATIENCE, "the array")
    for rate in rates:
        assert command.main([*train[3:], f"--optimizer.learning-rate={rate}", f"--run-dir={tmp_path / rate}"]) == 0
        alike(tmp_path / "runs" / "sweep" / rate, tmp_path / rate, 20)
    with pytest.raises(AssertionError):
        alike(*(tmp_path / rate for rate in rates), 20)


@pytest.mark.parametrize(
    "options",
    [
        ("--nodes=4",),
        ("--nodes=2-4", "--mesh=-1x1x1", "--job-name=a b; rm x"),
        ("--nodes=2-3", "--mesh=auto", "--spares=1"),
        ("--nodes=2", "--gpus-per-node=4", "--mesh=8x1x1", "--time=1-00:00:00"),
        ("--nodes=2", "--gpus-per-node=4", "--mesh=8x1x1", "--tasks-per-node=1", "--env=alps", "--cpus-per-task=2"),
    ],
)
def test_slurm_takes_the_script(cluster, words, tmp_path, options):
    given = {option.partition("=")[0]: option for option in ("--mesh=4x1x1", "--time=12:00:00", *options)}
    script = tmp_path / "job.sbatch"
    script.write_text(cluster.run(*LAUNCH, *words(given.pop("--mesh")), *given.values()))
    assert "to start at" in cluster.run("sbatch", "--test-only", script)
