"""Packed rows: every token once, labels within documents, a plan that is made once; as a choice of `open_corpus`."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from jaxdist.config import DataLost, RequestError
from jaxdist.data import packed_rows, packing
from jaxdist.data.packed_rows import PackedRows, document_lengths, open_packed
from jaxdist.data.packing import plan
from jaxdist.data.progress import unseen
from jaxdist.data.rows import CutRows
from jaxdist.data.tokens import Tokens
from jaxdist.huggingface.special_tokens import SpecialTokens
from tests.data.files import VOCAB, S, ids, lines, open_, save_tokenizer
from tests.data.test_tokens import write

BOS, EOS = 1, 2
ENDED = SpecialTokens(eos=EOS)


def opened(tokens: Tokens, sequence: int, special: SpecialTokens = ENDED) -> PackedRows:
    return open_packed(tokens, sequence, special, "name", unseen)


def apart(rows: PackedRows) -> PackedRows:
    """As `open_corpus` makes them."""
    return replace(rows, tokens=replace(rows.tokens, begin=rows.special.bos, end=rows.special.eos))


def random_documents(special: SpecialTokens, count: int = 60, longest: int = 30) -> list[list[int]]:
    rng = np.random.default_rng(0)
    texts = [rng.integers(3, 90, rng.integers(0, longest)).tolist() for _ in range(count)]
    return [special.around(text, ends=True) for text in texts]


def joined(documents: list[list[int]]) -> np.ndarray:
    return np.array([token for document in documents for token in document])


SPECIALS = [ENDED, SpecialTokens(bos=BOS), SpecialTokens(bos=BOS, eos=EOS)]


@pytest.mark.parametrize("special", SPECIALS, ids=["eos", "bos", "both"])
def test_lengths_are_found_in_one_pass(tmp_path, monkeypatch, special):
    documents = random_documents(special)
    monkeypatch.setattr(packed_rows, "CHUNK", 7)  # Borders lie at the ends of chunks too.
    found = document_lengths(write(tmp_path / "a.bin", joined(documents)), special)
    assert found.tolist() == [len(document) for document in documents]


def test_a_last_document_without_an_end_is_one_and_no_tokens_are_none(tmp_path):
    assert document_lengths(write(tmp_path / "a.bin", [5, EOS, EOS, 6, 7]), ENDED).tolist() == [
        2,
        1,
        2,
    ]
    assert document_lengths(write(tmp_path / "b.bin", []), ENDED).tolist() == []


def test_a_row_by_hand(tmp_path):
    """Documents of 3, 11 and 2 tokens in rows of 4: pieces 3 | 4 4 3 | 2."""
    stream = [11, 12, EOS, *range(20, 30), EOS, 31, EOS]
    rows = opened(write(tmp_path / "a.bin", stream), 4)
    assert rows.packed == (5, 16, 3, 1, 1)
    read = rows.read(np.array([0, 1, -1, 2, 3, 4]))
    assert list(read) == ["tokens", "labels"]
    assert {a.dtype for a in read.values()} == {np.dtype(np.int32)}
    by_hand = {
        (20, 21, 22, 23): [21, 22, 23, 24],  # cut: the document goes on
        (24, 25, 26, 27): [25, 26, 27, 28],
        (11, 12, EOS, 0): [12, EOS, -1, -1],
        (28, 29, EOS, 0): [29, EOS, -1, -1],
        (31, EOS, 0, 0): [EOS, -1, -1, -1],
        (0, 0, 0, 0): [-1, -1, -1, -1],
    }
    assert dict(zip(map(tuple, read["tokens"].tolist()), read["labels"].tolist(), strict=True)) == by_hand


@pytest.mark.parametrize("special", SPECIALS, ids=["eos", "bos", "both"])
def test_a_document_as_long_as_a_row_foretells_nothing_after_it(tmp_path, special):
    documents = [special.around(range(start, start + 8), ends=True) for start in (10, 40)]
    length = len(documents[0])
    read = opened(write(tmp_path / "a.bin", joined(documents)), length, special).read(np.array([0, 1]))
    assert read["tokens"].tolist() == documents
    assert read["labels"].tolist() == [[*document[1:], -1] for document in documents]


def test_joined_the_end_of_a_document_foretells_the_next_piece_and_apart_nothing(tmp_path):
    rows = opened(write(tmp_path / "a.bin", [5, EOS, 6, 7, EOS]), 7)
    wanted = {"tokens": [[5, EOS, 6, 7, EOS, 0, 0]], "labels": [[EOS, 6, 7, EOS, -1, -1, -1]]}
    assert {name: a.tolist() for name, a in rows.read(np.array([0])).items()} == wanted
    wanted["labels"][0][1] = -1
    wanted["starts"] = [[0, 0, 2, 2, 2, 5, 5]]
    assert {name: a.tolist() for name, a in apart(rows).read(np.array([0])).items()} == wanted


@pytest.mark.parametrize("special", SPECIALS, ids=["eos", "bos", "both"])
def test_every_token_is_in_one_row_and_learns_what_follows_it_in_its_document(tmp_path, special):
    documents = random_documents(special)
    stream = joined(documents)
    rows = apart(opened(write(tmp_path / "a.bin", stream), 16, special))
    read = rows.read(np.arange(rows.count))
    real = [row[:n] for row, n in zip(read["tokens"], np.count_nonzero(read["tokens"], 1), strict=True)]
    assert sorted(np.concatenate(real).tolist()) == sorted(stream.tolist())
    pairs = lambda a, b: sorted(zip(a.tolist(), b.tolist(), strict=True))
    counts = read["labels"] >= 0
    wanted = [pair for document in documents for pair in pairwise(document)]
    assert pairs(read["tokens"][counts], read["labels"][counts]) == sorted(wanted)
    assert rows.packed.cut == sum(len(document) > 16 for document in documents) > 3
    # Each document that fits stands whole at its start in a row.
    rows_of = zip(read["tokens"], read["starts"], strict=True)
    found = [tuple(row[begins == start]) for row, begins in rows_of for start in np.unique(begins)]
    assert {tuple(document) for document in documents if len(document) <= 16} <= set(found)


def test_documents_that_rows_of_a_stream_cut_are_counted(tmp_path):
    documents = random_documents(ENDED)
    rows = opened(write(tmp_path / "a.bin", joined(documents)), 16)
    stops = np.cumsum([len(document) for document in documents])
    borders = np.arange(16, stops[-1], 16)
    cut = sum(((stop - len(d) < borders) & (borders < stop)).any() for stop, d in zip(stops, documents, strict=True))
    assert rows.packed.cut_in_stream == cut
    assert f"of 60 documents cut (with data.pack cut: {cut})" in rows.packed.describe(16)


def test_plans_made_in_parts_are_one_plan(tmp_path, monkeypatch):
    monkeypatch.setattr(packing, "WINDOW", 10)
    monkeypatch.setattr(packed_rows, "PLANNED", 20)
    stream = joined(random_documents(ENDED))
    tokens = write(tmp_path / "a.bin", stream)
    rows = opened(tokens, 16)
    whole = plan(document_lengths(tokens, rows.special), 16)
    assert rows.count == whole.rows > 20
    read = rows.read(np.arange(rows.count))["tokens"]
    for row, (first, after) in enumerate(zip(whole.first[:-1], whole.first[1:], strict=True)):
        pieces = zip(whole.start[first:after], whole.length[first:after], strict=True)
        wanted = np.concatenate([stream[start : start + length] for start, length in pieces])
        assert read[row, : wanted.size].tolist() == wanted.tolist()
        assert not read[row, wanted.size :].any()


def test_the_plan_is_made_once_and_kept(tmp_path, cache, monkeypatch):
    tokens = write(tmp_path / "a.bin", joined(random_documents(ENDED)))
    first = opened(tokens, 16)
    assert sum(path.stat().st_size for path in first.plan.folder.glob("*.bin")) < 8 * (first.count + 2 * 60)
    with monkeypatch.context() as patch:
        patch.setattr(packed_rows, "document_lengths", None)
        assert opened(tokens, 16) == first
    assert opened(tokens, 8).plan.folder != first.plan.folder
    (first.plan.folder / "pieces.bin").write_bytes(b"")
    with pytest.raises(DataLost, match=r"pieces.bin' was truncated while it was read: it has 0 bytes"):
        first.read(np.array([0]))
    assert opened(tokens, 16) == first  # damaged, and made again
    assert len(list(cache.iterdir())) == 2


def test_a_row_outside_is_caught(tmp_path):
    rows = opened(write(tmp_path / "a.bin", [5, EOS]), 4)
    for numbers in ([1], [-2]):
        with pytest.raises(AssertionError, match="row outside"):
            rows.read(np.array(numbers))


# ---- as a choice


TEXTS = [f"text {i} of " + "abc " * i for i in range(20)]


@pytest.mark.parametrize("documents_apart", [False, True])
def test_a_corpus_is_packed_as_asked(tmp_path, documents_apart):
    path = tmp_path / "a.jsonl"
    path.write_text(lines(*TEXTS))
    knobs = dict(path=path, validation_fraction=0.25, apart=documents_apart)
    cut, packed = open_(**knobs), open_(**knobs, pack="best-fit")
    assert isinstance(cut.train, CutRows)
    assert isinstance(packed.validation, PackedRows)
    assert packed.train.tokens == cut.train.tokens
    assert packed.validation.packed.tokens == cut.validation.tokens.length
    assert packed.train.packed.documents == 15
    assert ("starts" in packed.train.read(np.array([0]))) == documents_apart
    assert packed.train.packed.describe(S) in packed.source
    assert packed.source.endswith("; documents apart") == documents_apart


def test_the_fingerprint_says_how_rows_are_packed(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(lines(*TEXTS))
    cut, named, packed = (open_(path=path, **pack) for pack in ({}, {"pack": "cut"}, {"pack": "best-fit"}))
    assert cut.fingerprint == named.fingerprint != packed.fingerprint
    assert packed.fingerprint == open_(path=path, pack="best-fit", sequence=S // 2).fingerprint


def test_a_bin_is_packed_with_its_tokenizer_and_refused_without(tmp_path):
    path = tmp_path / "a.bin"
    path.write_bytes(ids(*[5, 6, 7, VOCAB, 8, VOCAB] * 20))
    knobs = dict(path=path, vocab=VOCAB + 1, pack="best-fit", validation_fraction=0.25)
    packed = open_(**knobs, tokenizer=save_tokenizer(tmp_path / "t.json", end="</s>"))
    assert packed.train.packed.documents == 30
    for tokenizer in (None, save_tokenizer(tmp_path / "endless.json")):
        with pytest.raises(
            RequestError, match=r"data.pack is best-fit, but no tokenizer says .* or set data.pack to cut"
        ):
            open_(**knobs, tokenizer=tokenizer)


def test_documents_with_nothing_to_predict_are_refused(tmp_path):
    path = tmp_path / "a.bin"
    path.write_bytes(ids(*[5, 6, VOCAB] * 20, VOCAB, VOCAB))
    tokenizer = save_tokenizer(tmp_path / "t.json", end="</s>")
    message = (
        "the validation data has 2 documents of at most one token each, and nothing to predict in them; raise data."
    )
    with pytest.raises(RequestError, match=message):
        open_(path=path, vocab=VOCAB + 1, pack="best-fit", tokenizer=tokenizer, validation_fraction=0.04)
