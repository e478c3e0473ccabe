"""LoRA runs from their base to the end: what a checkpoint holds, and that no other base will do."""

import json
import operator
import random
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdist import checkpoints, evaluate, generate, train
from jaxdist.config import Config, RequestError, lora
from jaxdist.request import load
from jaxdist.sharding import named
from jaxdist.training.checkpoint.stored_arrays import open_arrays
from jaxdist.training.run import Run
from jaxdist.weights.base import base_for, base_of
from jaxdist.weights.source import source_of
from tests.training.conftest import over
from tests.training.curves import close, lines, parameters

pytestmark = pytest.mark.slow

GOLDEN = Path(__file__).parent.parent / "huggingface" / "golden" / "llama31"
WORDS = ["the", "cat", "sat", "on", "a", "mat", "dog", "ran"]

OPTIONS = [
    "--data.path=text.txt", "--validation.batches=0", "--validation.every=2", "--train.global-batch-size=8",
    "--train.steps=4", "--checkpoint.every=2", "--log.every=1", "--log.tensorboard=false", "--precision=float32",
    "--optimizer.learning-rate=1e-2", "--optimizer.warmup=0", "--model.sequence=32", "--model.lora-rank=2",
]  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a base in `base`, a text, and a LoRA run beside it that has ended, on 2x2x1 with ZeRO 3."""
    folder = tmp_path_factory.mktemp("lora")
    numbers = random.Random(0)
    text = "\n\n".join(" ".join(numbers.choices(WORDS, k=60)) for _ in range(60))
    (folder / "text.txt").write_text(text)
    shutil.copytree(GOLDEN, folder / "base")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert train.main(["--init-from=base", "--run-dir=run", *OPTIONS, "--mesh=2x2x1", "--parallel.zero=3"]) == 0
    return folder


@pytest.fixture
def beside(place, monkeypatch):
    monkeypatch.chdir(place)
    return place


def test_a_checkpoint_holds_the_adapters_and_names_the_base(beside):
    arrays = open_arrays(Path("run/checkpoints/4/params").resolve())
    assert all(".lora." in name for name in arrays)
    assert len(arrays) == 2 * 7
    facts = json.loads(next(Path("run/checkpoints/4").rglob("*facts*/*")).read_text())
    assert {"base": facts["base"]} == base_of(Path("base")).facts()
    assert facts["base"]["path"] == str(beside / "base")


def first_loss(config: Config) -> float:
    """The validation loss of a new run before its first step."""
    run = Run(config)
    run.open_data()
    with jax.set_mesh(run.mesh):
        state = base_for(config, None).begin(run, source_of(config.init_from), say=print)
        return run.validate(run.step.whole(state), state.variables, batches=2)["loss"]


def test_before_the_first_step_the_loss_is_that_of_the_base(beside):
    adapted = load("run/config.toml", {"mesh": "1x2x1"})
    dense = adapted.with_knobs({"model.lora_rank": 0})
    assert first_loss(adapted) == pytest.approx(first_loss(dense), rel=1e-6)


def test_a_checkpoint_is_as_large_as_adapters_and_their_optimizer(beside):
    """Not as large as the base: three numbers in f32 for each of an adapter, and those of the run itself."""
    run = Run(load("run/config.toml", {}))
    with jax.set_mesh(run.mesh):
        adapters = sum(leaf.size for leaf in jax.tree.leaves(run.engine.abstract_logical().params))
        assert 3 * 4 * adapters <= run.engine.checkpoint_bytes <= 3 * 4 * adapters + 32


def test_the_listing_names_the_base_of_each_step(beside, capsys):
    assert checkpoints.main(["run"]) == 0
    (*_, last) = capsys.readouterr().out.splitlines()
    base = base_of(Path("base"))
    assert last == f"adapters of step 2, 4 beside {base.path} of digest {base.digest}"
    assert checkpoints.main(["run", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["checkpoints"]
    assert all({"base": row["base"]} == base.facts() for row in rows)


@pytest.mark.exhaustive
def test_a_run_goes_back_on_another_mesh(beside, tmp_path):
    again = tmp_path / "again"
    shutil.copytree("run", again)
    assert train.main(["--init-from=base", f"--run-dir={again}", *OPTIONS, "--mesh=1x1x2", "--resume=2"]) == 0
    close(lines(again), lines(Path("run")))


def test_a_run_goes_back_to_the_same_bits_beside_a_base_that_has_moved(beside, tmp_path):
    shutil.copytree("base", tmp_path / "moved")
    shutil.copytree("run", tmp_path / "run")
    argv = [f"--init-from={tmp_path / 'moved'}", f"--run-dir={tmp_path / 'run'}", *OPTIONS, "--mesh=2x2x1"]
    assert train.main([*argv, "--parallel.zero=3", "--resume=2"]) == 0
    np.testing.assert_array_equal(parameters(tmp_path / "run", 4), parameters(Path("run"), 4))


COMMANDS = {
    "evaluate": lambda: evaluate.main(["run"]),
    "generate": lambda: generate.main(["run"]),
    "export": lambda: checkpoints.main(["run", "--export", "out/"]),
    "resume": lambda: train.main(["--init-from=base", "--run-dir=run", *OPTIONS, "--resume=2"]),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_another_base_is_refused_by_name(beside, command):
    (first, *_) = sorted(Path("base").glob("*.safetensors"))
    content = first.read_bytes()
    first.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    try:
        with pytest.raises(RequestError, match=r"base of digest \w{16}, but \S*base has digest \w{16}; put the same"):
            COMMANDS[command]()
    finally:
        first.write_bytes(content)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_missing_base_is_refused_by_name(beside, command):
    Path("base").rename("elsewhere")
    try:
        with pytest.raises(RequestError, match=r"but there is nothing at \S*base; put the same weights back there"):
            COMMANDS[command]()
    finally:
        Path("elsewhere").rename("base")


def test_evaluate_finds_the_loss_of_the_run(beside, capsys):
    assert evaluate.main(["run", "--mesh=1x2x1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["loss"]
    (*_, last) = [line["validation_loss"] for line in lines(Path("run")) if "validation_loss" in line]
    assert found == pytest.approx(last, rel=1e-6)


def test_a_new_run_holds_its_base_once():
    model = dict(family="llama", layers=2, embed=16, heads=2, vocab=32, sequence=8, lora_rank=2)
    run = Run(Config(mesh="1x1x1", model=model))
    with jax.set_mesh(run.mesh):
        base = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype, device=a.sharding), run.engine.abstract_frozen())
        state = run.engine.begin_beside(base)
    assert all(map(operator.is_, jax.tree.leaves(state.frozen), jax.tree.leaves(base)))
    assert all(lora.is_adapter(name) for name in named(state.params))


def test_a_lora_run_is_no_base(beside):
    with pytest.raises(RequestError, match="is a LoRA run, whose checkpoints hold adapters alone; merge them"):
        train.main(["--init-from=run", "--run-dir=next", *OPTIONS])


def test_a_run_of_ours_is_a_base(beside, tmp_path):
    small = [word for word in OPTIONS if "lora" not in word]
    sizes = ["--model.layers=2", "--model.embed=16", "--model.heads=2", "--model.vocab=300"]
    assert train.main([*small, *sizes, f"--run-dir={tmp_path / 'whole'}"]) == 0
    adapted = over(OPTIONS, *sizes, "--mesh=2x1x1", "--precision=mixed", "--model.lora-base=bfloat16")
    assert train.main([*adapted, f"--init-from={tmp_path / 'whole'}", f"--run-dir={tmp_path / 'adapted'}"]) == 0
    losses = [line["loss"] for line in lines(tmp_path / "adapted") if "loss" in line]
    last = [line["validation_loss"] for line in lines(tmp_path / "whole") if "validation_loss" in line][-1]
    assert abs(losses[0] - last) < 0.2
    assert losses[-1] < losses[0]
