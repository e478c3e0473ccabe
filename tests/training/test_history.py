"""metrics.jsonl as somebody may leave it: what can be used is, each step stands once, the rest is told."""

import json

import pytest

from jaxdist.training import history
from jaxdist.training.plots import plot_loss

DEEP = b"[" * 200_000


def step(number, **more):
    return json.dumps({"step": number, "loss": 2.0} | more).encode()


def validation(number):
    return json.dumps({"step": number, "validation_loss": 2.0}).encode()


ODD = [
    b"",
    b'{"\xff": 1}',
    DEEP,
    b"[]",
    b"7",
    b'{"loss": 1.0}',
    b'{"step": "1", "loss": 1.0}',
    b'{"step": true, "loss": 1.0}',
    b'{"step": -1, "loss": 1.0}',
    b'{"step": 1.5, "loss": 1.0}',
    b'{"step": 1}',
    step(1, loss=[]),
    step(1, loss="low"),
    step(1, loss=True),
    b'{"step": ' + b"9" * 5000 + b', "loss": 1.0}',
]


@pytest.mark.parametrize("odd", range(len(ODD)))
def test_a_line_that_is_none_is_passed_over_and_left_out(tmp_path, odd):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"\n".join([step(1), ODD[odd], step(2), b""]))
    assert [line["step"] for line in history.read(path)] == [1, 2]
    plot_loss(path, tmp_path / "loss.png", {"nats": 3.0, "name": "unigram entropy", "unit": "token"})
    assert history.cut(path, 2, [1]) == [f"left out 1 line of {path} that could not be read"]
    assert path.read_bytes() == step(1) + b"\n" + step(2) + b"\n"
    assert history.cut(path, 2, [1]) == []


def test_of_lines_of_one_step_the_later_counts_and_a_validation_is_another(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = [step(1), step(2), validation(2), step(3), step(2, loss=1.0), step(3, loss=None), step(4), validation(4)]
    path.write_bytes(b"".join(line + b"\n" for line in lines) + b'{"step": 5, "lo')
    assert history.cut(path, 3, [1]) == [f"left out 2 lines of {path} whose step appears again later"]
    kept = [step(1), step(2, loss=1.0), validation(2), step(3, loss=None)]
    assert path.read_bytes() == b"".join(line + b"\n" for line in kept)


@pytest.mark.parametrize(
    ("steps", "end", "every", "gaps"),
    [
        ([10, 20, 30], 39, 10, []),
        ([10, 20, 30], 40, 10, ["31 to 40"]),
        ([10, 30, 60, 70], 75, 10, ["11 to 29", "31 to 59"]),
        ([], 9, 10, []),
        ([], 10, 10, ["1 to 10"]),
        ([1, 2, 3, 4, 6], 7, 1, ["5 to 5", "7 to 7"]),
        ([], 0, 1, []),
    ],
)
def test_steps_that_are_missing_are_told_by_their_numbers(tmp_path, steps, end, every, gaps):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"".join(step(number) + b"\n" for number in steps))
    told = [f"{path} has no lines of steps {', '.join(gaps)}, which are not run again; they stay missing"]
    assert history.cut(path, end, [1, every]) == (told if gaps else [])


def test_no_file_is_all_missing_and_none_is_made(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert history.read(path) == []
    assert history.cut(path, 0, [1]) == []
    assert "has no lines of steps 1 to 7" in history.cut(path, 7, [1])[0]
    assert not path.exists()
