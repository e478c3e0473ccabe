"""`python -m jaxdist.data --verify`: every byte of data and cache against what the first start has read."""

import json

import pytest

from jaxdist.config import RequestError
from jaxdist.data import known
from jaxdist.data.__main__ import main
from tests.data.files import lines, open_
from tests.data.test_known import flip, forget, old


@pytest.fixture
def read(tmp_path, monkeypatch):
    """Data that a training has read, a while after they were written."""
    monkeypatch.setattr(known, "SETTLED", 0.0)
    forget()
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "web.jsonl"
    path.write_text(lines(*[f"text {i} of many" for i in range(300)]))
    old(path)
    return path, open_(path="web.jsonl")


def told(capsys, code):
    assert main(["web.jsonl", "--verify", "--json"]) == code
    found = json.loads(capsys.readouterr().out)
    assert found["verified"] == (code == 0)
    return found["problems"]


def test_what_is_as_it_was_is_verified(read, capsys):
    assert told(capsys, 0) == []
    assert main(["web.jsonl", "--verify"]) == 0
    assert capsys.readouterr().out == "all bytes of the data, and of the cache, are as they were at the first start\n"


def test_a_byte_outside_of_the_samples_is_found(read, capsys):
    path, corpus = read
    flip(path, 4500)
    (problem,) = told(capsys, 1)
    assert problem.startswith("'web.jsonl' is not what it was when it was first read, though its size and time are")
    flip(path, 4500)
    flip(corpus.train.tokens.path, 300)
    (problem,) = told(capsys, 1)
    assert problem.startswith("the cache is damaged: ")
    assert main(["web.jsonl", "--verify"]) == 1
    assert capsys.readouterr().out == f"{problem}\n"


def test_data_that_nobody_has_read_are_not_verified(read, capsys):
    path, _ = read
    path.write_text(path.read_text() + lines("more"))
    (problem,) = told(capsys, 1)
    assert problem.startswith("'web.jsonl' was never read, or has changed since")


def test_what_is_refused_is_refused(read):
    with pytest.raises(RequestError, match="does not exist"):
        main(["nowhere", "--verify"])
    with pytest.raises(RequestError, match="leave one of them out"):
        main(["web.jsonl", "--verify", "--export=out/"])
