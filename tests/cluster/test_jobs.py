"""Jobs of a real Slurm, written by `launch slurm`: whatever happens to one, its run goes on as one process's would."""

import re
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tests.cluster.conftest import LONG
from tests.faults.jobs import metrics, saved, step_of

pytestmark = pytest.mark.slow

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
        options = words("--mesh=-1x1x1", *LONG, "--checkpoint.grace-seconds=20")
        number, log = submitted(cluster, *options, "--nodes=2-3", "--time=60")
        said = lambda: log.read_text(errors="replace") if log.exists() else ""
        job = lambda: cluster.job(number)

        def starts(times: int, more: int = 10) -> int:
            """Wait for a start that has made steps. The step that it went on from."""
            cluster.until(lambda: said().count("compiled ") >= times, PATIENCE, said)
            before = step_of(folder)
            cluster.until(lambda: step_of(folder) >= before + more, PATIENCE, said)
            cluster.until(lambda: saved(folder) >= before, PATIENCE, said)
            found = re.findall(r"from the checkpoint of step (\d+)", said())
            return int(found[-1]) if found else 0

        def requeued(times: int) -> int:
            """Wait until it is, and let it start at once. The newest step that is saved."""
            cluster.until(lambda: job()["JobState"] == "PENDING" and job()["Restarts"] == str(times), PATIENCE, said)
            cluster.until(lambda: not cluster.run("squeue", "-h", "--steps", f"--jobs={number}"), PATIENCE, said)
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
        assert f"requeued, to go on from step {newest}" in said()

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
        cluster.run("scancel", number)
        assert cluster.wait(number, "CANCELLED", PATIENCE)["Restarts"] == "3"
        cluster.until(lambda: f"stopped by SIGTERM: step {saved(folder)} is saved" in said(), PATIENCE, said)
        time.sleep(2)
        assert job()["JobState"] == "CANCELLED"
    finally:
        network.join("n2")
        cluster.run("scontrol", "update", "nodename=n3", "state=resume")
        cluster.until(lambda: cluster.nodes("idle") == 4, 60, "nodes to come back")
    same(folder)


def test_two_jobs_of_an_array_on_one_node_do_not_meet(cluster, words, tmp_path):
    """A sweep over learning rates, each of two processes; a rate tells whose losses are whose."""
    rates = ("0.001", "0.01")
    train = lambda rate, folder: [
        PYTHON, "-m", "jaxdist.train", *words("--mesh=2x1x1", f"--optimizer.learning-rate={rate}", folder=folder)
    ]  # fmt: skip
    cases = "\n".join(f"{i}) srun {' '.join(train(rate, rate))};;" for i, rate in enumerate(rates))
    script = tmp_path / "sweep.sbatch"
    script.write_text(f"#!/bin/bash\ncase $SLURM_ARRAY_TASK_ID in\n{cases}\nesac\n")
    log = tmp_path / "%a.log"
    array = ("--array=0-1", "--nodes=1", "--ntasks-per-node=2", "--nodelist=n0", f"--output={log}")
    cluster.submit(*array, script)
    cluster.until(lambda: not cluster.run("squeue", "-h"), PATIENCE, "the array")
    found = [[line["loss"] for line in metrics(tmp_path / rate) if "loss" in line] for rate in rates]
    for i, rate in enumerate(rates):
        cluster.run(*train(rate, f"alone-{rate}"))
        alone = [line["loss"] for line in metrics(tmp_path / f"alone-{rate}") if "loss" in line]
        assert len(alone) == 20
        np.testing.assert_allclose(found[i], alone, rtol=1e-5, err_msg=(tmp_path / f"{i}.log").read_text())


@pytest.mark.parametrize(
    "options",
    [
        ("--nodes=4",),
        ("--nodes=2-4", "--mesh=-1x1x1", "--job-name=a b; rm x"),
        ("--nodes=2", "--gpus-per-node=4", "--mesh=8x1x1", "--time=1-00:00:00"),
        ("--nodes=2", "--gpus-per-node=4", "--mesh=8x1x1", "--tasks-per-node=1", "--env=alps", "--cpus-per-task=2"),
    ],
)
def test_slurm_takes_the_script(cluster, words, tmp_path, options):
    given = {option.partition("=")[0]: option for option in ("--mesh=4x1x1", "--time=12:00:00", *options)}
    script = tmp_path / "job.sbatch"
    script.write_text(cluster.run(*LAUNCH, *words(given.pop("--mesh")), *given.values()))
    assert "to start at" in cluster.run("sbatch", "--test-only", script)
