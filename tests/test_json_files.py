"""Reading small files that somebody else may have written; `test_imports.py` says that nobody does it otherwise."""

import json
import os

import pytest

from jaxdist.config import RequestError
from jaxdist.files.json_files import DEEPEST, LARGEST, parse_json, read_json, read_text

WRONG = {
    "absent": (None, "no such file"),
    "empty": (b"", "it is empty"),
    "spaces": (b" \n", "it is empty"),
    "torn": (b'{"a": ', "expecting value: line 1"),
    "a list": (b"[1]", "not an object with keys"),
    "null": (b"null", "not an object with keys"),
    "a byte that is not UTF-8": (b'{"a": "\xff"}', "is not UTF-8 text (byte 7)"),
    "UTF-16": ('{"a": 1}'.encode("utf-16"), "is not UTF-8 text"),
    "a byte-order mark": (b'\xef\xbb\xbf{"a": 1}', "begins with a byte-order mark"),
    "too deep for Python": (b'{"a":' * 200_000, "nested more than 100 deep"),
    "deep": (b'{"a":' * (DEEPEST + 1) + b"1" + b"}" * (DEEPEST + 1), "nested more than 100 deep"),
    "half a character": (b'{"a": ["\\ud800"]}', "half a character"),
    "half a character in a key": (b'{"a": {"\\udfff": 1}}', "half a character"),
    "a long number": (b'{"a": ' + b"1" * 5000 + b"}", "has 5,000 characters"),
    "a long fraction": (b'{"a": 0.' + b"1" * 5000 + b"}", "has 5,002 characters"),
    "a large number": (b'{"a": 1e999}', "1e999 is too large"),
    "NaN": (b'{"a": NaN}', "NaN is not a number"),
    "infinity": (b'{"a": -Infinity}', "-Infinity is not a number"),
    "a key twice": (b'{"a": {"b": 1, "b": 2}}', "has the key 'b' twice"),
    "large": (b'{"a": "' + b"x" * LARGEST + b'"}', "is larger than 4 MiB"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_what_is_wrong_with_a_file_is_one_sentence_that_names_it(tmp_path, kind):
    content, told = WRONG[kind]
    path = tmp_path / "config.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(RequestError) as refused:
        read_json(path)
    (sentence,) = refused.value.problems
    assert told in sentence
    assert sentence.startswith(f"'{path}' ")
    assert "put the right file there" in sentence
    assert "\n" not in sentence
    assert len(sentence) < 400


def test_what_is_no_file_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "zero").symlink_to("/dev/zero")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "folder").mkdir()
    for kind, told in {
        "fifo": "not a regular file",
        "zero": "not a regular file",
        "loop": "symbolic link",
        "folder": "is a directory",
    }.items():
        for read in (read_json, read_text):
            with pytest.raises(RequestError, match=told):
                read(tmp_path / kind)


def test_a_link_is_followed_where_the_reader_says_so(tmp_path):
    (tmp_path / "blob").write_text("{}")
    (tmp_path / "config.json").symlink_to("blob")
    assert read_json(tmp_path / "config.json") == {}
    with pytest.raises(RequestError, match="it is a symbolic link"):
        read_json(tmp_path / "config.json", links=False)


def test_what_json_can_say_is_read_as_it_is():
    found = {"a": [1, -2.5e-3, None, True, "ö\U0001f600\x1b", 10**30], "": {"deep": [[[{}]]]}}
    for text in (json.dumps(found), json.dumps(found, ensure_ascii=False, indent=1)):
        assert parse_json(text) == found
    deepest = DEEPEST - 1
    assert parse_json("[" * deepest + "]" * deepest)
