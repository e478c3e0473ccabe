"""Under a real Slurm: the tasks of a step find each other, and are told what is wrong with how they were started."""

import sys

import pytest

from jaxdist import train as command
from tests.faults import jobs
from tests.tiers import exhaustive
from tests.training.curves import alike

PYTHON, TRAIN = sys.executable, ("-m", "jaxdist.train")


@pytest.fixture(scope="module")
def alone(text, tmp_path_factory):
    """The run of one process with 4 devices."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    assert command.main(jobs.argv(folder, text, "--mesh=4x1x1")) == 0
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(("nodes", "tasks"), [(2, 2), *exhaustive([(4, 1), (4, 2)])])
def test_nodes_train_as_one_process_does(cluster, words, tmp_path, alone, nodes, tasks):
    mesh = f"--mesh=4x{nodes * tasks // 4}x1"
    said = cluster.run("srun", f"-N{nodes}", f"--ntasks-per-node={tasks}", PYTHON, *TRAIN, *words(mesh), seconds=300)
    alike(tmp_path / "run", alone, 20)
    assert said.count("loss") > 0


@pytest.mark.slow
def test_three_tasks_cannot_have_four_devices(cluster, words):
    said = cluster.run("srun", "-N3", "--ntasks-per-node=1", PYTHON, *TRAIN, *words("--mesh=4x1x1"), code=2)
    assert "4 devices, which do not divide by 3 processes; start 1, 2, 4 processes" in said


@pytest.mark.parametrize(("nodes", "host"), [("n1", "127.0.0.1"), ("n1,n2", "n1")])
def test_tasks_of_one_node_meet_on_its_loopback(cluster, nodes, host):
    program = "from jaxdist.cluster.process_env import *; print(find(ClusterConfig()).coordinator)"
    said = cluster.run("srun", "--quiet", f"--nodelist={nodes}", "-n2", PYTHON, "-c", program)
    assert [line.partition(":")[0] for line in said.split()] == [host, host]


def test_the_tasks_of_a_users_own_script_join(cluster):
    program = "import jaxdist; print(jaxdist.join())"
    said = cluster.run("srun", "-N2", "--ntasks-per-node=1", PYTHON, "-c", program, JAX_PLATFORMS="cpu")
    assert {"process 0 of 2", "process 1 of 2"} <= set(said.splitlines())


def test_a_script_without_srun_is_told_so(cluster, words, tmp_path):
    command = " ".join([PYTHON, *TRAIN, *words("--mesh=4x1x1")])
    number = cluster.submit("-N2", "--ntasks-per-node=2", f"--output={tmp_path / 'log'}", f"--wrap={command}")
    cluster.wait(number, "FAILED", 120, tmp_path / "log")
    assert "this Slurm job has 4 tasks, but this process is none of them; start it with srun" in (
        tmp_path / "log"
    ).read_text(errors="replace")


def test_more_nodes_than_there_are_are_refused_at_the_prompt(cluster, tmp_path):
    asked = ["slurm", "--time=9", f"--run-dir={tmp_path / 'run'}", "--train.global-batch-size=36"]
    said = cluster.run(PYTHON, "-m", "jaxdist.launch", *asked, "--nodes=9", code=2)
    assert "--nodes 9 is more than a job can have: partition main takes 4; ask for fewer" in said
    assert "#SBATCH --nodes=4" in cluster.run(PYTHON, "-m", "jaxdist.launch", *asked, "--nodes=4")


@pytest.mark.slow
def test_steps_inside_a_step_that_share_a_run_are_told_so(cluster, words):
    """Two tasks that each start a step of two: four processes, in two jobs that know nothing of each other."""
    inner = ["srun", "--overlap", "-N1", "-n2", PYTHON, *TRAIN, *words("--mesh=2x1x1")]
    said = cluster.run("srun", "-N1", "-n2", *inner, code=75)
    assert "is in use by process" in said, said
