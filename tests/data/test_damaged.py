"""Damaged and odd files, a line each: what is made, and what is said of it, or read from it. Nothing is read short."""

import bz2
import gzip
import json
import lzma
import os
import struct
import sys

import numpy as np
import pyarrow as pa
import pytest

from jaxdist.config import DataConfig, RequestError
from jaxdist.data.naming.paths import open_sources
from jaxdist.data.progress import unseen
from jaxdist.data.token_files import open_token_files
from tests.data.column_files import arrow, arrow_file, parquet
from tests.data.files import VOCAB, ids, lines
from tests.data.test_llm_c import llm_c
from tests.data.test_megatron import index

zstd = pytest.importorskip("compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd")

TEXT = "one line\nanother line\n"
ROWS = lines("first", "second").encode()
LIST = b'[{"text": "first"}, {"text": "second"}]'
NOISE = np.random.default_rng(0).integers(32, 127, 20_000, np.uint8).tobytes()
READ = NOISE.decode()
COLUMN = pa.table({"text": [f"the text of row {i}" for i in range(600)], "n": range(600)})
TEXTS = COLUMN["text"].to_pylist()
STREAM, FILE, PARQUET = arrow(COLUMN), arrow_file(COLUMN), parquet(COLUMN, compression="none", use_dictionary=False)
BATCH = arrow(COLUMN.slice(0, 250))[:-8]
"""A stream that is cut between two batches, which no reader of Arrow sees."""
TOKENS = np.arange(100)


def changed(content: bytes, old: bytes, new: bytes) -> bytes:
    assert content.count(old) >= 1
    assert len(old) == len(new)
    return content.replace(old, new)


NULL = pa.table({"text": ["a", None, "c"]})


def offsets(content: bytes) -> bytes:
    """Arrow whose first texts end far beyond the buffer; reading them ends the process."""
    first = struct.pack("<3i", 0, len(TEXTS[0]), len(TEXTS[0] + TEXTS[1]))
    return changed(content, first, struct.pack("<3i", 0, 1 << 30, (1 << 30) + 9))


def holed(content: bytes) -> bytes:
    return content[:99] + bytes(999) + content[1098:]


def several(compress) -> bytes:
    return compress(NOISE) + compress(b"") + compress(NOISE)


def saved(**files: str | bytes) -> dict[str, str | bytes]:
    """What `save_to_disk` leaves, with other files in it."""
    listed = {"_data_files": [{"filename": "a.arrow"}]}
    whole = {"a.arrow": STREAM, "state.json": json.dumps(listed), "dataset_info.json": "{}"}
    names = {name.replace("__", "."): content for name, content in files.items()}
    return {f"saved/{name}": content for name, content in (whole | names).items()}


def listing(**state) -> str:
    return json.dumps({"_data_files": [{"filename": "a.arrow"}]} | state)


TWICE = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["text", "text"])


def of(name: str, *rows: tuple) -> list[tuple]:
    """Rows that make a file of this name."""
    return [(f"{name}: {row[0]}", {name: row[1]}, *row[2:]) for row in rows]


