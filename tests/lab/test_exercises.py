"""Exercises: ours is accepted, three wrong answers to each are refused, and a wrong file is told in a sentence."""

import json

import pytest

from jaxdist.config import RequestError
from jaxdist.lab import __main__ as command
from jaxdist.lab.__main__ import main
from jaxdist.lab.exercises import EXERCISES

OURS = {
    "ddp-average": "def average(gradients):\n    return [sum(gradients) / len(gradients)] * len(gradients)\n",
    "1f1b-order": """
def order(stage, stages, micro_batches):
    ahead = min(stages - stage, micro_batches)
    units = [f"F{m}" for m in range(1, ahead + 1)]
    for m in range(1, micro_batches + 1):
        units.append(f"B{m}")
        if ahead + m <= micro_batches:
            units.append(f"F{ahead + m}")
    return units
""",
    "zero-shards": """
def bytes_per_device(parameters, devices, stage):
    weights, gradients, optimizer = 2 * parameters, 2 * parameters, 12 * parameters
    if stage >= 1:
        optimizer /= devices
    if stage >= 2:
        gradients /= devices
    if stage >= 3:
        weights /= devices
    return weights + gradients + optimizer
""",
    "column-row": """
import numpy as np

def parts(x, a, b, devices):
    columns = np.split(a, devices, axis=1)
    rows = np.split(b, devices, axis=0)
    return [np.maximum(x @ c, 0) @ r for c, r in zip(columns, rows)]
""",
    "place": """
def place(number, data, model, pipeline):
    return [number // model % data, number % model, number // (model * data)]
""",
    "top-k": """
import numpy as np

def compress(gradient, waiting, k):
    x = gradient + waiting
    sent = np.zeros_like(x)
    places = np.argsort(-abs(x))[:k]
    sent[places] = x[places]
    return sent, x - sent
""",
}

WRONG = [
    ("ddp-average", " / len(gradients)]", "]", "sums and does not average"),
    ("ddp-average", "* len(gradients)", "", "only one worker has the mean"),
    ("ddp-average", "sum(gradients)", "sum(gradients[1:])", "a worker is left out"),
    ("1f1b-order", "min(stages - stage, micro_batches)", "micro_batches", "all forward units first: GPipe"),
    ("1f1b-order", "stages - stage", "stages - stage - 1", "too few forward units ahead"),
    ("1f1b-order", "micro_batches)\n    units", "micro_batches)\n    return []\n    units", "nothing"),
    ("zero-shards", "stage >= 2", "stage >= 3", "gradients are whole at stage 2"),
    ("zero-shards", "12 * parameters", "8 * parameters", "the masters are forgotten"),
    ("zero-shards", "optimizer /= devices", "optimizer /= 8", "always eight devices"),
    ("column-row", "(b, devices, axis=0)", "(b[::-1], devices, axis=0)", "rows in the wrong order"),
    ("column-row", "np.maximum(x @ c, 0)", "x @ c", "nothing between the products"),
    ("column-row", "return [np.maximum(x @ c, 0) @ r for", "return [np.maximum(x @ a, 0) @ b for", "each has it all"),
    ("place", "number // model % data, number % model", "number % data, number // data % model", "data runs fastest"),
    ("place", "number // (model * data)", "number // model", "pipeline runs with data"),
    ("place", "number // model % data", "number // model", "a rank beyond the axis"),
    ("top-k", "-abs(x)", "-x", "the largest by value"),
    ("top-k", "gradient + waiting", "gradient", "what waits is forgotten"),
    ("top-k", "x - sent", "waiting + sent", "what is sent waits"),
]


def run(name, text, tmp_path) -> int:
    path = tmp_path / "mine.py"
    path.write_text(text)
    return main(["exercise", name, str(path)])


def test_every_exercise_has_an_answer_and_three_mistakes():
    assert OURS.keys() == EXERCISES.keys() == command.EXERCISES.keys()
    assert [sum(name == one for one, *_ in WRONG) for name in EXERCISES] == [3] * len(EXERCISES)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name == "zero-shards" else ()) for name in EXERCISES]
)
def test_ours_is_accepted(name, tmp_path, capsys):
    assert run(name, OURS[name], tmp_path) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"{name}: {EXERCISES[name].signature}\n")
    assert out.endswith("ALL RIGHT: it answers as jaxdist does\n")


@pytest.mark.parametrize(("name", "before", "after", "why"), WRONG, ids=[why for *_, why in WRONG])
def test_a_mistake_is_refused(name, before, after, why, tmp_path, capsys):
    assert before in OURS[name]
    assert run(name, OURS[name].replace(before, after, 1), tmp_path) == 1
    assert "\nWRONG  " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("def mean(gradients): pass", "has no function 'average'; write one: def average(gradients):"),
        ("average = 3", "has no function 'average'; write one: def average(gradients):"),
        ("def average(a, b): pass", "has to take 1 argument: def average(gradients):"),
        ("def average(gradients)", "cannot be run: SyntaxError: "),
        ("raise SystemExit(3)", "cannot be run: SystemExit: 3"),
    ],
)
def test_a_file_that_is_no_answer(text, problem, tmp_path):
    with pytest.raises(RequestError) as error:
        run("ddp-average", text, tmp_path)
    assert problem in error.value.problems[0]


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        (["ddp-avarage", "x.py"], "there is no exercise 'ddp-avarage'; did you mean 'ddp-average'?"),
        (["ddp-average"], "write exercise NAME FILE; the names are ddp-average, 1f1b-order, "),
        (
            ["top-k", "gone.py"],
            "there is no file 'gone.py'; write one that begins with: def compress(gradient, waiting, k)",
        ),
    ],
)
def test_a_wrong_command(argv, problem):
    with pytest.raises(RequestError) as error:
        main(["exercise", *argv])
    assert error.value.problems[0].startswith(problem)


def test_a_function_that_raises_is_told(tmp_path, capsys):
    assert run("ddp-average", "def average(gradients):\n    return gradients[99]\n", tmp_path) == 1
    assert "2 workers, 4 numbers: it raised IndexError: list index out of range" in capsys.readouterr().out


def test_json(tmp_path, capsys):
    path = tmp_path / "mine.py"
    path.write_text("def order(stage, stages, micro_batches):\n    return ['F1', 'B1', 'F2', 'B2', 'F3', 'B3']\n")
    assert main(["exercise", "1f1b-order", str(path), "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert (told["exercise"], told["passed"]) == ("1f1b-order", False)
    assert told["right"] == ["stage 0 of 1, 3 micro-batches"]
    assert told["wrong"].startswith("stage 0 of 2, 4 micro-batches: ")
