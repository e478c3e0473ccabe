"""Under a real Slurm: the tasks of a step find each other, and are told what is wrong with how they were started."""

import sys

import numpy as np
import pytest

from tests.faults import jobs
from tests.faults.jobs import metrics
from tests.processes import started, wait

PYTHON, TRAIN = sys.executable, ("-m", "jaxdist.train")


def losses(folder) -> list[float]:
    return [line["loss"] for line in metrics(folder) if "loss" in line]


@pytest.fixture(scope="module")
def alone(text, tmp_path_factory):
    """Losses of one process with 4 devices."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    with started(jobs.train(jobs.argv(folder, text, "--mesh=4x1x1"))) as running:
        wait(running, 120)
    return losses(folder)


@pytest.mark.parametrize("tasks", [1, 2])
def test_four_nodes_train_as_one_process_does(cluster, words, tmp_path, alone, tasks):
    mesh = "--mesh=4x1x1" if tasks == 1 else "--mesh=4x2x1"
    said = cluster.run("srun", "-N4", f"--ntasks-per-node={tasks}", PYTHON, *TRAIN, *words(mesh), seconds=300)
    np.testing.assert_allclose(losses(tmp_path / "run"), alone, rtol=1e-5)
    assert said.count("loss") > 0
