"""Tokens of Megatron are read with their index, to the token; what does not belong together is a sentence."""

import struct
from pathlib import Path

import numpy as np
import pytest

from jaxdist.config import RequestError
from jaxdist.data.held_out import open_held_out
from jaxdist.data.naming.paths import places_of
from jaxdist.data.packing import cut_in_stream
from jaxdist.data.readers import megatron as reader
from jaxdist.data.row_use import Cut
from tests.data.files import VOCAB, open_, save_tokenizer

CODES = {"uint8": 1, "int32": 4, "int64": 5, "uint16": 8}
EOS = VOCAB - 1
PREFIX = "web_text_document"


def index(lengths, borders, dtype="uint16", version=1, places=None, modes=b"") -> bytes:
    """An index as `_IndexWriter` of Megatron core's indexed_dataset.py lays it out."""
    width = np.dtype(dtype).itemsize
    if places is None:
        places = [width * sum(lengths[:number]) for number in range(len(lengths))]
    header = b"MMIDIDX\x00\x00" + struct.pack("<Q", version) + struct.pack("<B", CODES[dtype])
    counts = struct.pack("<Q", len(lengths)) + struct.pack("<Q", len(borders))
    arrays = np.array(lengths, "<i4").tobytes() + np.array(places, "<i8").tobytes() + np.array(borders, "<i8").tobytes()
    return header + counts + arrays + modes


@pytest.fixture
def megatron(tmp_path):
    """Writes documents as the two files, and returns the `.bin`."""

    def save(documents, dtype="uint16", **how) -> Path:
        lengths = [len(document) for document in documents]
        path = tmp_path / f"{PREFIX}.bin"
        path.write_bytes(np.concatenate(documents).astype(f"<{np.dtype(dtype).str[1:]}").tobytes())
        path.with_suffix(".idx").write_bytes(index(lengths, range(len(lengths) + 1), dtype, **how))
        return path

    return save


def documents(count=20, vocab=VOCAB - 1, end=EOS):
    random = np.random.default_rng(0)
    return [np.append(random.integers(0, vocab, random.integers(1, 40)), end) for _ in range(count)]


@pytest.mark.parametrize("name", [f"{PREFIX}.bin", f"{PREFIX}.idx", PREFIX])
@pytest.mark.parametrize(("dtype", "vocab"), [("uint16", VOCAB), ("int32", 128_256)])
def test_either_name_and_the_prefix_are_read_to_the_token(megatron, name, dtype, vocab):
    texts = documents(vocab=vocab - 1)
    path = megatron(texts, dtype)
    corpus = open_(vocab=vocab, path=path.with_name(name))
    assert [*corpus.train.tokens.ids, *corpus.validation.tokens.ids] == np.concatenate(texts).tolist()
    assert f"(Megatron, {dtype}, 20 documents)" in corpus.source
    assert corpus.fingerprint == open_(vocab=vocab, path=path).fingerprint
    assert open_held_out(path, None, vocab).tokens.ids.tolist() == np.concatenate(texts).tolist()


def test_an_index_is_checked_in_chunks(megatron, monkeypatch):
    monkeypatch.setattr(reader, "CHUNK", 3)
    texts = documents()
    path = megatron(texts)
    assert open_(path=path).train.tokens.length > 0
    wrong = [2 * sum(map(len, texts[:number])) for number in range(20)]
    wrong[13] += 2
    megatron(texts, places=wrong)
    with pytest.raises(RequestError, match="does not say that sequence 13 begins where the one before ends"):
        open_(path=path)


def test_a_folder_and_a_pattern_name_them_once(megatron):
    path = megatron(documents())
    alone = open_(path=path)
    for name in (path.parent, path.parent / "*_document*"):
        found = open_(path=name)
        assert (found.fingerprint, found.train.tokens.path) == (alone.fingerprint, path)


@pytest.mark.parametrize("name", [f"{PREFIX}.bin", PREFIX])
def test_a_job_sees_both_files(megatron, name):
    path = megatron(documents())
    assert set(places_of(str(path.with_name(name)))) == {path, path.with_suffix(".idx")}


