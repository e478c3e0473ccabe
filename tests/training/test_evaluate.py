"""What `evaluate` says of files and of questions, in words and as JSON, on any mesh."""

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest

from jaxdist import evaluate
from jaxdist.config import RequestError
from tests.data.files import ids, lines

QUESTIONS = Path(__file__).parents[1] / "data" / "questions.jsonl"
MESHES = ["--mesh=1x1x1"], ["--mesh=2x2x1", "--parallel.zero=3"], ["--mesh=1x1x2", "--pipeline.microbatches=2"]


@pytest.fixture(scope="module")
def trained(straight):
    return straight("--model.sequence=64", "--train.steps=5", "--validation.batches=1", "--model.vocab=400")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A text with bytes that are no characters, and one of several documents."""
    folder = tmp_path_factory.mktemp("files")
    (folder / "a.txt").write_text("mesh axis dévice shard, gather reduce\n" * 40)
    (folder / "b.jsonl").write_text(lines("layer token", "batch step 日本"))
    return [folder / "a.txt", folder / "b.jsonl"]


@pytest.fixture
def judged(trained, capsys):
    """Return what `evaluate` says of the run with these options."""

    def call(*options: str) -> str:
        assert evaluate.main([str(trained), *options]) == 0
        return capsys.readouterr().out

    return call


@pytest.mark.slow
def test_each_file_has_its_loss_and_all_of_them_together(judged, files):
    options = ["--mesh=1x1x1", f"--data.validation-path={files[0]},{files[1]}"]
    found = json.loads(judged("--json", *options))
    a, b = found["files"]
    assert [a["path"], b["path"]] == list(map(str, files))
    assert [a["bytes"], b["bytes"]] == [files[0].stat().st_size, len("layer tokenbatch step 日本".encode())]
    assert found["tokens"] == a["tokens"] + b["tokens"]
    assert found["bytes"] == a["bytes"] + b["bytes"]
    assert found["loss"] == pytest.approx((a["loss"] * a["tokens"] + b["loss"] * b["tokens"]) / found["tokens"])
    for one in (a, b, found):
        assert one["perplexity"] == pytest.approx(math.exp(one["loss"]))
        assert one["bits_per_byte"] == pytest.approx(one["loss"] * one["tokens"] / math.log(2) / one["bytes"])
    said = judged(*options).splitlines()
    assert said[0].startswith(f"{files[0]}  loss {a['loss']:.4f} nats per token over ")
    assert said[2].startswith(f"step 5  validation loss {found['loss']:.4f} nats per token over ")
    bits = f"{found['bits_per_byte']:.4f} bits per byte"
    assert said[2].endswith(f"  perplexity {found['perplexity']:.2f}  {bits} in windows of 64")


@pytest.mark.slow
def test_the_held_out_part_of_a_run_is_judged_rolling_too(judged):
    """The incomplete last row counts as well; else windows that do not overlap are the usual ones."""
    usual, whole, rolling = (
        json.loads(judged("--mesh=1x1x1", "--json", *more)) for more in ([], ["--stride=64"], ["--stride=16"])
    )
    assert 0 <= whole["tokens"] - usual["tokens"] < 64
    assert whole["loss"] == pytest.approx(usual["loss"], 0.02)
    assert [found["stride"] for found in (usual, whole, rolling)] == [64, 64, 16]
    assert rolling["tokens"] == whole["tokens"]
    assert rolling["loss"] != whole["loss"]
    assert " in windows of 64 rolling by 16  (unigram" in judged("--mesh=1x1x1", "--stride=16")


@pytest.mark.slow
def test_files_have_the_same_losses_on_every_mesh(judged, files):
    found = [json.loads(judged("--json", f"--data.validation-path={files[0]},{files[1]}", *mesh)) for mesh in MESHES]
    losses = [[one["loss"] for one in each["files"]] for each in found]
    assert losses[1] == pytest.approx(losses[0], 1e-6)
    assert losses[2] == pytest.approx(losses[0], 1e-6)
    assert found[0]["tokens"] == found[1]["tokens"] == found[2]["tokens"]


@pytest.mark.slow
def test_a_file_of_tokens_has_no_bits_per_byte(judged, tmp_path):
    path = tmp_path / "a.bin"
    path.write_bytes(ids(*np.arange(200) % 7))
    found = json.loads(judged("--mesh=1x1x1", "--json", f"--data.validation-path={path}"))
    assert (found["tokens"], found["bytes"], found["bits_per_byte"]) == (199, None, None)
    assert "bits" not in judged("--mesh=1x1x1", f"--data.validation-path={path}")


@pytest.mark.slow
def test_questions_have_the_same_answers_on_every_mesh(judged):
    found = [json.loads(judged("--json", f"--choices={QUESTIONS}", *mesh)) for mesh in MESHES]
    first, *others = [found_there.pop("results") for found_there in found]
    for results in others:
        for one, other in zip(first, results, strict=True):
            assert other.pop("log_probabilities") == pytest.approx(one["log_probabilities"], 1e-5)
            assert other.items() <= one.items()
    assert found[0] == found[1] == found[2]
    assert (found[0]["step"], found[0]["questions"], found[0]["cut"]) == (5, 50, 0)
    shares = [found[0][name] for name in ("acc", "acc_norm")]
    assert [found[0][f"{name}_stderr"] for name in ("acc", "acc_norm")] == pytest.approx(
        [math.sqrt(share * (1 - share) / 49) for share in shares]
    )


@pytest.mark.slow
def test_contexts_that_are_too_long_are_told(judged, tmp_path):
    path = tmp_path / "q.jsonl"
    rows = [{"context": "mesh " * 200, "choices": [" axis", " shard"], "label": 0}]
    rows.append({"context": "mesh", "choices": [" axis", " axis", " axis"], "label": 2})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    said = judged(f"--choices={path}", "--mesh=2x1x1")
    pattern = r"step 5  acc [\d.]+% ± [\d.]+%  acc_norm [\d.]+% ± [\d.]+%  of 2 questions"
    assert re.fullmatch(rf"{pattern}  \(1 of them cut on the left to model.sequence 64\)\n", said)


def test_wrong_requests_are_refused(files, tmp_path):
    (tmp_path / "config.toml").touch()
    (tmp_path / "q.jsonl").write_text("{}")
    with pytest.raises(RequestError, match=r"beside --choices '.*' no data are read, so leave out --data.path"):
        evaluate.main([str(tmp_path), f"--choices={QUESTIONS}", f"--data.path={files[0]}"])
    with pytest.raises(RequestError, match=r"--choices-skip and --choices-apart has an effect beside --choices only"):
        evaluate.main([str(tmp_path), "--choices-skip", "--choices-apart"])
    with pytest.raises(RequestError, match=r"data.validation_path 'none.txt' does not exist; give the path of a file"):
        evaluate.main([str(tmp_path), f"--data.validation-path={files[0]},none.txt"])
    with pytest.raises(RequestError, match=r"line 1 of --choices '.*' has no context and no choices and no label"):
        evaluate.main([str(tmp_path), f"--choices={tmp_path / 'q.jsonl'}"])
    (tmp_path / "config.toml").write_text('[model]\nfamily = "resnet18"\n')
    with pytest.raises(RequestError, match=r"the run has model.family resnet18, which answers no questions"):
        evaluate.main([str(tmp_path), f"--choices={QUESTIONS}"])
