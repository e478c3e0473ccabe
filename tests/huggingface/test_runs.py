"""Runs that begin with a folder of Hugging Face and go on without it; the folder itself, evaluated and continued."""

import json
import os
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxdist import evaluate, generate, train
from jaxdist.cluster import consensus
from jaxdist.config import NotFinite, RequestError
from jaxdist.huggingface.schema import FILES, INDEX
from jaxdist.training import copies
from jaxdist.training.run_dir import RunFolder
from jaxdist.weights.pretrained import keep_files
from jaxdist.weights.source import source_of
from tests.huggingface.exported import run_from

GOLDEN = Path(__file__).parent / "golden"
WORDS = ["the", "cat", "sat", "on", "a", "mat", "dog", "ran"]

SMALL = ["--data.path=text.txt", "--validation.batches=2", "--train.global-batch-size=8", "--log.every=1"]
SMALL += ["--log.tensorboard=false", "--precision=float32"]
STILL = ["--optimizer.learning-rate=1e-9", "--optimizer.warmup=0"]
"""Steps after which the weights are what they were."""


@pytest.fixture
def model(tmp_path, monkeypatch):
    """A folder `model` with weights and a tokenizer, and a text beside it."""
    monkeypatch.chdir(tmp_path)
    numbers = random.Random(0)
    text = "\n\n".join(" ".join(numbers.choices(WORDS, k=60)) for _ in range(60))
    Path("text.txt").write_text(text)
    shutil.copytree(GOLDEN / "llama31", "model")
    return Path("model")


def trained(*options):
    return train.main(["--init-from=model", "--run-dir=run", *SMALL, *options])


def losses(run="run"):
    lines = map(json.loads, Path(run, "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


def contents(folder):
    return {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.iterdir()}


@pytest.mark.slow
def test_a_run_goes_on_to_the_same_loss_when_the_folder_is_gone(model, capsys):
    """On a mesh of its own too: 2x2x1 with ZeRO 3 and then 1x2x1."""
    options = ["--train.steps=2", "--checkpoint.every=1", "--optimizer.learning-rate=1e-2", "--optimizer.warmup=0"]
    assert trained("--mesh=2x2x1", "--parallel.zero=3", *options) == 0
    assert "weights     from model; the optimizer begins anew" in capsys.readouterr().err
    before = losses()
    assert "config.json" in os.listdir("run/huggingface")
    written = Path("run/config.toml").read_text()
    shutil.move("model", "gone")
    assert trained("--mesh=1x2x1", "--resume=1", *options) == 0
    assert "from the checkpoint of step 1" in capsys.readouterr().err
    assert losses()[2] == pytest.approx(before[2], rel=1e-5)
    assert before[2] < before[1]
    same = [line for line in Path("run/config.toml").read_text().splitlines() if not line.startswith(("mesh", "zero"))]
    assert same == [line for line in written.splitlines() if not line.startswith(("mesh", "zero"))]


@pytest.mark.slow
def test_the_loss_of_a_folder_is_that_of_the_run_that_begins_with_it(model, capsys):
    before = contents(model)
    assert evaluate.main(["model", "--data.path=text.txt", "--mesh=1x2x1", "--train.global-batch-size=8"]) == 0
    pretrained = capsys.readouterr().out
    assert pretrained.startswith("weights of model  validation loss ")
    assert generate.main(["model", "--tokens=6", "--temperature=0", "--prompt=the cat", "--model.sequence=16"]) == 0
    text = capsys.readouterr().out
    assert contents(model) == before

    assert trained("--train.steps=1", "--mesh=2x1x1", *STILL) == 0
    shutil.move("model", "gone")
    capsys.readouterr()
    assert evaluate.main(["run", "--train.global-batch-size=8"]) == 0
    assert capsys.readouterr().out.split("loss")[1] == pretrained.split("loss")[1]
    assert generate.main(["run", "--tokens=6", "--temperature=0", "--prompt=the cat"]) == 0
    assert capsys.readouterr().out == text


@pytest.mark.slow
def test_a_folder_is_judged_by_a_file_or_by_questions_and_nothing_else(model, capsys):
    before = contents(model)
    Path("q.jsonl").write_text('{"context": "the cat", "choices": [" sat", " mat"], "label": 0}\n')
    assert evaluate.main(["model", "--data.validation-path=text.txt", "--json"]) == 0
    of_file = json.loads(capsys.readouterr().out)
    assert (of_file["step"], of_file["bytes"]) == (None, Path("text.txt").stat().st_size)
    assert evaluate.main(["model", "--choices=q.jsonl"]) == 0
    assert capsys.readouterr().out.startswith("weights of model  acc ")
    assert contents(model) == before
    Path("model/tokenizer.json").unlink()
    with pytest.raises(RequestError, match=r"'model' has no tokenizer to read questions with; give its --data"):
        evaluate.main(["model", "--choices=q.jsonl"])
    with pytest.raises(RequestError, match=r"'text.txt' is text, and no tokenizer is there to read it with; give its"):
        evaluate.main(["model", "--data.validation-path=text.txt"])


def test_a_run_keeps_what_it_needs_of_the_folder(model):
    keep_files(source_of(model).kept_files(), Path("run"))
    names = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
    assert sorted(os.listdir("run/huggingface")) == sorted([*names, "source.json"])
    for name in names:
        assert Path("run/huggingface", name).read_bytes() == Path("model", name).read_bytes()
    source = json.loads(Path("run/huggingface/source.json").read_text())
    assert source == {"path": str(model.resolve()), "maximum": 64, "dtype": "bfloat16"}


@pytest.mark.parametrize(
    ("init_from", "left"), [("llama1", ["config.json", "generation_config.json", "source.json"]), (None, [])]
)
def test_a_new_start_keeps_nothing_of_an_earlier_folder(model, init_from, left):
    keep_files(source_of(model).kept_files(), Path("run"))
    keep_files(source_of(init_from and GOLDEN / init_from).kept_files(), Path("run"))
    assert sorted(os.listdir("run/huggingface")) == left


def test_weights_that_do_not_fit_are_refused_before_anything_is_written(model):
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"intermediate_size": 96}))
    with pytest.raises(RequestError, match="gate_proj"):
        trained("--train.steps=1")
    assert not Path("run").exists()


