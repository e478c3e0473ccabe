"""Runs of image classifiers: one loss on every mesh, batch statistics that go on, accuracy, and what does not fit."""

import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from jaxdist import evaluate, generate, train
from jaxdist.config import Config, RequestError
from jaxdist.explain import explain
from jaxdist.explaining.text import lines as lines_of
from jaxdist.mesh import parse_mesh
from jaxdist.mesh.split import Split
from jaxdist.planning import communication
from jaxdist.programs import target
from jaxdist.request import load
from jaxdist.training.run import Run
from tests.tiers import exhaustive, thinned
from tests.training.conftest import over
from tests.training.curves import lines

pytest.importorskip("sklearn", reason="the digits come with scikit-learn: jaxdist[lab]")

SHORT = [
    *("cnn_digits", "--train.steps=6", "--train.global-batch-size=16", "--optimizer.name=sgd", "--optimizer.warmup=1"),
    *("--optimizer.learning-rate=0.05", "--log.every=1", "--log.tensorboard=false", "--checkpoint.every=3"),
    *("--validation.every=3", "--validation.batches=2"),
]


def ran(folder: Path, *more: str) -> Path:
    assert train.main(over(SHORT, f"--run-dir={folder}", *more)) == 0
    return folder


@pytest.fixture(scope="module")
def one_device(tmp_path_factory):
    """A short run on one device with these options."""
    return cache(lambda *more: ran(tmp_path_factory.mktemp("runs") / "one", *more))


def curve(folder: Path) -> np.ndarray:
    """Loss and gradient norm of every step, then loss and accuracy of every validation."""
    names = ("loss", "grad_norm"), ("validation_loss", "validation_accuracy")
    return np.array([[line[name] for name in pair] for pair in names for line in lines(folder) if pair[0] in line])


def saved(folder: Path) -> dict:
    with ocp.CheckpointManager(folder / "checkpoints") as manager:
        items = {name: ocp.args.StandardRestore() for name in ("params", "variables")}
        found = dict(manager.restore(6, args=ocp.args.Composite(**items)).items())
    is_key = lambda a: jax.dtypes.issubdtype(a.dtype, jax.dtypes.prng_key)
    return jax.device_get(jax.tree.map(lambda a: jax.random.key_data(a) if is_key(a) else a, found))


@pytest.mark.parametrize(
    ("mesh", "more"),
    [
        ("replica=2,data=2", ("--parallel.zero=3",)),
        pytest.param("8x1x1", ("--parallel.zero=0",), marks=pytest.mark.exhaustive),
        pytest.param("8x1x1", ("--parallel.zero=1",), marks=pytest.mark.exhaustive),
        pytest.param("4x1x1", ("--parallel.zero=2", "--train.accumulation=2"), marks=pytest.mark.slow),
        pytest.param("4x1x1", ("--parallel.zero=3", "--model.dropout=0.3"), marks=pytest.mark.slow),
        pytest.param("2x1x1", ("--data.augment=crop-flip",), marks=pytest.mark.slow),
    ],
)
def test_equals_one_device(mesh, more, one_device, tmp_path):
    """Under accumulation batch norm sees micro-batches, on one device too."""
    got = ran(tmp_path / "run", f"--mesh={mesh}", *more)
    alone = one_device(*(option for option in more if "zero" not in option))
    np.testing.assert_allclose(curve(got), curve(alone), rtol=1e-4)
    for a, b in zip(jax.tree.leaves(saved(got)), jax.tree.leaves(saved(alone)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def test_a_run_goes_on_with_its_batch_statistics(one_device, tmp_path):
    whole = one_device()
    shutil.copytree(whole, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "6")
    again = ran(tmp_path / "run")
    jax.tree.map(np.testing.assert_array_equal, saved(again), saved(whole))
    np.testing.assert_array_equal(curve(again), curve(whole))


def test_metrics_count_images_and_evaluation_tells_the_accuracy(one_device, capsys):
    folder = one_device()
    last = [line for line in lines(folder) if "loss" in line][-1]
    assert last["images"] == 6 * 16
    assert last["images_per_second"] > 0
    assert last["mfu"] is None
    assert evaluate.main([str(folder), "--mesh=2x1x1"]) == 0
    assert "nats per image over 373 images  accuracy" in capsys.readouterr().out
    with pytest.raises(RequestError, match="family cnn, which generates no text"):
        generate.main([str(folder), "--prompt=a"])


@pytest.mark.slow
def test_augmented_images_are_others(one_device):
    assert abs(curve(one_device())[0, 0] - curve(one_device("--data.augment=crop-flip"))[0, 0]) > 1e-4


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (("--model.channels=3",), "have 1 channel.* model.channels is 3; set it to 1"),
        (("--model.classes=12",), "label|model.classes"),
        (("--model.image=16",), "8x8, and model.image is 16"),
        (("--train.global-batch-size=4096",), "images, fewer than one global batch of 4096"),
    ],
)
def test_data_that_do_not_fit_are_told_and_nothing_is_written(more, told, tmp_path):
    with pytest.raises(RequestError, match=told):
        train.main(over(SHORT, f"--run-dir={tmp_path / 'run'}", *more))
    assert not (tmp_path / "run").exists()


