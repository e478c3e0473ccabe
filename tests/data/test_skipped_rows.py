"""data.on_error: rows without a text that can be read are refused, or left out and counted."""

import json
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest

from jaxdist.config import RequestError
from jaxdist.data.held_out import open_held_out
from jaxdist.data.skipped import FEW, ONE_IN
from jaxdist.data.sources import Source
from jaxdist.data.tokenizing import pieces
from jaxdist.data.tokenizing.encoder import PIECES, Encoder, part_name, parts_of
from jaxdist.data.tokenizing.pieces import Plan
from jaxdist.huggingface.given_tokenizer import read_tokenizer
from jaxdist.huggingface.special_tokens import SpecialTokens
from tests.data.column_files import WRITERS
from tests.data.files import POEM, VOCAB, lines, open_, save_tokenizer

TEXTS = [f"the {i}th text of several " * 3 for i in range(60)]
BAD = {
    "no JSON": (b"{text: 1}", "is not JSON (Expecting property name enclosed in double quotes, column 2)"),
    "no object": (b"[1]", "has a list"),
    "no key": (b'{"a": 1}', "has the keys ['a']"),
    "no string": (b'{"text": null}', 'has null as its "text"'),
    "no UTF-8": (b'{"text": "\xff"}', "is not utf-8 text (byte 11 of it)"),
    "no character": (b'{"text": "\\ud800"}', "has half of a surrogate pair (\\ud800 to \\udfff), which is not text"),
}


def with_line(line: bytes, at: int = 7) -> bytes:
    whole = lines(*TEXTS).encode().splitlines(keepends=True)
    return b"".join([*whole[:at], line + b"\n", *whole[at:]])


@pytest.mark.parametrize(("line", "reason"), BAD.values(), ids=list(BAD))
def test_a_bad_line_is_refused_or_skipped(write, line, reason):
    path = write("a.jsonl", with_line(line))
    with pytest.raises(RequestError) as raised:
        open_(path=path)
    assert str(raised.value).startswith(f"line 8 of '{path}' {reason}")
    assert str(raised.value).endswith(", or leave such rows out with data.on_error skip")
    found = open_(path=path, on_error="skip")
    assert f"a.jsonl, 60 documents (1 row skipped, the first: line 8 of '{path}' {reason}), " in found.source
    wanted = open_(path=write("b.jsonl", lines(*TEXTS)))
    assert np.array_equal(found.train.tokens.ids, wanted.train.tokens.ids)
    assert np.array_equal(found.validation.tokens.ids, wanted.validation.tokens.ids)
    # The cache tells it again.
    assert open_(path=path, on_error="skip").source == found.source


@pytest.mark.parametrize("ending", WRITERS)
def test_a_bad_row_is_refused_or_skipped(write, ending):
    how = {"compression": "none", "use_dictionary": False} if ending == ".parquet" else {}
    content = WRITERS[ending](pa.table({"text": [*TEXTS[:7], None, *TEXTS[7:], TEXTS[0] + "#"]}), **how)
    path = write(f"a{ending}", content.replace(b" #", b"\xff#"))
    with pytest.raises(RequestError, match=r"row 8 of '.*' has null as its \"text\".*, or leave such rows out with"):
        open_(path=path)
    found = open_(path=path, on_error="skip")
    assert f"(2 rows skipped, the first: row 8 of '{path}' has null as its \"text\"; row 62 of " in found.source
    assert [document.text for document in Source.of(path, skips=True).documents()] == TEXTS


def test_of_a_file_whose_first_row_is_bad_all_may_be(write):
    with pytest.raises(RequestError, match=r"or name the key of the text by data\.text$"):
        open_(path=write("a.jsonl", '{"content": "x"}\n' * 99))


def test_the_first_one_is_told_by_the_name_that_the_file_has_now(write):
    path = write("a.jsonl", with_line(b"[1]"))
    assert f"line 8 of '{path}' has a list" in open_(path=path, on_error="skip").source
    moved = path.rename(path.with_name("it's b.jsonl"))
    told = open_(path=moved, on_error="skip").source
    assert f"(1 row skipped, the first: line 8 of '{moved}' has a list" in told
    assert str(path) not in told


def test_it_belongs_to_the_fingerprint_only_where_rows_were_skipped(write):
    path = write("a.jsonl", lines(*TEXTS))
    assert open_(path=path).fingerprint == open_(path=path, on_error="skip").fingerprint
    one, other = (open_(path=write("b.jsonl", with_line(line)), on_error="skip") for line in (b"{", b"[]"))
    assert one.fingerprint != other.fingerprint


def test_the_cache_of_skipped_rows_is_not_taken_for_all(write):
    path = write("a.jsonl", with_line(b"{"))
    open_(path=path, on_error="skip")
    with pytest.raises(RequestError, match="is not JSON"):
        open_(path=path)


def rows(good: int, bad: int) -> bytes:
    return lines("x").encode() * good + b"{\n" * bad


