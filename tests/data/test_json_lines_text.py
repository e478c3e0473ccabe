"""data.text: where in a JSON line its text is."""

import json

import numpy as np
import pytest
from pydantic import ValidationError

from jaxdist.config import DataConfig, RequestError
from jaxdist.data.held_out import open_held_out
from jaxdist.data.readers.plain_text import PLAIN_TEXT
from jaxdist.data.sources import Source
from jaxdist.huggingface.given_tokenizer import read_tokenizer
from tests.data.files import POEM, VOCAB, lines, open_, save_tokenizer

TEXTS = [f"the {i}th text of several " * 3 for i in range(40)]


def rows(*found: dict) -> str:
    return "".join(json.dumps(row) + "\n" for row in found)


@pytest.mark.parametrize(
    ("text", "row", "wanted"),
    [
        ("content", lambda text: {"content": text, "text": 7}, "{}"),
        ("meta.inner.text", lambda text: {"meta": {"inner": {"text": text}}}, "{}"),
        ("a.b", lambda text: {"a.b": text, "a": {"b": "no"}}, "{}"),
        ("{t}\\n\\n{m.b}.", lambda text: {"t": "A title", "m": {"b": text}}, "A title\n\n{}."),
        ("<{t}|\n{t}>", lambda text: {"t": text}, "<{0}|\n{0}>"),
    ],
)
def test_tokens_are_those_of_the_text_itself(write, text, row, wanted):
    found = open_(path=write("a.jsonl", rows(*map(row, TEXTS))), text=text)
    same = open_(path=write("b.jsonl", lines(*(wanted.format(one) for one in TEXTS))))
    assert np.array_equal(found.train.tokens.ids, same.train.tokens.ids)
    assert np.array_equal(found.validation.tokens.ids, same.validation.tokens.ids)


def test_a_row_whose_texts_are_all_empty_is_no_document(write):
    content = rows({"t": "", "b": ""}, *({"t": "a title", "b": text} for text in TEXTS))
    assert "40 documents" in open_(path=write("a.jsonl", content), text="{t}: {b}").source


def test_another_key_is_other_data(write):
    path = write("a.jsonl", rows(*({"text": text, "other": text} for text in TEXTS)))
    usual = open_(path=path).fingerprint
    assert usual == open_(path=path, text="text").fingerprint
    assert len({usual, *(open_(path=path, text=text).fingerprint for text in ("other", "{text}", "{other}"))}) == 4


def test_validation_and_evaluation_take_the_same_key(write, tmp_path):
    path, held_out = (write(name, rows(*({"content": text} for text in TEXTS))) for name in ("a.jsonl", "b.jsonl"))
    corpus = open_(path=path, validation_path=held_out, text="content")
    assert corpus.validation.tokens.length == corpus.train.tokens.length
    given = read_tokenizer(save_tokenizer(tmp_path / "t.json"))
    assert open_held_out(held_out, given, VOCAB, text="content").tokens.length > 500


@pytest.mark.parametrize(
    ("row", "text", "sentence"),
    [
        ({"b": "", "a": 1}, "content", "has the keys ['a', 'b'], and data.text names \"content\"; name one of these"),
        ({"meta": "x"}, "meta.text", "has the keys ['meta'], and data.text names \"meta.text\""),
        ({"meta": {"text": None}}, "meta.text", 'has null as its "meta.text"; write a string there'),
        ({"meta": {"n": 1, "text": "x"}}, "meta", 'has an object as its "meta"; name "meta.text" by data.text, or'),
        ({"t": "x", "b": [1]}, "{t} {b}", 'has a list as its "b"'),
        ({"b": "x"}, "text", 'write an object with a string "text" on each line, or name the key of the text by data'),
    ],
)
def test_a_line_without_the_text_is_named(write, row, text, sentence):
    with pytest.raises(RequestError) as raised:
        open_(path=write("a.jsonl", "\n" + rows(row)), text=text)
    assert "line 2 of '" in str(raised.value)
    assert sentence in str(raised.value)


@pytest.mark.parametrize("text", ["", "a..b", "{a", "a}", "{}", "{a}{", "{{a}}"])
def test_what_names_no_key_is_refused(text):
    with pytest.raises(ValidationError):
        DataConfig(text=text)


def test_a_key_is_refused_where_no_data_have_keys(write):
    with pytest.raises(RequestError, match=r"data.text is 'content', but none of the data are JSON lines"):
        open_(path=write("a.txt", POEM), text="content")


def test_a_json_file_is_rows_where_its_first_line_has_the_keys(write, tmp_path):
    """Without data.text it is one text, as it was, unless a key says text."""
    (tmp_path / "web").mkdir()
    content = rows(*({"title": "a title", "meta": {"body": text}} for text in TEXTS))
    path = write("web/a.json", content)
    assert Source.of(path).files[0].reader == PLAIN_TEXT
    assert open_(path=path, text="{title}: {meta.body}").source.startswith(f"{path}, 40 documents, ")
    write("web/b.txt", "a text")
    write("web/c.json", '{"settings": {"body": 1}}')
    assert (
        f"{tmp_path / 'web'}, 2 files, 41 documents (1 .json left out)"
        in open_(path=tmp_path / "web", text="meta.body").source
    )
    # Rows with the usual key are rows too: data.text, which they lack, is what is wrong.
    with pytest.raises(RequestError, match=r'data\.text names "content"'):
        open_(path=write("d.json", lines("x")), text="content")
