"""Text of files and people that is no text: a byte that is not UTF-8, half a character."""

import io
import sys
from types import SimpleNamespace

import pytest

from jaxdist.config import RequestError
from jaxdist.config.values import stop_texts
from jaxdist.generate import lines_of_person
from jaxdist.request.prompts import read_prompts


@pytest.mark.parametrize(
    ("content", "told"),
    [(rb'{"prompt": "a\ud800"}', "line 1 "), (b'{"prompt": "a"}\n{"prompt": "\xff"}', "not UTF-8")],
)
def test_prompts_that_are_no_text_are_refused(tmp_path, content, told):
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(content)
    with pytest.raises(RequestError, match=told) as refused:
        read_prompts(path)
    assert str(path) in str(refused.value)


def test_words_that_end_a_text_are_text():
    assert stop_texts(r'["\ud83d\ude00"]') == ("\U0001f600",)
    with pytest.raises(ValueError, match="half a character"):
        stop_texts(r'["a", "\ude00"]')


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
def test_a_conversation_ends_with_a_sentence_at_a_line_that_is_no_text(monkeypatch, errors):
    lines = io.TextIOWrapper(io.BytesIO(b"one\n\n tw\xc3\xb6 \n\xff\n"), encoding="utf-8", errors=errors)
    lines._CHUNK_SIZE = 1  # as from a pipe, to which each line comes by itself
    monkeypatch.setattr(sys, "stdin", lines)
    found = lines_of_person(SimpleNamespace(note=lambda what: None))
    assert [next(found), next(found)] == ["one", "twö"]
    with pytest.raises(RequestError, match="standard input is not UTF-8 text; convert it"):
        next(found)
