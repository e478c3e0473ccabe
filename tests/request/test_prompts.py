"""Files of prompts: one a line, or a JSON object on each."""

import json

import pytest

from jaxdist.config import RequestError
from jaxdist.request.prompts import read_prompts


@pytest.mark.parametrize("name", ["a.jsonl", "a.JSONL", "a.ndjson", "a.json"])
def test_json_lines_are_recognised_by_these_names(tmp_path, name):
    path = tmp_path / name
    path.write_text("".join("\ufeff" + json.dumps({"prompt": prompt}) + "\n\n" for prompt in ("one", "two")))
    assert read_prompts(path) == ["one", "two"]


def test_a_byte_order_mark_is_no_part_of_a_prompt(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbfone\r\n\xef\xbb\xbftwo")
    assert read_prompts(path) == ["one", "two"]


WRONG = {
    '{"prompt": ' + "1" * 5000 + "}": "is not JSON (a number has 5,000 characters",
    "{": "is not JSON (expecting property name",
    "[" * 99_999: "is not JSON (its values are nested more than 100 deep)",
    '{"prompt": null}': "is not a JSON object with the text of a prompt",
    '{"text": "a"}': "is not a JSON object with the text of a prompt",
    "[]": "is not a JSON object with the text of a prompt",
}


@pytest.mark.parametrize("line", WRONG, ids=WRONG.values())
def test_a_wrong_line_is_named_in_one_sentence_without_advice_for_programmers(tmp_path, line):
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "one"}\n' + line)
    with pytest.raises(RequestError) as refused:
        read_prompts(path)
    (sentence,) = refused.value.problems
    assert sentence.startswith(f"--prompts '{path}' line 2 {WRONG[line]}")
    assert "; write {" in sentence
