"""Pieces are the documents, each once, and give the same tokens for any size of piece and number of processes."""

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from jaxdist.config import RequestError
from jaxdist.data import sources
from jaxdist.data.sources import Source, is_held_out
from jaxdist.data.token_cache import check
from jaxdist.data.tokenizing import encoder, pieces, token_store
from jaxdist.data.tokenizing.encoder import part_name
from jaxdist.data.tokenizing.pieces import Plan
from jaxdist.data.tokenizing.shards import _stretches
from jaxdist.data.tokenizing.token_store import open_store
from jaxdist.data.tokenizing.workers import ONE_THREAD, Unfinished
from jaxdist.huggingface.special_tokens import SpecialTokens
from tests.data.column_files import arrow, arrow_file, parquet
from tests.data.files import POEM, VOCAB, lines, open_

TEXTS = [f"text {i} of " + "abc äö日本 " * (i * 7 % 23) for i in range(300)]
JSONL = lines(*TEXTS)
GZIP = gzip.compress(JSONL.encode())
TABLE = pa.table({"text": TEXTS, "other": range(300)})
PARQUET = parquet(TABLE, row_group_size=20, use_dictionary=False)
ODD_JSONL = "\n\ufeff" + JSONL.replace("\n", "\r\n", 20).replace("\n", "\n\n  \n", 30).replace("}", ', "x": 1}', 9)
ODD_TEXT = "日本語" * 900 + "\n" + POEM + "äöü" * 500

FILES = {
    "lines": {"a.jsonl": JSONL},
    "odd lines": {"a.jsonl": ODD_JSONL.rstrip()},
    "text": {"a.txt": POEM},
    "odd text": {"a.txt": ODD_TEXT},
    "small files": {f"{i:03}.jsonl": lines(*TEXTS[i : i + 2]) for i in range(0, 300, 2)},
    "files of all sizes": {
        "a.txt": POEM,
        "b.jsonl": JSONL,
        "c.jsonl.gz": GZIP,
        "d.txt": "d\n",
        "e.parquet": PARQUET,
    },
    "groups of rows": {"a.parquet": PARQUET},
    "batches": {"a.arrow": arrow(TABLE, rows=20), "b.feather": arrow_file(TABLE, rows=20)},
    "compressed": {"a.jsonl.gz": GZIP},
}


@pytest.fixture(autouse=True)
def small_batches(monkeypatch):
    monkeypatch.setattr(encoder, "ENCODE_CHARACTERS", 400)