def test_a_run_finds_uint16_again_that_it_read_without_the_index(megatron):
    path = megatron(documents())
    found = open_(path=path).fingerprint
    path.with_suffix(".idx").unlink()
    assert open_(path=path).fingerprint == found


def test_documents_are_apart_by_their_end_token(megatron, tmp_path):
    tokenizer = save_tokenizer(tmp_path / "t.json", end="<|endoftext|>")
    eos = VOCAB
    path = megatron(documents(end=eos))
    corpus = open_(vocab=VOCAB + 1, path=path, tokenizer=tokenizer, apart=True)
    assert corpus.train.tokens.end == eos
    with pytest.raises(RequestError, match="--append-eod"):
        open_(vocab=VOCAB + 1, path=megatron(documents(end=0)), tokenizer=tokenizer, apart=True)


def test_documents_of_several_files_of_a_type_are_counted_together(megatron, tmp_path):
    for number, dtype in enumerate(("uint16", "uint16", "int32"), 1):
        path = megatron([np.arange(200)] * number, dtype)
        for ending in (".bin", ".idx"):
            path.with_suffix(ending).rename(tmp_path / f"many{number}{ending}")
    source = open_(path=f"{tmp_path}/many*").source
    assert "(3 files; Megatron, uint16, 3 documents; Megatron, int32, 3 documents)" in source


def test_several_sequences_may_be_one_document(megatron):
    path = megatron([np.arange(200)] * 3)
    assert "3 documents" in open_(path=path).source
    for borders, words in ([0, 2, 3], "2 documents"), ([0, 3], "1 document)"):
        path.with_suffix(".idx").write_bytes(index([200] * 3, borders))
        assert words in open_(path=path).source


def test_ids_that_the_model_lacks_are_named(megatron):
    with pytest.raises(
        RequestError, match=r"holds token id 300 but model.vocab is 300; set model.vocab to at least 301"
    ):
        open_(path=megatron([np.arange(301)]))
    with pytest.raises(RequestError, match="holds the negative id -1; ids begin at 0"):
        open_(path=megatron([np.arange(-1, 200)], "int32"))
    with pytest.raises(RequestError, match=r"data.dtype is uint16, but '.*' holds int32, as its index says"):
        open_(path=megatron([np.arange(200)], "int32"), dtype="uint16")
    assert (
        open_(path=megatron([np.arange(200)], "int32"), dtype="uint32", validation_fraction=0.25).train.tokens.length
        == 150
    )


def test_the_index_says_how_many_documents_rows_cut(tmp_path):
    """Documents of several sequences, one without any, over two files; the part that is held out does not count."""
    random = np.random.default_rng(1)
    sequences = random.integers(1, 40, 300)
    borders = np.unique(np.r_[0, random.integers(1, 150, 60), 150])
    lengths = np.concatenate([np.add.reduceat(half, borders[:-1]) for half in np.split(sequences, 2)])
    for number, half in enumerate(np.split(sequences, 2)):
        (tmp_path / f"{number}.bin").write_bytes(np.ones(half.sum(), "<u2").tobytes())
        (tmp_path / f"{number}.idx").write_bytes(index(half, np.r_[borders, 150]))
    corpus = open_(path=f"{tmp_path}/[01].bin", sequence=32)
    ends = np.minimum(np.cumsum(lengths), corpus.train.tokens.length)
    trained = np.diff(ends, prepend=0)
    trained = trained[trained > 0]
    assert trained.size < lengths.size
    assert corpus.source.endswith(f"; {Cut(trained.size, cut_in_stream(trained, 32), (trained > 32).sum())}")
    (tmp_path / "0.idx").write_bytes(index(sequences[:150], [0, 9, 3, 150]))
    with pytest.raises(RequestError, match=r"0.idx' is damaged: its documents do not follow each other"):
        open_(path=f"{tmp_path}/[01].bin", sequence=32)