def test_another_tokenizer_than_the_folders_is_refused(model):
    text = (model / "tokenizer.json").read_text()
    Path("other.json").write_text(text.replace("<|end_of_text|>", "<|end|>"))
    for refused in (
        lambda: trained("--train.steps=1", "--data.tokenizer=other.json"),
        lambda: evaluate.main(["model", "--data.path=text.txt", "--data.tokenizer=other.json"]),
    ):
        with pytest.raises(RequestError, match=r"data.tokenizer other.json is not the one of model"):
            refused()


def test_a_folder_has_no_steps(model):
    with pytest.raises(RequestError, match="without steps; leave --checkpoint out"):
        evaluate.main(["model", "--data.path=text.txt", "--checkpoint=best"])


def test_a_link_among_the_kept_files_is_refused(model):
    keep_files(source_of(model).kept_files(), Path("run"))
    RunFolder(Path("run")).check_layout()
    Path("run/huggingface/config.json").unlink()
    Path("run/huggingface/config.json").symlink_to(model.resolve() / "config.json")
    with pytest.raises(RequestError, match=r"huggingface/config.json is a symbolic link"):
        RunFolder(Path("run")).check_layout()


def test_weights_that_are_not_finite_are_refused_by_every_command(model, monkeypatch):
    """One number in the last layer, of a folder and of the step of a run: evaluated, continued, trained, and a base.

    Before that each command has compared with other processes what it reads.
    """
    compared: set[str] = set()
    monkeypatch.setattr(copies, "check_copies", lambda files, small: compared.update(files))
    monkeypatch.setattr(consensus, "check_alike", lambda what, *_: compared.add(what))
    file = model / "model-00002-of-00002.safetensors"
    tensors = load_file(file)
    name = "model.layers.1.mlp.down_proj.weight"
    tensors[name][-1, -1] = np.inf
    save_file(tensors, file)
    described = "holds NaN or infinity in 1 of 9 parameters, first in blocks.mlp.down"
    theirs = r" \(model\.layers\.\*\.mlp\.down_proj\.weight\)"
    Path("q.jsonl").write_text('{"context": "the cat", "choices": [" sat", " mat"], "label": 0}\n')
    commands = [
        lambda: evaluate.main(["model", "--choices=q.jsonl", "--mesh=1x1x1"]),
        lambda: generate.main(["model", "--tokens=2", "--mesh=1x1x1"]),
        lambda: trained("--train.steps=1", "--mesh=1x1x1"),
        lambda: trained("--train.steps=1", "--mesh=1x1x1", "--model.lora-rank=2"),
    ]
    for command in commands:
        compared.clear()
        with pytest.raises(NotFinite, match=rf"^'[^']*model' {described}{theirs}; download it again, or name other"):
            command()
        assert compared >= {f"model/{name}" for name in FILES} | {file.name, INDEX}
        # A template may write the time of day.
        assert ("rendering of the prompts" in compared) == ("prompts" in compared)
    run_from(model, Path("bad"))
    begin = ["bad/config.toml", "--init-from=bad", "--data.tokenizer=bad/tokenizer.json", *SMALL, "--mesh=1x1x1"]
    shutil.copy(model / "tokenizer.json", "bad")
    for command in (
        lambda: generate.main(["bad", "--tokens=2", "--mesh=1x1x1"]),
        lambda: train.main([*begin, "--run-dir=from-bad"]),
    ):
        compared.clear()
        with pytest.raises(NotFinite, match=rf"^step 1 of bad {described}; name another"):
            command()
        assert compared >= {"bad/config.toml", "bad/tokenizer.json", "1/params/_METADATA", "sums/1.json"}
    compared.clear()
    with pytest.raises(NotFinite, match=rf"^the base .*/bad/checkpoints/1 {described}; name another step as"):
        train.main([*begin, "--run-dir=lora-bad", "--model.lora-rank=2"])
    assert compared >= {"bad/config.toml", "bad/tokenizer.json", "1/params/_METADATA", "sums/1.json"}
