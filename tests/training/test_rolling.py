"""Rolling loss: each token counts once, after at least sequence - stride others, as one window at a time gives it."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxdist import evaluate
from jaxdist.config import RequestError
from jaxdist.huggingface.given_tokenizer import read_tokenizer
from jaxdist.request import load
from jaxdist.training.restore import restore

LLAMA = Path(__file__).parent.parent / "huggingface" / "golden" / "llama31"
SEQUENCE = 16
TEXT = "the loss of one device is every mesh of one loss " * 3


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("text") / "a.txt"
    path.write_text(TEXT)
    return path


def plain(stride: int) -> tuple[float, int]:
    """(mean loss, tokens), from the logits of one window at a time, as Hugging Face's guide on perplexity has it."""
    config = load(str(LLAMA), {"mesh": "1x1x1", "model.sequence": str(SEQUENCE)})
    run, _, params, _, _ = restore(config.model_copy(update={"run_dir": LLAMA}), "latest", batch=False)
    given = read_tokenizer(LLAMA)
    ids = given.special.around(given.load().encode(TEXT, add_special_tokens=False).ids, ends=True)
    losses = []
    with jax.set_mesh(run.mesh):
        weights = run.forward.weights(params)
        logits_of = jax.jit(run.forward.logits)
        end_before = 1
        for begin in range(0, len(ids), stride):
            end = min(begin + SEQUENCE + 1, len(ids))
            window = np.zeros((1, SEQUENCE), np.int32)
            window[0, : end - begin - 1] = ids[begin : end - 1]
            logits = np.asarray(logits_of(weights, window)[0], np.float64)
            log = logits - np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1, keepdims=True))
            log -= logits.max(-1, keepdims=True)
            losses += [-log[place - begin - 1, ids[place]] for place in range(end_before, end)]
            end_before = end
            if end == len(ids):
                break
    return float(np.mean(losses)), len(losses)


@pytest.mark.parametrize(("mesh", "stride"), [("1x1x1", 5), ("1x1x1", 16), ("2x2x1", 5)])
def test_it_is_that_of_one_window_at_a_time(path, capsys, mesh, stride):
    argv = [str(LLAMA), f"--mesh={mesh}", f"--model.sequence={SEQUENCE}", f"--data.validation-path={path}"]
    assert evaluate.main([*argv, f"--stride={stride}", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    loss, tokens = plain(stride)
    assert (found["tokens"], found["stride"]) == (tokens, stride)
    assert found["loss"] == pytest.approx(loss, 1e-5)
    if stride == SEQUENCE:
        assert evaluate.main(argv) == 0
        assert capsys.readouterr().out.endswith(f"bits per byte in windows of {SEQUENCE}\n")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--stride=17"], "--stride 17 is more than model.sequence 16, so that tokens between two windows would not"),
        (["--stride=0"], "--stride is 0: must be at least 1"),
        (["--stride=4", f"--choices={Path(__file__).parents[1] / 'data' / 'questions.jsonl'}"], "leave out --stride"),
    ],
)
def test_a_stride_without_a_meaning_is_refused(options, sentence):
    with pytest.raises(RequestError, match=sentence):
        evaluate.main([str(LLAMA), f"--model.sequence={SEQUENCE}", *options])
