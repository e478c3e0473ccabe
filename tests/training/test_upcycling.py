"""A mixture of experts begins with the weights of a dense run, on any mesh: its first loss is that of the run."""

import numpy as np
import pytest

from jaxdist import train
from jaxdist.config import RequestError
from jaxdist.training.checkpoint.stored_arrays import open_arrays, whole
from tests.training.conftest import SMALL, over
from tests.training.curves import lines

DENSE = ["--model.family=llama", "--model.mlp=32", "--optimizer.warmup=0", "--validation.every=0"]
MIXTURE = ["--model.family=moe", "--model.experts=4", "--model.experts-per-token=2"]
STEPS = 20


@pytest.fixture(scope="module")
def options(text) -> list[str]:
    return over(SMALL, f"--data.path={text}", *DENSE)


@pytest.fixture(scope="module")
def dense(options, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "dense"
    assert train.main(over(options, f"--run-dir={folder}", "--train.steps=5")) == 0
    return folder


@pytest.fixture(scope="module")
def first_loss(options, dense, tmp_path_factory) -> float:
    """The loss of the dense weights on the first batch."""
    folder = tmp_path_factory.mktemp("runs") / "same"
    assert train.main(over(options, f"--run-dir={folder}", f"--init-from={dense}", "--train.steps=1")) == 0
    return lines(folder)[0]["loss"]


def of_experts(folder, step) -> dict[str, np.ndarray]:
    """The weights of the experts in a checkpoint, [L, E, ...], by name."""
    arrays = open_arrays((folder / "checkpoints" / str(step) / "params").resolve())
    names = ("blocks.mlp.gate_up", "blocks.mlp.down")
    return {name: arrays[name].read(whole(len(arrays[name].shape))) for name in names}


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        "--mesh=data=2,expert=2 --parallel.zero=3 --model.shared-experts=1",
        "--mesh=expert=2,pipeline=2 --pipeline.microbatches=2 --model.router=sigmoid",
    ],
)
def test_the_first_loss_is_that_of_the_dense_weights(options, dense, first_loss, tmp_path, capsys, more):
    folder = tmp_path / "mixture"
    argv = over(options, *MIXTURE, f"--run-dir={folder}", f"--init-from={dense}", "--train.steps=1", *more.split())
    assert train.main(argv) == 0
    assert f"weights     from step 5 of {dense}; each expert is a copy of its MLP" in capsys.readouterr().err
    assert lines(folder)[0]["loss"] == pytest.approx(first_loss, rel=1e-6)


@pytest.mark.slow
def test_experts_are_others_after_some_steps(options, dense, tmp_path):
    folder = tmp_path / "mixture"
    assert train.main(over(options, *MIXTURE, f"--run-dir={folder}", f"--init-from={dense}")) == 0
    for name, experts in of_experts(folder, STEPS).items():
        spread = np.linalg.norm(experts - experts.mean(1, keepdims=True))
        assert spread > 1e-2 * np.linalg.norm(experts), name


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ("--model.router-renormalize=false", r"router_renormalize is false, but init_from .*/dense.* set it to true"),
        ("--model.router-scale=2.5", r"router_scale is 2.5, but init_from .*/dense.* leave it out"),
        ("--model.mlp=64", r"width of 64, but init_from .*/dense.* set model.expert_mlp to 32"),
    ],
)
def test_what_would_compute_something_else_is_refused(options, dense, tmp_path, more, told):
    argv = over(options, *MIXTURE, f"--run-dir={tmp_path / 'mixture'}", f"--init-from={dense}", more)
    with pytest.raises(RequestError, match=told):
        train.main(argv)
    assert not (tmp_path / "mixture").exists()


@pytest.mark.slow
def test_a_run_of_another_kind_is_refused(options, text, dense, tmp_path):
    gpt = over(SMALL, f"--data.path={text}", f"--run-dir={tmp_path / 'gpt'}", "--train.steps=1", "--validation.every=0")
    assert train.main(over(gpt, "--optimizer.warmup=0")) == 0
    argv = over(options, *MIXTURE, f"--run-dir={tmp_path / 'mixture'}", f"--init-from={tmp_path / 'gpt'}")
    with pytest.raises(RequestError, match=r"is a run of model\.family gpt, whose layers are not those of moe"):
        train.main(argv)