TABLE = [
    # what it is, its content or that of several files, what is said or read; then data.text and data.dtype
    # --- compressed
    *of(
        "a.gz",
        ("gz cut", gzip.compress(NOISE)[:-9], "'a.gz' is cut short: its "),
        ("gz of several streams", several(gzip.compress), [READ + READ]),
        ("gz, its second stream cut", several(gzip.compress)[:-9], "'a.gz' is cut short: its "),
        ("gz and something after it", gzip.compress(NOISE) + b"no stream", "'a.gz' is damaged in its first"),
        ("gz with zeros after it", gzip.compress(NOISE) + bytes(512), [READ]),
        ("gz of nothing", gzip.compress(b""), []),
        ("gz of gz", gzip.compress(gzip.compress(NOISE)), "is compressed twice, by gzip inside"),
    ),
    *of(
        "a.xz",
        ("xz cut", lzma.compress(NOISE)[:-9], "'a.xz' is cut short: its "),
        ("xz of several streams", several(lzma.compress), [READ + READ]),
    ),
    *of(
        "a.bz2",
        ("bz2 cut", bz2.compress(NOISE)[:-9], "'a.bz2' is cut short: its "),
        ("bz2 of several streams", several(bz2.compress), [READ + READ]),
    ),
    *of(
        "a.zst",
        ("zst cut", zstd.compress(NOISE)[:-9], "'a.zst' is cut short: its "),
        ("zst of several frames", several(zstd.compress), [READ + READ]),
        ("zst, its second frame cut", several(zstd.compress)[:-9], "'a.zst' is cut short: its "),
    ),
    *of(
        "a.jsonl.gz",
        ("gz of JSON lines, cut", gzip.compress(ROWS * 999)[:-9], "'a.jsonl.gz' is cut short"),
    ),
    *of(
        "a.bin.gz",
        ("gz of tokens", gzip.compress(ids(1, 2)), "'a.bin.gz' is compressed by gzip, and tokens are used in"),
    ),
    *of(
        "a.parquet.gz",
        ("gz of Parquet", gzip.compress(PARQUET), "is a Parquet file; decompress it"),
    ),
    *of(
        "a.txt.gz",
        ("a text called .gz", TEXT, [TEXT]),
    ),
    # --- texts
    *of(
        "a.txt",
        ("an empty text", "", "data.path 'a.txt' is empty; give a file with content"),
        ("a text with a mark (kept, as it always was)", b"\xef\xbb\xbfx", ["\ufeffx"]),
        ("a text of Windows", b"a\r\nb\r\n", ["a\r\nb\r\n"]),
        ("a text with NUL", b"a\0b", ["a\0b"]),
        ("Latin-1", "Zürich".encode("latin-1"), "'a.txt' is not utf-8 text (byte 2 is 0xfc); convert it"),
        ("a character cut at the end", "Zü".encode()[:-1], "'a.txt' is not utf-8 text (byte 2 is 0xc3)"),
        ("half a surrogate pair as bytes", b"ab\xed\xa0\x80", "'a.txt' is not utf-8 text (byte 3 is 0xed)"),
        ("UTF-16", TEXT.encode("utf-16"), "'a.txt' is text in UTF-16; convert it: iconv"),
        ("UTF-16 without a mark", "Zürich".encode("utf-16-le"), "'a.txt' is not utf-8 text (byte 3 is 0xfc)"),
    ),
    # --- JSON lists
    *of(
        "a.json",
        ("a list", LIST, ["first", "second"]),
        ("a list on lines, with a mark", b"\xef\xbb\xbf" + LIST.replace(b" ", b"\n"), ["first", "second"]),
        ("empty texts", LIST.replace(b"second", b""), ["first"]),
        ("a list cut after an item", LIST[:-1], "'a.json' is cut short: its list does not end after item 2; copy it"),
        ("a list cut in an item", LIST[:-4], "item 2 of 'a.json' is not JSON (Unterminated string"),
        ("no comma", LIST.replace(b",", b""), "item 1 of 'a.json' is followed by '{' and no comma; mend it"),
        ("a comma too many", LIST.replace(b"]", b",]"), "item 3 of 'a.json' is not JSON (Expecting value); mend it"),
        ("two lists", LIST + LIST, "'a.json' goes on after its JSON list; write one list in a file"),
        (
            "a number in a list",
            LIST.replace(b"]", b", 7]"),
            "item 3 of 'a.json' has a number; write {\"text\"",
        ),
        (
            "another key in a list",
            LIST.replace(b"]", b', {"b": 1}]'),
            "item 3 of 'a.json' has the keys ['b']; write",
        ),
        ("a list of other keys", b'[{"b": 1}]', ['[{"b": 1}]']),
        ("a deep list in a list", LIST[:-1] + b"," + b"[" * 99_999, "(its values are nested too deeply); mend it"),
        ("Latin-1 in a list", LIST.replace(b"second", b"\xfc"), "'a.json' is not utf-8 text (after byte 0: invalid"),
    ),
    # --- JSON lines
    *of(
        "a.jsonl",
        ("lines with marks", b"\xef\xbb\xbf" + ROWS + b"\xef\xbb\xbf" + ROWS, ["first", "second"] * 2),
        ("lines of Windows", ROWS.replace(b"\n", b"\r\n"), ["first", "second"]),
        ("blank lines and empty texts", b"\n \n" + ROWS + b'{"text": ""}\n\n', ["first", "second"]),
        ("a line without its end", ROWS[:-1], ["first", "second"]),
        ("a cut line", ROWS[:-4], "line 2 of 'a.jsonl' is not JSON (Unterminated string"),
        ("two objects on a line", ROWS.replace(b"\n", b""), "line 1 of 'a.jsonl' is not JSON (Extra data"),
        ("no JSON", ROWS + b"{text: 1}", "line 3 of 'a.jsonl' is not JSON (Expecting property name"),
        ("NUL after a line", ROWS + b"\0\0\0", "line 3 of 'a.jsonl' is not JSON"),
        ("a deep list", ROWS + b"[" * 99_999, "line 3 of 'a.jsonl' is not JSON"),
        ("JSON over lines", '{\n"text": "x"\n}', "line 1 of 'a.jsonl' is not JSON"),
        ("a list of rows", '[{"text": "x"}]', 'line 1 of \'a.jsonl\' has a list; write {"text": "..."} on each line'),
        ("a number", "7" * 5000, 'line 1 of \'a.jsonl\' has a number; write {"text": "..."} on each line'),
        ("another key", '{"b": 1, "a": 2}', "line 1 of 'a.jsonl' has the keys ['a', 'b']; write an object"),
        ("many keys", json.dumps(dict.fromkeys("abcdefgh")), "['a', 'b', 'c', 'd', 'e'] and 3 more; write"),
        ("null", '{"text": null}', "line 1 of 'a.jsonl' has null as its \"text\"; write a string there, or"),
        ("a number as text", '{"text": ' + "7" * 5000 + "}", 'has a number as its "text"'),
        ("null around the text", '{"m": null}', "has the keys ['m'], and data.text names \"m.text\"", "m.text"),
        ("half a surrogate pair", '{"text": "\\ud800"}', "line 1 of 'a.jsonl' has half of a surrogate pair"),
        ("both halves", '{"text": "\\ud83d\\ude42"}', ["🙂"]),
        ("another encoding", ROWS + b'{"text": "\xff"}', "line 3 of 'a.jsonl' is not utf-8 text (byte 11 of it)"),
        ("numbers of any kind elsewhere", '{"n": NaN, "m": 1' + "0" * 5000 + ', "text": "x"}', ["x"]),
        ("a key twice", '{"text": "x", "text": "y"}', ["y"]),
    ),
    *of(
        "a.ndjson",
        ("a list as text", '{"text": ["x"]}', "line 1 of 'a.ndjson' has a list as its \"text\""),
    ),
    *of(
        "a.json",
        ("JSON that is no lines", '{\n"text": "x"\n}', ['{\n"text": "x"\n}']),
    ),
    # --- tokens
    *of(
        "a.bin",
        ("half a token", ids(1, 2)[:-1], "'a.bin' is cut short: 3 bytes are not a whole number of uint16 tokens"),
        ("ids beyond the vocabulary", ids(1, 300), "'a.bin' holds token id 300 but model.vocab is 300; set"),
        ("uint32, cut", TOKENS.astype("<u4").tobytes()[:-2], "'a.bin' is cut short: 398 bytes are not a whole"),
        ("int64", np.arange(2, 99).astype("<i8").tobytes(), "'a.bin' looks like little-endian int64, not uint16"),
        ("big-endian", np.arange(2, 99).astype(">u4").tobytes(), "'a.bin' looks like big-endian uint32 or int64"),
        (
            "swapped bytes",
            TOKENS.astype(">u2").tobytes(),
            "seems to hold big-endian uint16, as which its ids begin",
        ),
        ("a text", TEXT * 9, "'a.bin' holds text and no tokens; name it .txt"),
    ),
    ("tokens and a text", {"d/a.bin": ids(1), "d/b.txt": TEXT}, "'d' names tokens, 'd/a.bin', and text, 'd/b.txt'"),
    # --- llm.c
    *of(
        "a.bin",
        ("a header that counts too many", llm_c(TOKENS, count=101), "counts 101 tokens of uint16, but 200 bytes"),
        ("a header that counts too few", llm_c(TOKENS, count=99), "counts 99 tokens of uint16, but 200 bytes"),
        ("a header that counts below 0", llm_c(TOKENS, count=-1), "'a.bin' is damaged: its header counts -1"),
        ("half a token after a header", llm_c(TOKENS)[:-1], "but 199 bytes follow it and not 200; copy it again"),
        ("a cut header", llm_c(TOKENS)[:1000], "'a.bin' is cut short: 1000 bytes are no header of llm.c"),
        ("another version", llm_c(TOKENS, version=2), "llm.c (magic 20240520) of version 2, of which only version 1"),
        ("ids of Llama 3", llm_c([0, 1 << 31], "uint32"), "holds the negative id -2147483648; ids begin at 0"),
        ("another data.dtype", llm_c(TOKENS), "a token file of llm.c", None, "uint32"),
    ),
    # --- Megatron
    *of(
        "a.idx",
        ("a wrong pointer", index([40, 60], [0, 1, 2], places=[0, 82]), "does not say that sequence 1 begins where"),
        ("a negative length", index([-40, 140], [0, 1, 2]), "does not say that sequence 0 begins where the one before"),
        ("other lengths", index([40, 61], [0, 1, 2]), "has 200 bytes, but its index 'a.idx' describes 202 (2"),
        ("another type", index([40, 60], [0, 1, 2], "int32"), "has 200 bytes, but its index 'a.idx' describes 400"),
        ("another width", index([40, 60], [0, 1, 2], "int64"), "'a.bin' holds int64, as its index says; only"),
        ("bytes", index([40, 60], [0, 1, 2], "uint8"), "'a.bin' holds uint8, as its index says"),
        ("an index without documents", index([40, 60], []), "'a.idx' is damaged: 2 sequences and 0 borders"),
        ("documents end early", index([40, 60], [0, 1, 1]), "is damaged: its documents are the sequences 0 to 1, of"),
        ("a cut index", index([40, 60], [0, 1, 2])[:-8], "'a.idx' is damaged: 2 sequences and 3 borders"),
        ("a cut header of an index", index([40, 60], [0, 1, 2])[:30], "'a.idx' is cut short: 30 bytes are no index"),
        ("modes of pictures", index([40, 60], [0, 1, 2], modes=b"\0\1"), "'a.idx' gives the sequences modes, as of"),
        ("another version of the index", index([40, 60], [0, 1, 2], version=2), "an index of Megatron of version 2"),
    ),
    *of(
        "b.idx",
        ("an index alone", index([40, 60], [0, 1, 2]), "'b.idx' is an index of Megatron (.idx), which holds no tokens"),
    ),
    # --- Parquet
    *of(
        "a.parquet",
        ("cut", PARQUET[:-9], "'a.parquet' is cut short: it does not end with PAR1; copy it again"),
        ("its start cut", PARQUET[9:], "'a.parquet' is called .parquet and is no Parquet file; copy"),
        ("its pages damaged", holed(parquet(COLUMN, write_page_checksum=True)), "'a.parquet' is damaged: pyarrow says"),
        ("no rows", parquet(COLUMN.slice(0, 0)), []),
        ("a text", TEXT, "'a.parquet' is called .parquet and is no Parquet file"),
        ("a pointer to a file elsewhere", "version https://git-lfs.github.com/spec/v1\noid", "is a pointer of Git LFS"),
        ("a column that is missing", PARQUET, "columns ['n', 'text'], and data.text names \"content\"", "content"),
        ("another name", parquet(pa.table({"b": ["x"]})), "'a.parquet' has the columns ['b']; name that of the"),
        ("a field of a text", PARQUET, "has the columns ['n', 'text'], and data.text names \"text.a\"", "text.a"),
        ("a column of numbers", PARQUET, "'a.parquet' has int64 as its \"n\"; name a column of strings", "n"),
        ("a column of bytes", parquet(pa.table({"text": [b"x"]})), 'has binary as its "text"'),
        ("a column of nulls", parquet(pa.table({"text": [None]})), 'has null as its "text"; name a column'),
        ("a null", parquet(NULL), "row 2 of 'a.parquet' has null as its \"text\"; write a string there"),
        ("a null around the text", parquet(NULL.rename_columns(["m"])), "has the columns ['m'], and", "m.t"),
        ("a nested null", parquet(pa.table({"m": [{"t": "a"}, None]})), "row 2 of 'a.parquet' has null as its", "m.t"),
        ("token ids", parquet(pa.table({"input_ids": [[1]]})), 'and "input_ids" holds token ids; only texts are read'),
        ("ids by name", parquet(pa.table({"input_ids": [[1]]})), 'has token ids as its "input_ids"; only', "input_ids"),
        (
            "no text",
            changed(PARQUET, b"row 300", b"row \xff00"),
            "row 301 of 'a.parquet' has a \"text\" that is not utf-8",
        ),
    ),
    *of(
        "a",
        ("a start and an end of Parquet", b"PAR1\x15" + bytes(99) + b"PAR1", "'a' is damaged: pyarrow says"),
    ),
    *of(
        "a.arrow",
        ("a name twice", arrow(TWICE), "'a.arrow' has several columns \"text\"; name each of them differently"),
    ),
    # --- Arrow
    *of(
        "a.arrow",
        ("a file, cut", FILE[:-9], "'a.arrow' is cut short: it does not have the end of an Arrow file; copy it again"),
        ("a stream, cut", STREAM[:-9], "'a.arrow' is cut short: it does not have the end of an Arrow file"),
        ("a stream, cut between batches", BATCH, "'a.arrow' is cut short: it does not have the end of an Arrow"),
        ("two streams", STREAM + STREAM, "'a.arrow' holds several streams, one after another; give each of them"),
        ("offsets of a stream", offsets(STREAM), "'a.arrow' is damaged: pyarrow says"),
        ("lengths in a stream", STREAM[:40] + b"\xff" * 40 + STREAM[80:], "'a.arrow' is damaged: pyarrow says"),
        ("a text", TEXT, "'a.arrow' is called .arrow and is no Arrow file; copy it again, or rename"),
        ("a null", arrow(NULL), "row 2 of 'a.arrow' has null as its \"text\""),
        ("no text", changed(STREAM, b"row 300", b"row \xff00"), "row 301 of 'a.arrow' has a \"text\" that is"),
    ),
    *of(
        "a.feather",
        ("offsets of a file", offsets(FILE), "'a.feather' is damaged: pyarrow says"),
    ),
    # --- data sets that were saved
    ("a data set", saved(), TEXTS),
    (
        "a shard that is missing",
        saved(state__json=listing(_data_files=[{"filename": "b.arrow"}])),
        "saved/state.json' names 'b.arrow', which is not there; copy the whole folder again",
    ),
    ("a list without files", saved(state__json="{}"), "saved/state.json' lists no files of a data set; save"),
    ("a damaged list", saved(state__json="{"), "saved/state.json' is not valid JSON"),
    (
        "a selection",
        saved(state__json=listing(_indices_data_files=[{}])),
        "'saved' was saved with a selection of its rows",
    ),
    (
        "a split that is missing",
        saved(dataset_dict__json='{"splits": ["train"]}'),
        "saved/dataset_dict.json' names 'train', which is not there; copy",
    ),
    (
        "splits without names",
        saved(dataset_dict__json="{}"),
        "saved/dataset_dict.json' lists no splits; save the data set",
    ),
    ("a shard that is cut", saved(a__arrow=STREAM[:-9]), "'saved/a.arrow' is cut short"),
]


