"""Parquet and Arrow are read row by row, of the columns that data.text names, in little memory."""

import importlib.util
import tracemalloc

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import feather, ipc

from jaxdist.config import RequestError
from jaxdist.data.held_out import open_held_out
from jaxdist.data.naming.paths import places_of
from jaxdist.data.sources import Source
from jaxdist.huggingface.given_tokenizer import read_tokenizer
from tests.data.column_files import WRITERS, arrow, parquet
from tests.data.files import POEM, VOCAB, lines, open_, save_tokenizer

TEXTS = [f"the {i}th text äöü 日本 🙂 of several " * 3 for i in range(600)]


def texts(path, text="text") -> list[str]:
    documents = list(Source.of(path, text=text).documents())
    assert all(document.begins and document.ends for document in documents)
    return [document.text for document in documents]


@pytest.mark.parametrize("ending", WRITERS)
def test_tokens_are_those_of_the_same_json_lines(write, ending):
    table = pa.table({"id": range(len(TEXTS)), "text": TEXTS})
    found = open_(path=write(f"a{ending}", WRITERS[ending](table)))
    wanted = open_(path=write("a.jsonl", lines(*TEXTS)))
    assert np.array_equal(found.train.tokens.ids, wanted.train.tokens.ids)
    assert np.array_equal(found.validation.tokens.ids, wanted.validation.tokens.ids)
    assert found.source.replace(ending, ".jsonl") == wanted.source
    assert found.fingerprint != wanted.fingerprint


META = pa.array([{"text": text, "n": 1} for text in TEXTS])
FORMS = {
    "large": (pa.array(TEXTS, pa.large_string()), "c", "{}"),
    "dictionary": (pa.array(TEXTS).dictionary_encode(), "c", "{}"),
    "nested": (META, "c.text", "{}"),
    "template": (META, "<{c.text}|{c.text}>", "<{0}|{0}>"),
    "slice": (pa.concat_arrays([META[:3], META])[3:], "c.text", "{}"),
}


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow", "a.feather", "a.bin", "a.jsonl", "a"])
@pytest.mark.parametrize(("column", "text", "wanted"), FORMS.values(), ids=list(FORMS))
def test_the_text_is_where_data_text_says(write, name, column, text, wanted):
    content = WRITERS.get(name[1:], parquet)(pa.table({"c": column, "other": [7] * len(TEXTS)}))
    assert texts(write(name, content), text) == [wanted.format(one) for one in TEXTS]


@pytest.mark.parametrize("ending", WRITERS)
def test_a_name_may_have_dots_and_empty_texts_are_no_documents(write, ending):
    table = pa.table({"a.b": ["", "x", ""], "a": [{"b": "y"}, {"b": ""}, {"b": ""}]})
    path = write(f"a{ending}", WRITERS[ending](table))
    assert texts(path, "a.b") == ["x"]
    assert texts(path, "{a.b}|") == ["x|"]


@pytest.mark.parametrize("compression", ["none", "snappy", "zstd", "gzip"])
def test_compressed_pages(write, compression):
    content = parquet(pa.table({"text": TEXTS}), compression=compression, data_page_version="2.0")
    assert texts(write("a.parquet", content)) == TEXTS


@pytest.mark.parametrize("compression", ["lz4", "zstd"])
def test_compressed_buffers(write, tmp_path, compression):
    table = pa.table({"text": TEXTS})
    how = ipc.IpcWriteOptions(compression=compression)
    assert texts(write("a.arrow", arrow(table, options=how))) == TEXTS
    feather.write_feather(table, tmp_path / "a.feather", compression=compression)
    assert texts(tmp_path / "a.feather") == TEXTS


def test_no_rows_are_no_documents(write):
    table = pa.table({"text": pa.array([], pa.string())})
    assert [texts(write("a", content(table))) for content in WRITERS.values()] == [[], [], []]


def test_other_columns_are_not_read(write):
    """Their pages are damaged, and nobody sees it."""
    table = pa.table({"text": TEXTS, "other": [f"secret {i}" for i in range(len(TEXTS))]})
    content = parquet(table, compression="none", use_dictionary=False, write_statistics=False)
    content = content.replace(b"secret", b"\xff" * 6)
    assert texts(write("a.parquet", content)) == TEXTS


@pytest.mark.parametrize("ending", WRITERS)
def test_progress_is_the_size_of_the_file(write, ending):
    path = write(f"a{ending}", WRITERS[ending](pa.table({"text": TEXTS})))
    counts = []
    assert len(list(Source.of(path).documents(on_read=counts.append))) == len(TEXTS)
    assert sum(counts) == path.stat().st_size
    assert len(counts) > 2
    assert min(counts) >= 0


def test_a_large_group_of_rows_takes_little_memory(tmp_path):
    """One group of 16 MiB of texts that do not compress, and another column of as much."""
    noise = np.random.default_rng(0).integers(32, 127, (1 << 12, 1 << 12), np.uint8)
    rows = [row.tobytes().decode() for row in noise]
    pq.write_table(pa.table({"text": rows, "other": rows}), tmp_path / "a.parquet", use_dictionary=False)
    before = pa.total_allocated_bytes()
    most = 0
    tracemalloc.start()
    for number, _ in enumerate(Source.of(tmp_path / "a.parquet").documents()):
        if number % 100 == 0:
            most = max(most, pa.total_allocated_bytes() - before)
    most += tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert number + 1 == len(rows)
    assert 1 << 20 < most < 12 << 20


def test_a_file_is_evaluated_and_seen_by_a_job(write, tmp_path):
    path = write("a.parquet", parquet(pa.table({"content": TEXTS})))
    given = read_tokenizer(save_tokenizer(tmp_path / "t.json"))
    rows = write("a.jsonl", lines(*TEXTS))
    found, wanted = open_held_out(path, given, VOCAB, text="content"), open_held_out(rows, given, VOCAB)
    assert np.array_equal(found.tokens.ids, wanted.tokens.ids)
    assert found.bytes == wanted.bytes
    assert places_of(str(path)) == (path,)


def test_a_missing_package_is_named_before_anything_is_read(write, monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr("jaxdist.data.naming.paths.find_spec", lambda name: None if name == "pyarrow" else real(name))
    path = write("a.parquet", b"PAR1\x00 not read")
    with pytest.raises(RequestError) as raised:
        open_(path=path)
    assert str(raised.value) == (
        f"data.path '{path}' is Parquet, and pyarrow, which reads it, is not installed; pip install 'jaxdist[data]'"
    )


def test_a_run_on_a_folder_that_left_parquet_out_goes_on(write, tmp_path):
    (tmp_path / "web").mkdir()
    write("web/a.txt", POEM)
    begun = open_(path=tmp_path / "web").fingerprint
    write("web/b.parquet", parquet(pa.table({"text": TEXTS})))
    assert open_(path=tmp_path / "web").fingerprint != begun
    resumed = open_(path=tmp_path / "web", begun=begun)
    assert resumed.fingerprint == begun


def test_a_file_that_asks_for_too_much_memory_is_named(write, monkeypatch):
    def refused(*args, **kwargs):
        raise MemoryError

    monkeypatch.setattr(ipc, "open_stream", refused)
    with pytest.raises(RequestError, match=r"'.*a\.arrow' asks for more memory than there is; it is damaged, or"):
        texts(write("a.arrow", arrow(pa.table({"text": TEXTS}))))