@pytest.mark.parametrize(("good", "bad"), [(0, FEW), ((ONE_IN - 1) * 120, 120)])
def test_few_rows_are_skipped(write, good, bad):
    documents = list(Source.of(write("a.jsonl", rows(good, bad)), skips=True).documents())
    assert len(documents) == good


@pytest.mark.parametrize(("good", "bad"), [(0, FEW + 1), ((ONE_IN - 1) * 120 - 1, 120)])
def test_many_rows_are_refused_all_the_same(write, good, bad):
    path = write("a.jsonl", rows(good, bad))
    with pytest.raises(RequestError) as raised:
        list(Source.of(path, skips=True).documents())
    assert f"{bad} of {good + bad:,} rows cannot be read, and data.on_error skip leaves out 100" in str(raised.value)
    assert f"the first: line {good + 1} of '{path}' is not JSON" in str(raised.value)


def test_a_damaged_file_is_refused_all_the_same(write):
    content = WRITERS[".parquet"](pa.table({"text": TEXTS}))
    with pytest.raises(RequestError, match="is cut short"):
        open_(path=write("a.parquet", content[:-9]), on_error="skip")


def test_it_is_refused_where_there_are_no_rows(write):
    with pytest.raises(RequestError, match=r"data.on_error is skip, but none of the data are JSON lines"):
        open_(path=write("a.txt", POEM), on_error="skip")


def test_evaluation_skips_the_same_rows(write, tmp_path):
    given = read_tokenizer(save_tokenizer(tmp_path / "t.json"))
    path, good = write("a.jsonl", with_line(b"{")), write("b.jsonl", lines(*TEXTS))
    found, wanted = open_held_out(path, given, VOCAB, skips=True), open_held_out(good, given, VOCAB)
    assert np.array_equal(found.tokens.ids, wanted.tokens.ids)
    assert found.bytes == wanted.bytes
    assert f"'{path}': 1 row skipped, the first: line 8 of '{path}' is not JSON" in found.note
    with pytest.raises(RequestError, match="is not JSON"):
        open_held_out(path, given, VOCAB)


def test_a_pattern_counts_the_rows_of_all_files(write, tmp_path):
    for name in ("a", "b"):
        write(f"{name}.jsonl", with_line(json.dumps({"text": name}).encode()[:-1]))
    source = open_(path=tmp_path / "?.jsonl", on_error="skip").source
    assert f"2 files, 120 documents (2 rows skipped, the first: line 8 of '{tmp_path / 'a.jsonl'}' is not" in source


def test_pieces_count_together_whatever_has_been_written(write, tmp_path, monkeypatch):
    """In many pieces, of which some exist already, the count and the first row are those of one."""
    content = with_line(b"{") * 9
    path = write("a.jsonl", content)
    whole = open_(path=path, on_error="skip")
    monkeypatch.setenv("JAXDIST_CACHE", str(tmp_path / "other"))
    monkeypatch.setattr(pieces, "PIECE", len(content) // 7)
    parted = open_(path=path, on_error="skip")
    assert parted.source == whole.source
    assert "540 documents (9 rows skipped, the first: line 8 of" in parted.source
    assert parted.fingerprint == whole.fingerprint
    assert np.array_equal(parted.train.tokens.ids, whole.train.tokens.ids)


def test_a_part_that_is_written_again_counts_its_own_rows(write, tmp_path):
    """Nor those of the part before it, which looks ahead to the end of the file."""
    content = WRITERS[".parquet"](pa.table({"text": [*TEXTS[:5], None, *TEXTS[5:], None]}))
    plan = Plan.of(
        Source.of(write("a.parquet", content), skips=True).texts(), "uint16", SpecialTokens(), False, "", (0, "")
    )
    (tmp_path / PIECES).mkdir()
    tokenizer = read_tokenizer(save_tokenizer(tmp_path / "t.json")).load()
    encoder = Encoder(tmp_path, replace(plan, size=100), tokenizer)
    encoder.write(0)
    parts = parts_of(tmp_path, 0)
    assert (len(parts) > 1, sum(part.left_out.skipped for part in parts)) == (True, 2)
    (tmp_path / PIECES / f"{part_name(0, len(parts) - 1)}.json").unlink()
    encoder.write(0)
    assert parts_of(tmp_path, 0) == parts


def test_empty_texts_are_counted(write, tmp_path):
    (tmp_path / "web").mkdir()
    content = lines("", *TEXTS[:30], "") + '{"text": null}\n' + lines(*TEXTS[30:], "")
    path = write("web/a.jsonl", content)
    write("web/b.md", "no")
    said = f"(1 .md left out; 3 empty texts; 1 row skipped, the first: line 33 of '{path}' has null as its \"text\"), "
    source = open_(path=tmp_path / "web", on_error="skip").source
    assert f"{tmp_path / 'web'}, 60 documents {said}" in source
    assert "60 documents, " in open_(path=write("b.jsonl", lines(*TEXTS))).source