def read(path: str, text: str | None, dtype: str | None) -> list | str:
    """The texts or the ids of all documents, or why they are not read."""
    knobs = {name: value for name, value in (("text", text), ("dtype", dtype)) if value}
    try:
        sources = open_sources(DataConfig(path=path, **knobs))
        if sources.training.holds_tokens:
            (file,) = open_token_files(sources.all, None, VOCAB, unseen, dtype or "auto")
            return file.tokens.ids.tolist()
        return [document.text for document in sources.training.documents()]
    except RequestError as error:
        return str(error)


@pytest.mark.parametrize(
    ("files", "wanted", "knobs"), [row[1:3] + (row[3:],) for row in TABLE], ids=[row[0] for row in TABLE]
)
def test_each_is_read_or_named(write, tmp_path, monkeypatch, files, wanted, knobs):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.bin").write_bytes(ids(*TOKENS))  # of which an index is
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write(name, content)
    first = next(iter(files))
    found = read(first.split("/")[0], *(*knobs, None, None)[:2])
    if isinstance(wanted, str):
        assert isinstance(found, str)
        assert wanted in found
        named = {first.split("/")[0], first.replace(".idx", ".bin")}
        assert any(f"{name}'" in found or f"{name}/" in found for name in named), "the file is not named"
    else:
        assert found == wanted


