"""A result that is not finite ends a command with 1 and a sentence: the weights are finite here, and the logits not."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxdist import evaluate, generate, train
from jaxdist.bench import scaling, step
from jaxdist.config import NotFinite
from jaxdist.process.exit_codes import DONE, FAILED
from jaxdist.request import outcome
from tests.training.conftest import SMALL, over
from tests.training.curves import lines

LLAMA = Path(__file__).parent.parent / "huggingface" / "golden" / "llama31"
ONE_DEVICE = ["--mesh=1x1x1", "--model.sequence=16"]


@pytest.fixture(scope="module")
def overflowing(tmp_path_factory) -> Path:
    """The tiny model with a last norm so large that every logit overflows."""
    folder = Path(shutil.copytree(LLAMA, tmp_path_factory.mktemp("overflow") / "model"))
    for path in folder.glob("*.safetensors"):
        tensors = load_file(path)
        if "model.norm.weight" in tensors:
            tensors["model.norm.weight"] = np.full_like(tensors["model.norm.weight"], 3e38)
            save_file(tensors, path)
    return folder


@pytest.fixture(scope="module")
def texts(tmp_path_factory) -> list[Path]:
    folder = tmp_path_factory.mktemp("texts")
    for name in ("a.txt", "b.txt"):
        (folder / name).write_text("the loss of every mesh is one " * 8)
    return [folder / "a.txt", folder / "b.txt"]


@pytest.mark.parametrize("more", [[], ["--json"]], ids=["words", "json"])
def test_losses_are_refused_by_file(overflowing, texts, capsys, more):
    argv = [str(overflowing), *ONE_DEVICE, f"--data.validation-path={texts[0]},{texts[1]}", *more]
    assert outcome(evaluate.main, argv) == FAILED
    out, errors = capsys.readouterr()
    assert out == ""
    assert errors.startswith(f"jaxdist.evaluate: the loss of '{texts[0]}' is ")
    assert errors.endswith(f"with the weights of {overflowing}; take the weights of another --checkpoint, or another "
                           "model\n")  # fmt: skip


def test_scores_are_refused_by_question(overflowing, tmp_path, capsys):
    path = tmp_path / "q.jsonl"
    row = {"context": "the loss of", "choices": [" one", " every mesh"], "label": 0}
    path.write_text(12 * (json.dumps(row) + "\n"))
    assert outcome(evaluate.main, [str(overflowing), *ONE_DEVICE, f"--choices={path}", "--json"]) == FAILED
    out, errors = capsys.readouterr()
    assert out == ""
    *named, last = errors.splitlines()
    assert len(named) == 10
    assert named[1].startswith(f"jaxdist.evaluate: choice 0 of line 2 of --choices '{path}' has the log probability ")
    assert last.startswith("jaxdist.evaluate: 12 of 12 questions cannot be answered with the weights of ")


@pytest.mark.parametrize("more", [["--temperature=0"], ["--samples=2", "--json"]], ids=["greedy", "drawn"])
def test_text_is_refused(overflowing, more, capsys):
    words = r"^token 1 of text 1 cannot be drawn \([12] of [12] texts\), because the model's logits are NaN or infinite"
    with pytest.raises(NotFinite, match=words):
        generate.main([str(overflowing), *ONE_DEVICE, "--prompt=the loss", *more])
    assert "texts" not in capsys.readouterr().out


def test_a_run_whose_steps_are_all_skipped_is_not_done(overflowing, texts, tmp_path, capsys):
    """Fewer steps than train.max_skipped, which is why nothing else ends it; so it is with LoRA."""
    argv = [f"--init-from={overflowing}", f"--run-dir={tmp_path / 'run'}", f"--data.path={texts[0]}", *ONE_DEVICE]
    argv += ["--train.steps=2", "--train.global-batch-size=2", "--log.tensorboard=false", "--model.lora-rank=2"]
    assert train.main([*argv, f"--data.validation-path={texts[1]}"]) == FAILED
    assert "stopped: none of the 2 steps was finite, so nothing was learned; there is no ch" in capsys.readouterr().err


def test_a_validation_loss_that_is_not_finite_ends_the_run(text, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("jaxdist.training.run.Run.validate", lambda *_: {"loss": float("inf"), "batches": 1})
    tiny = over(SMALL, "--model.layers=1", "--train.steps=2", "--mesh=1x1x1", "--checkpoint.every=1")
    assert train.main(over(tiny, f"--data.path={text}", f"--run-dir={tmp_path / 'run'}")) == FAILED
    said = capsys.readouterr().err
    assert "stopped: the validation loss after step 2 is inf; the last good checkpoint is that of step 1\n" in said
    assert "done" not in said
    assert [line["validation_loss"] for line in lines(tmp_path / "run") if "validation_loss" in line] == [None]


def test_a_measurement_whose_loss_is_not_finite_fails(capsys, monkeypatch):
    timed = SimpleNamespace(loss=None, run=SimpleNamespace(against_overflow="take another model"))
    monkeypatch.setattr(step, "compile_and_time", lambda *_: timed)
    monkeypatch.setattr(step, "report", lambda _: {"loss": None})
    with pytest.raises(NotFinite, match="the loss of the last step is NaN or infinite; take another model"):
        step.main(["--mesh=1x1x1"])
    measured = [{"mesh": "one device", "loss": 1.0}, {"mesh": "data=2", "loss": None}]
    assert scaling.outcome_of(measured[:1]) == DONE
    assert scaling.outcome_of(measured) == FAILED
    assert capsys.readouterr().err.endswith("the loss of the last step is NaN or infinite on data=2\n")
