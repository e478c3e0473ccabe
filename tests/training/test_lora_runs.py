"""LoRA runs from their base to the end: what a checkpoint holds, and that no other base will do."""

import json
import random
import shutil
from pathlib import Path

import numpy as np
import pytest

from jaxdist import checkpoints, evaluate, generate, train
from jaxdist.config import RequestError
from jaxdist.training.base_weights import base_of
from jaxdist.training.checkpoint.stored_arrays import open_arrays
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
    assert facts["base"] == base_of(Path("base")).fact()
    assert facts["base"]["path"] == str(beside / "base")


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
        with pytest.raises(RequestError, match=r"but there is nothing at \S*base; put these weights back there"):
            COMMANDS[command]()
    finally:
        Path("elsewhere").rename("base")


def test_evaluate_finds_the_loss_of_the_run(beside, capsys):
    assert evaluate.main(["run", "--mesh=1x2x1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["loss"]
    (*_, last) = [line["validation_loss"] for line in lines(Path("run")) if "validation_loss" in line]
    assert found == pytest.approx(last, rel=1e-6)


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
