"""`--mesh auto`: the plan for the devices that are there, and a run that follows it."""

import sys

import pytest

from jaxdist import train
from jaxdist.config import RequestError
from jaxdist.planning.clusters import cluster
from jaxdist.planning.hardware import GPUS
from jaxdist.planning.search.automatic import WHOLE, Found, cluster_of, plan
from jaxdist.planning.search.plan import search
from jaxdist.request import load
from tests import forks
from tests.training.curves import alike

TINY = ["--model.layers=1", "--model.sequence=32", "--train.steps=3", "--train.global-batch-size=8", "--log.every=1"]


def gpus(name: str, count: int = 8, per_host: int = 8, memory: float = 0) -> Found:
    return Found(GPUS[name].kind, "gpu", count, per_host, int(memory))


def test_the_cluster_is_that_of_the_gpus_with_the_hosts_and_memory_that_are_there():
    h100, here = cluster("h100-ndr"), cluster_of(gpus("h100", 8, per_host=4, memory=60e9))
    assert (here.gpu, here.per_host, here.memory) == ("h100", 4, WHOLE * 60e9)
    assert (here.across, here.inside, here.peak) == (h100.across, h100.inside, h100.peak)
    assert cluster_of(gpus("h100", memory=85e9)).memory == h100.memory
    assert cluster_of(gpus("gh200")).name == "alps-gh200"
    assert cluster_of(Found("cpu", "cpu", 2, 2, 0)).name == "cpu"


def test_a_gpu_that_no_cluster_has():
    with pytest.raises(RequestError, match=r"--mesh auto knows NVIDIA A100.*, but this is NVIDIA L4; write a mesh"):
        cluster_of(Found("NVIDIA L4", "gpu", 8, 8, 0))


def test_the_plan_is_that_of_the_cluster_and_fits_what_xla_has():
    config = load("llama_8b", {})
    whole, tight = plan(config, gpus("h100", 16)).ranked[0], plan(config, gpus("h100", 16, memory=50e9)).ranked[0]
    assert whole.config == search(config, 16, cluster("h100-ndr")).ranked[0].config
    assert whole.memory.total > WHOLE * 50e9 > tight.memory.total


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--parallel.zero=1"], "--mesh auto decides --parallel.zero too; leave it out, or write the mesh"),
        (["--train.accumulation=2", "--model.remat=block"], "decides --train.accumulation, --model.remat too"),
        (["--dry-run"], "--dry-run cannot be combined with --mesh auto"),
    ],
)
def test_what_auto_decides_is_not_asked_for_beside_it(argv, words):
    with pytest.raises(RequestError, match=words):
        train.main(["--mesh=auto", *argv])


@pytest.mark.slow
def test_a_run_of_two_processes_follows_its_plan(tmp_path):
    """And learns what one device learns."""
    for folder, command in {
        "auto": ["jaxdist.launch", "local", "--processes=2", "--mesh=auto"],
        "one": ["jaxdist.train", "--mesh=1x1x1"],
    }.items():
        words = [sys.executable, "-m", *command, *TINY, f"--run-dir={tmp_path / folder}"]
        done = forks.run(words, timeout=300)
        assert done.returncode == 0, done.stderr
        assert ("plan  " in done.stderr) == (folder == "auto")
    assert load(str(tmp_path / "auto" / "config.toml"), {}).mesh == "2x1x1"
    alike(tmp_path / "auto", tmp_path / "one", steps=3)
