"""Runs beside a quantized base: what they hold, what it costs in loss, and that what is exported computes the same."""

import json
import random
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxdist import evaluate, train
from jaxdist.config import Config
from jaxdist.huggingface.folder_arrays import folder_arrays
from jaxdist.huggingface.readable import read
from jaxdist.models.quantization import FORMS
from jaxdist.sharding import named
from jaxdist.training.run import Run
from jaxdist.weights.base import base_of
from jaxdist.weights.quantized_base import as_held, quantized_dims
from tests.huggingface.exported import GOLDEN, model_of
from tests.training.curves import lines

LLAMA = GOLDEN / "llama31"
WORDS = ["the", "cat", "sat", "on", "a", "mat", "dog", "ran"]

OPTIONS = [
    "--data.path=text.txt", "--validation.batches=0", "--validation.every=4", "--train.global-batch-size=8",
    "--checkpoint.every=4", "--log.every=1", "--log.tensorboard=false", "--precision=float32",
    "--optimizer.warmup=0", "--model.sequence=32", "--model.embed=128", "--model.layers=2", "--model.heads=2",
    "--model.vocab=300",
]  # fmt: skip


def held(form: str, mesh: str) -> tuple[dict, str]:
    """(the arrays of a run beside a golden folder, what is said of them)"""
    model = model_of(LLAMA).model_copy(update={"lora_rank": 2, "lora_base": form})
    run = Run(Config(model=model, init_from=LLAMA, mesh=mesh, parallel={"zero": 3}), batch=False)
    with jax.set_mesh(run.mesh):
        said: list[str] = []
        frozen = base_of(LLAMA).read(run, said.append)
        like = jax.tree.map(lambda a: (a.shape, a.dtype, a.sharding.spec), run.engine.abstract_frozen())
        assert jax.tree.map(lambda a: (a.shape, a.dtype, a.sharding.spec), frozen) == like
        return named(jax.device_get(frozen)), said[0]


@pytest.mark.parametrize("form", [pytest.param("int8", marks=pytest.mark.slow), "nf4"])
def test_a_run_holds_the_numbers_that_an_export_adds_to_whatever_its_mesh(form):
    arrays, said = held(form, "2x2x1")
    model = model_of(LLAMA).model_copy(update={"lora_rank": 2, "lora_base": form})
    off = whole = 0.0
    with folder_arrays(LLAMA, model) as files:
        for name, dim in quantized_dims(model).items():
            own = {key.removeprefix(f"{name}."): a for key, a in arrays.items() if key.startswith(f"{name}.")}
            numbers = FORMS[form].decode(np, own, dim)
            array = as_held(model, name, files[name])
            np.testing.assert_array_equal(numbers, read(array, (slice(None),) * numbers.ndim))
            # A region whose blocks are cut.
            part = (slice(1, 2), *(slice(1, size) for size in numbers.shape[1:]))
            np.testing.assert_array_equal(numbers[part], read(array, part))
            w = read(files[name], (slice(None),) * numbers.ndim).astype(np.float64)
            off += np.sum((numbers - w) ** 2)
            whole += np.sum(w**2)
    assert f"quantized to {form}" in said
    assert f"off by {(off / whole) ** 0.5:.2%}" in said
    if form == "nf4":
        on_one, _ = held(form, "1x1x1")
        jax.tree.map(np.testing.assert_array_equal, on_one, arrays)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a text and a run of ours in `whole`, which has learned something of it."""
    folder = tmp_path_factory.mktemp("quantized")
    numbers = random.Random(0)
    text = "\n\n".join(" ".join(numbers.choices(WORDS, k=60)) for _ in range(60))
    (folder / "text.txt").write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        options = [*OPTIONS, "--optimizer.learning-rate=1e-2", "--train.steps=40"]
        assert train.main([*options, "--run-dir=whole", "--mesh=2x1x1"]) == 0
    return folder


def tuned(base: str, mesh: str, *more: str) -> list[dict]:
    """The figures of four steps beside that run."""
    options = [*OPTIONS, "--train.steps=4", "--model.lora-rank=2", f"--model.lora-base={base}", "--init-from=whole"]
    assert train.main([*options, "--optimizer.learning-rate=1e-3", f"--run-dir={base}", f"--mesh={mesh}", *more]) == 0
    return lines(Path(base))


def losses(of: list[dict], name: str = "loss") -> list[float]:
    return [line[name] for line in of if name in line]


@pytest.mark.exhaustive
def test_the_loss_is_within_one_percent_of_that_of_a_float32_base(place, monkeypatch, capsys):
    monkeypatch.chdir(place)
    plain = tuned("float32", "2x1x1")
    assert losses(plain)[0] < 3, "the base has learned nothing, so that nothing can be lost"
    found = tuned("nf4", "1x2x2", "--pipeline.microbatches=2")
    np.testing.assert_allclose(losses(found), losses(plain), rtol=0.01)
    np.testing.assert_allclose(losses(found, "validation_loss"), losses(plain, "validation_loss"), rtol=0.01)
    capsys.readouterr()
    assert evaluate.main(["nf4", "--mesh=2x1x1", "--json"]) == 0
    own = json.loads(capsys.readouterr().out)["loss"]
    assert own == pytest.approx(losses(found, "validation_loss")[-1], rel=1e-6)
