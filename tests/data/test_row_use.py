"""What the summary says of documents that rows cut: counted when the tokens are made, and told without reading them."""

import re

import numpy as np
import pytest

from jaxdist.data.packed_rows import document_lengths
from jaxdist.data.packing import cut_in_stream
from jaxdist.data.row_use import Cut, cut_of, together, usual_uses
from jaxdist.data.tokenizing import token_store
from tests.data.files import POEM, VOCAB, ids, lines, open_, save_tokenizer

TEXTS = [f"text {i} of many, {'word ' * (i % 37)}" for i in range(300)]


def test_the_summary_says_what_rows_cut(write, monkeypatch):
    path = write("web.jsonl", lines(*TEXTS))
    corpus = open_(path=path, sequence=32)
    lengths = document_lengths(corpus.train.tokens, corpus.special)
    cut, longer = cut_in_stream(lengths, 32), (lengths > 32).sum()
    assert 0 < longer < cut < lengths.size
    said = f"; rows cut {100 * cut / lengths.size:.1f} % of the documents (with data.pack best-fit: "
    assert corpus.source.endswith(f"{said}{100 * longer / lengths.size:.1f} %)")
    # From the cache, for another length of rows too.
    monkeypatch.setattr(token_store, "usual_uses", None)
    assert open_(path=path, sequence=32).source == corpus.source
    whole = cut_in_stream(lengths, 64)
    assert f"; rows cut {100 * whole / lengths.size:.1f} % of" in open_(path=path, sequence=64).source
    (about,) = re.findall(r"; rows cut about (\d+) % of", open_(path=path, sequence=33).source)
    assert abs(int(about) / 100 - cut_in_stream(lengths, 33) / lengths.size) < 0.04
    assert "rows cut" not in open_(path=path, sequence=31).source
    assert open_(path=path, sequence=33).fingerprint == corpus.fingerprint


RANDOM = np.random.default_rng(0)
LENGTHS = {
    "web": np.exp(RANDOM.normal(np.log(600), 1.1, 40_000)).astype(int) + 1,
    "heavy tail": (RANDOM.pareto(0.9, 40_000) * 200).astype(int) + 1,
    "chats": RANDOM.integers(20, 700, 40_000),
}


@pytest.mark.parametrize("name", LENGTHS)
@pytest.mark.parametrize("sequence", [48, 100, 700, 1000, 1536, 2047, 3000, 4096, 5000, 100_000])
def test_any_length_of_rows_is_reckoned(name, sequence):
    """To 1 % of the documents from what is kept of powers of two; to 6 % with best-fit, where lengths end sharply."""
    lengths = LENGTHS[name]
    found = cut_of(usual_uses(np.array_split(lengths, 3)), sequence)
    assert found.about == (sequence != 4096)
    assert abs(found.cut - cut_in_stream(lengths, sequence)) <= 0.01 * lengths.size
    assert abs(found.longer - (lengths > sequence).sum()) <= 0.06 * lengths.size


def test_what_is_reckoned_lies_between_what_is_kept():
    """Also where all documents are equally long, of which nothing between is known."""
    for length in (50, 64, 65, 90, 127, 128, 129):
        facts = usual_uses([np.full(10_000, length)])
        before, after = cut_of(facts, 64), cut_of(facts, 128)
        for sequence in range(65, 128, 7):
            found = cut_of(facts, sequence)
            assert after.cut <= found.cut <= before.cut
            assert after.longer <= found.longer <= before.longer


def test_tokens_of_which_documents_are_known_say_it(write, tmp_path):
    """By the end-of-text token of their tokenizer."""
    lengths = RANDOM.integers(1, 90, 400)
    stream = np.concatenate([np.r_[np.full(n - 1, 7), VOCAB - 1] for n in lengths])
    path = write("t.bin", ids(*stream))
    assert "rows cut" not in open_(path=path, sequence=32).source
    tokenizer = save_tokenizer(tmp_path / "tokenizer.json", end="<|endoftext|>", size=VOCAB - 1)
    corpus = open_(path=path, sequence=32, tokenizer=tokenizer)
    found = document_lengths(corpus.train.tokens, corpus.special)
    assert found.sum() < stream.size
    assert corpus.source.endswith(f"; {Cut(found.size, cut_in_stream(found, 32), (found > 32).sum())}")


def test_sources_are_weighted_by_how_often_they_are_read():
    one, other = Cut(100, 50, 10), Cut(1000, 100, 0, about=True)
    assert together([(one, 2.0), (other, 0.5)]) == Cut(700, 150, 20, True)
    assert together([(one, 2.0), (None, 0.0)]) == Cut(200, 100, 20)
    assert together([(one, 1.0), (None, 0.1)]) is None
    assert together([]) is None


@pytest.mark.parametrize("kind", ["one document", "no end of documents", "tokens", "packed"])
def test_it_is_not_said_where_it_is_not_known(write, tmp_path, kind):
    knobs = {}
    path = write("poem.txt", POEM)
    if kind != "one document":
        path = write("web.jsonl", lines(*TEXTS))
    if kind == "no end of documents":
        knobs["tokenizer"] = save_tokenizer(tmp_path / "tokenizer.json")
    if kind == "packed":
        knobs["pack"] = "best-fit"
    if kind == "tokens":
        path = write("t.bin", bytes([1, 0]) * 4000)
    assert "rows cut" not in open_(path=path, sequence=32, **knobs).source


def test_a_cache_of_an_earlier_version_says_nothing(write, monkeypatch):
    path = write("web.jsonl", lines(*TEXTS))
    with monkeypatch.context() as patch:
        patch.setattr(token_store, "usual_uses", lambda *_: {})
        before = open_(path=path, sequence=32)
    again = open_(path=path, sequence=32)
    assert "rows cut" not in again.source
    assert again.train.tokens.ids.tolist() == before.train.tokens.ids.tolist()