@pytest.mark.exhaustive
@pytest.mark.parametrize("options", [("--mesh=4x1x1", "--parallel.zero=3"), ()], ids=str)
def test_the_labs_network_reads_digits(options, tmp_path):
    """With optimised code: convolutions are slow without. That one device does the same is proved above."""
    command = [sys.executable, "-m", "jaxdist.train", "cnn_digits", f"--run-dir={tmp_path}", *options]
    subprocess.run(command, check=True, env={**os.environ, "XLA_FLAGS": ""})
    assert lines(tmp_path)[-1]["validation_accuracy"] >= 0.97


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "mesh"), [(64, "4x1x1"), (16, "1x1x1")])
def test_rows_that_fill_up_the_last_batch_count_for_nothing(rows, mesh):
    """The loss and accuracy of an evaluation are those of all held-out images at once, computed by hand."""
    knobs = {"mesh": mesh, "train.global_batch_size": str(rows), "train.steps": "10"}
    run = Run(load("cnn_digits", knobs))
    part = run.task.data.validation
    assert part.rows % rows
    with jax.set_mesh(run.mesh):
        state = run.engine.init()
        found = run.validate(state.params, state.variables, 0)
    module = run.model.merge(*jax.device_get((state.params, state.variables)), train=False)
    logits = np.asarray(module(part.read(np.arange(part.rows))), np.float64)
    loss = np.log(np.exp(logits).sum(1)) - logits[np.arange(part.rows), part.labels]
    over = {"batches": -(-part.rows // rows), "images": part.rows}
    means = {"loss": loss.mean(), "accuracy": np.mean(logits.argmax(1) == part.labels)}
    assert found == pytest.approx(means | over, rel=1e-5)


def asked(mesh: str, zero: int, accumulation: int = 1, dropout: float = 0.0) -> Config:
    knobs = {"mesh": mesh, "parallel.zero": str(zero), "train.accumulation": str(accumulation)}
    return load("cnn_digits", {**knobs, "model.dropout": str(dropout)})


@pytest.mark.parametrize(
    ("mesh", "zero", "accumulation"), thinned([("4x1x1", 2, 2), ("replica=2,data=2", 3, 1), ("4x1x1", 3, 2)], 3)
)
def test_bytes_and_collectives_are_predicted(mesh, zero, accumulation):
    """Those of batch norm too: the statistics of every channel, their gradients, and the running ones."""
    found = explain(asked(mesh, zero, accumulation))
    assert found.differences == []
    assert found.program.argument_bytes == found.memory.arguments


@pytest.mark.slow
def test_with_dropout_it_is_told_that_collectives_are_not_predicted():
    """Bytes are; `differences` is not empty, as if all had been found right."""
    found = explain(asked("2x1x1", 0, dropout=0.3))
    text = "\n".join(lines_of(found))
    assert "NOT PREDICTED" not in text
    assert "collectives are not predicted: with dropout" in text
    assert "as predicted" not in text
    assert found.json()["predicted_collectives"] == []
    (row,) = found.json()["differences"]
    assert (row["axis"], row["kind"], row["remark"]) == ("data", "all-reduce", "not predicted")
    assert found.unknown == []
    assert found.unpredicted in found.json()["notes"]
    assert found.program.argument_bytes == found.memory.arguments


@pytest.mark.parametrize(
    ("mesh", "dropout", "told"), [("1x1x1", 0.3, False), ("2x1x1", 0, False), ("2x1x1", 0.3, True)]
)
def test_what_a_compiler_chooses_is_not_predicted(mesh, dropout, told):
    assert bool(communication.unpredicted(Split(asked(mesh, 0, dropout=dropout), parse_mesh(mesh)))) == told


@pytest.mark.slow
@pytest.mark.skipif(not target.available(), reason="JAX's CUDA plug-in is not installed: jaxdist[target]")
@pytest.mark.parametrize(("zero", "accumulation"), [(3, 2), *exhaustive([(0, 1)])])
def test_bytes_and_collectives_of_a_gpu_are_predicted(zero, accumulation):
    found = explain(asked("8x1x1", zero, accumulation), "h100")
    assert found.differences == []
    assert found.program.argument_bytes == found.memory.arguments
