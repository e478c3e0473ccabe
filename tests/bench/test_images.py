"""`bench step` and `bench scaling` of a classifier of images: random images of its size, and its own words."""

import json

import pytest

from jaxdist.bench import __main__ as bench
from jaxdist.bench import scaling_text
from jaxdist.request import outcome

pytestmark = pytest.mark.slow


def told(capsys, *argv: str) -> dict:
    assert outcome(bench.main, [*argv, "--train.global-batch-size=16", "--repeats=2", "--warmup=1", "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_step(capsys):
    found = told(capsys, "step", "cnn_digits", "--mesh=2x1x1")
    assert found["images_per_step"] == 16
    assert found["images_per_second"] == pytest.approx(16 / found["step_seconds"])
    assert found["flops_per_image"] is found["flops_formula"] is found["mfu"] is None


@pytest.mark.exhaustive
def test_scaling(capsys):
    found = told(capsys, "scaling", "cnn_digits", "--devices=1,2", "--zero=0,3")
    assert (found["config"], found["model"], found["unit"], found["sequence"]) == ("cnn_digits", "cnn", "image", None)
    losses, sent = zip(*((one["loss"], one["wire_bytes"]) for one in found["measurements"]), strict=True)
    assert losses == pytest.approx([losses[0]] * 4, rel=1e-5)
    statistics = 3 * 2 * (32 + 64 + 128)  # of every channel, in both passes, and the running ones
    assert sent == (0, 4 * (found["parameters"] + statistics)) * 2
    text = "\n".join(scaling_text.lines(found))
    assert "16 rows per step on every number of devices" in text
    assert "tokens" not in text


def test_bytes_that_are_not_predicted_are_not_made_up(capsys):
    """With dropout the compiler chooses."""
    found = told(capsys, "scaling", "cnn_digits", "--devices=1,2", "--model.dropout=0.3")
    assert [one["wire_bytes"] for one in found["measurements"]] == [0, None]
    assert any("collectives are not predicted: with dropout" in note for note in found["notes"])
    assert "unknown" in "\n".join(scaling_text.lines(found))
