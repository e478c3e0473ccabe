"""Samples while a run trains: where they are written, and that the run does not notice them."""

import json

import numpy as np
import pytest

from jaxdist import generate, train
from jaxdist.config import RequestError
from jaxdist.training.run import Run
from tests.training.curves import lines, parameters
from tests.training.test_meter import events

pytestmark = pytest.mark.slow

FIGURES = ("step", "loss", "grad_norm", "validation_loss")
SAMPLING = ["--sample.every=10", "--sample.prompts=mesh axis\nthe", "--model.sequence=32", "--log.tensorboard=true"]


@pytest.fixture(scope="module")
def folders(straight):
    """A run without samples, and one with them."""
    return straight("--mesh=2x1x1", "--model.sequence=32"), straight("--mesh=2x1x1", *SAMPLING)


def test_the_run_is_the_same_to_the_bit(folders):
    plain, sampling = folders
    figures = [[{name: line.get(name) for name in FIGURES} for line in lines(folder)] for folder in folders]
    assert figures[0] == figures[1]
    np.testing.assert_array_equal(parameters(plain, 20), parameters(sampling, 20))


@pytest.mark.exhaustive
def test_a_gradient_in_flight_is_not_hurried(straight):
    late = ("--mesh=replica=2", "--parallel.delayed-gradients=true", "--model.sequence=32", "--train.steps=8")
    plain = straight(*late)
    sampling = straight(*late, "--sample.every=3", "--sample.prompts=mesh")
    np.testing.assert_array_equal(parameters(plain, 8), parameters(sampling, 8))


def test_each_prompt_is_continued_in_the_log_and_on_the_board(folders):
    _, sampling = folders
    said = [line.split(": ", 1) for line in (sampling / "log.txt").read_text().splitlines() if "sample  " in line]
    assert [head.split()[-2:] for head, _ in said] == [["step", "10"], ["step", "10"], ["step", "20"], ["step", "20"]]
    texts = [json.loads(text) for _, text in said]
    assert [text.startswith("mesh axis") for text in texts] == [True, False, True, False]
    assert all(len(text) > len("mesh axis") for text in texts)
    (file,) = (sampling / "tensorboard").glob("events.*")
    shown = [
        (value.tag, event.step, value.tensor.string_val[0].decode())
        for event in events(file)
        for value in event.summary.value
        if value.tag.startswith("sample")
    ]
    assert [(tag.split("/text")[0], step) for tag, step, _ in shown] == [
        ("sample/1", 10), ("sample/2", 10), ("sample/1", 20), ("sample/2", 20)
    ]  # fmt: skip
    assert [text.replace("\n    ", "\n")[4:] for _, _, text in shown] == texts


def test_a_prompt_that_leaves_no_room_is_refused(request_of):
    with pytest.raises(RequestError, match=r"of 41 tokens, to which model.sequence 16 leaves no room for more"):
        train.main(request_of("long", "--sample.every=5", "--sample.prompts=" + "mesh " * 40))


def test_texts_that_do_not_fit_beside_the_run_are_refused_before_it_begins(request_of, tmp_path, monkeypatch):
    monkeypatch.setattr(Run, "capacity", 100 << 10)
    with pytest.raises(RequestError, match=r"cache of 1 row .* beside .* of weights and .* of the train state"):
        train.main(request_of("small", "--sample.every=5", "--sample.prompts=mesh"))
    assert not (tmp_path / "small").exists()


def test_the_text_is_what_generate_writes(folders, capsys):
    _, sampling = folders
    capsys.readouterr()
    argv = ["--prompt=mesh axis", "--tokens=50", "--temperature=0.8", "--top-k=50", "--seed=0", "--checkpoint=20"]
    assert generate.main([str(sampling), "--mesh=2x1x1", *argv]) == 0
    said = capsys.readouterr().out.rstrip("\n")
    assert json.dumps(said, ensure_ascii=False) in (sampling / "log.txt").read_text()