@pytest.fixture(params=FILES.values(), ids=list(FILES))
def folder(request, tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    for name, content in request.param.items():
        (data / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    return data


def planned(files, size, monkeypatch):
    monkeypatch.setattr(pieces, "PIECE", size)
    return Plan.of(files, "uint16", SpecialTokens(eos=0), False, "", (0, ""))


@pytest.mark.parametrize("size", [1, 700, 5000, 1 << 26])
def test_the_pieces_are_the_documents(folder, monkeypatch, size):
    monkeypatch.setattr(sources, "BLOCK_BYTES", 300)
    source = Source.of(*sorted(folder.iterdir()))
    whole, read = list(source.documents()), []
    plan = planned(source.texts(), size, monkeypatch)
    found = [document for piece in range(len(plan.pieces)) for document in plan.documents(piece, read.append)]
    assert found == whole
    assert sum(read) == source.size == sum(plan.bytes_of(piece) for piece in range(len(plan.pieces)))
    assert len(plan.pieces) == 1 or size < 1 << 26
    if size == 700 and len(list(folder.iterdir())) != 1:
        assert len(plan.pieces) > 20
    again = folder / "again"
    again.mkdir()
    plan.write(again)
    assert Plan.read(again) == plan


def test_small_files_are_put_together(tmp_path, monkeypatch):
    for i in range(100):
        (tmp_path / f"{i:02}.txt").write_text("x" * 10)
    plan = planned(Source.of(*sorted(tmp_path.iterdir())).texts(), 95, monkeypatch)
    assert [piece.file for piece in plan.pieces] == list(range(0, 100, 10))


def same_tokens(corpus, other):
    for rows, others in ((corpus.train, other.train), (corpus.validation, other.validation)):
        assert rows.tokens.ids.tolist() == others.tokens.ids.tolist()
    assert (corpus.fingerprint, corpus.source, corpus.tokenizer) == (other.fingerprint, other.source, other.tokenizer)


@pytest.mark.parametrize("size", [500, 5000])
def test_any_size_gives_the_tokens_of_one_piece(folder, tmp_path, monkeypatch, size):
    """They are those of all earlier versions, which wrote them in one go, held-out documents included."""
    one = open_(path=folder, validation_fraction=0.15)
    monkeypatch.setenv("JAXDIST_CACHE", str(tmp_path / "other"))
    monkeypatch.setattr(pieces, "PIECE", size)
    monkeypatch.setattr(token_store, "core_count", lambda: 1)
    many = open_(path=folder, validation_fraction=0.15)
    same_tokens(one, many)
    written = many.train.tokens.path.parent
    assert len(list(written.glob("train-*.bin"))) > 1
    assert check(written) == check(one.train.tokens.path.parent)
    same_tokens(open_(path=folder, validation_fraction=0.15), many)
    numbers = np.arange(many.train.count)
    np.testing.assert_array_equal(one.train.read(numbers)["labels"], many.train.read(numbers)["labels"])


def test_files_that_are_held_out_whole_have_pieces_of_their_own(write, tmp_path, monkeypatch):
    path, held_out = write("a.jsonl", JSONL), write("b.jsonl", lines(*TEXTS[:99]))
    one = open_(path=path, validation_path=held_out)
    monkeypatch.setenv("JAXDIST_CACHE", str(tmp_path / "other"))
    monkeypatch.setattr(pieces, "PIECE", 2000)
    monkeypatch.setattr(token_store, "core_count", lambda: 1)
    many = open_(path=path, validation_path=held_out)
    same_tokens(one, many)
    assert len(many.validation.tokens.shards) > 3


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lines", "groups of rows"])
def test_any_number_of_processes_writes_the_same_bytes(write, tmp_path, monkeypatch, name):
    ((name, content),) = FILES[name].items()
    path = write(name, content)
    monkeypatch.setattr(pieces, "PIECE", 1500)
    found, told = [], []
    for workers in (1, 2, 5):
        monkeypatch.setenv("JAXDIST_CACHE", str(tmp_path / str(workers)))
        monkeypatch.setattr(token_store, "core_count", lambda: workers)  # noqa: B023
        told.append([])
        corpus = open_(path=path, progress=lambda what, done, total: told[-1].append((what, done, total)))
        found.append({file.name: file.read_bytes() for file in corpus.train.tokens.path.parent.iterdir()})
    assert found[0] == found[1] == found[2]
    last = [[now for now in one if now[0] == "tokenizing"][-1] for one in told]
    assert last == [("tokenizing", path.stat().st_size, path.stat().st_size)] * 3


THREADS = """
import os, tokenizers
tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, "a"))
tokenizer.encode_batch_fast(["a"] * 999)
print(len(os.listdir("/proc/self/task")))
"""


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="it counts the threads that Linux shows")
def test_a_process_encodes_in_one_thread_beside_that_of_python():
    environment = {**os.environ, **ONE_THREAD}
    assert subprocess.check_output([sys.executable, "-c", THREADS], env=environment) == b"2\n"


@pytest.mark.slow
def test_what_a_process_refuses_is_said_as_in_one(write, monkeypatch):
    """With the number of the line in the file, and not in the piece."""
    text = JSONL.replace("text 250 of", 'text 250" of')
    path = write("a.jsonl", text)
    trained = open_(path=write("b.txt", POEM)).tokenizer
    monkeypatch.setattr(pieces, "PIECE", 1500)
    monkeypatch.setattr("jaxdist.data.streams.train_tokenizer", lambda *_: trained)
    for workers in (1, 3):
        monkeypatch.setattr(token_store, "core_count", lambda: workers)  # noqa: B023
        with pytest.raises(RequestError, match=r"^line 251 of '.*a.jsonl' is not JSON") as raised:
            open_(path=path)
        assert isinstance(raised.value, Unfinished)


@pytest.mark.slow
def test_a_process_that_ends_is_named_and_its_work_is_kept(write, cache, monkeypatch):
    path = write("a.jsonl", JSONL)
    monkeypatch.setattr(pieces, "PIECE", 1500)
    monkeypatch.setattr(token_store, "core_count", lambda: 2)
    monkeypatch.setattr("sys.executable", "/bin/false")
    with pytest.raises(RequestError, match=r"that tokenizes has ended \(exit code 1\); what is tokenized is kept"):
        open_(path=path)
    (left,) = cache.iterdir()
    assert (left / pieces.PLAN).exists()


def test_the_parts_of_a_file_that_cannot_be_divided_are_kept_one_by_one(write, cache, monkeypatch):
    """A kill in the middle of a compressed file loses one part of it."""
    path = write("a.jsonl.gz", GZIP)
    whole = open_(path=path).train.tokens.ids.tolist()
    for folder in cache.iterdir():
        folder.rename(cache.parent / "away")
    monkeypatch.setattr(pieces, "PIECE", 2000)

    def interrupt(what, done, total):
        if what == "tokenizing" and list(cache.glob(f"*/pieces/{part_name(0, 2)}.json")):
            raise KeyboardInterrupt

    monkeypatch.setattr("jaxdist.data.compressed.CHUNK", 100)
    with pytest.raises(KeyboardInterrupt):
        open_(path=path, progress=interrupt)
    (kept,) = cache.glob(f"*/pieces/{part_name(0, 1)}.json")
    before = json.loads(kept.read_text())
    made = []
    write_part = token_store.write_pieces.__globals__["Encoder"]._write_part
    monkeypatch.setattr(
        "jaxdist.data.tokenizing.encoder.Encoder._write_part",
        lambda self, name, documents: (made.append(name), write_part(self, name, documents))[1],
    )
    assert open_(path=path).train.tokens.ids.tolist() == whole
    assert made[0] == part_name(0, 3)
    assert before["documents"] > 10


def test_documents_are_held_out_by_their_numbers_in_the_whole():
    """The rule of every version, for numbers and arrays, to the last bit of its rounding."""
    for fraction in (0.05, 0.1, 0.3, 1 / 3, 0.999):
        numbers = np.arange(100_000)
        expected = [int((n + 1) * fraction) > int(n * fraction) for n in range(100_000)]
        assert is_held_out(numbers, fraction).tolist() == expected
        assert [bool(is_held_out(n, fraction)) for n in range(1000)] == expected[:1000]
    assert not is_held_out(np.arange(9), 0.0).any()


def test_documents_are_copied_in_groups_of_bounded_size(monkeypatch):
    monkeypatch.setattr("jaxdist.data.tokenizing.shards.CHUNK", 10)
    sizes = np.array([3, 3, 3, 3, 25, 0, 0, 10, 1, 0])
    groups = [(some.start, some.stop) for some in _stretches(sizes)]
    assert groups == [(0, 3), (3, 4), (4, 5), (5, 8), (8, 10)]


def test_the_bytes_of_the_text_are_counted_over_pieces(write, tmp_path, monkeypatch):
    """The first document of all counts without its first token, in whichever piece it is."""
    from jaxdist.huggingface.given_tokenizer import read_tokenizer
    from tests.data.files import save_tokenizer

    given = read_tokenizer(save_tokenizer(tmp_path / "t.json"))
    source = Source.of(write("a.jsonl", "\n" * 3000 + lines("w1 w2 w3", *TEXTS)))
    found = []
    for size in (1 << 26, 1000):
        monkeypatch.setattr(pieces, "PIECE", size)
        monkeypatch.setattr(token_store, "core_count", lambda: 1)
        key = f"{size:064x}"
        store = open_store(source, lambda content: key, VOCAB, given, lambda *_: None, counted="joined")  # noqa: B023
        found.append(store.facts)
        assert store.train.length == 0
    assert found[0] == found[1]
    assert found[0]["bytes"] == sum(len(text.encode()) for text in ["w1 w2 w3", *TEXTS]) - len("w1 ")