PLACES = [
    ("a dangling link", lambda path: path.symlink_to("nothing"), "data.path 'x.jsonl' does not exist; give the path"),
    ("a link to itself", lambda path: path.symlink_to(path.name), "data.path 'x.jsonl' does not exist; give the path"),
    ("a fifo", os.mkfifo, "data.path 'x.jsonl' is not a regular file, and it is read more than once; copy it into one"),
    ("an empty folder", os.mkdir, "data.path 'x.jsonl' is a folder without files; give one with texts in it"),
]


@pytest.mark.parametrize(("make", "wanted"), [row[1:] for row in PLACES], ids=[row[0] for row in PLACES])
def test_what_is_no_file_is_named(tmp_path, monkeypatch, make, wanted):
    monkeypatch.chdir(tmp_path)
    make(tmp_path / "x.jsonl")
    assert wanted in read("x.jsonl", None, None)


def test_a_folder_may_be_called_as_a_file(write, tmp_path):
    (tmp_path / "x.jsonl").mkdir()
    write("x.jsonl/a.txt", TEXT)
    os.mkfifo(tmp_path / "x.jsonl/b.txt")
    (tmp_path / "x.jsonl/c.txt").symlink_to("nothing")
    assert read(tmp_path / "x.jsonl", None, None) == [TEXT]


def test_a_file_that_may_not_be_read_is_named(write, monkeypatch):
    """Of root too, whom no mode stops."""
    path = write("a.jsonl", ROWS)

    def refused(*args, **kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("pathlib.Path.open", refused)
    assert f"'{path}' cannot be read (Permission denied); make it readable" in read(path, None, None)


def test_a_file_that_is_named_namesis_named(write, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = write("a.txt", TEXT)
    os.symlink("a.txt", "b.txt")
    for names in ("a.txt,./a.txt", "a.txt,b.txt", "*.txt"):
        assert f"names the file '{path}' 2 times; name it once" in read(names, None, None)
