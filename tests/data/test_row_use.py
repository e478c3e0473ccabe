"""What the summary says of documents that rows cut: counted when the tokens are made, and told without reading them."""

import pytest

from jaxdist.data import row_use
from jaxdist.data.packed_rows import document_lengths
from jaxdist.data.packing import cut_in_stream
from jaxdist.data.tokenizing import token_store
from tests.data.files import POEM, lines, open_, save_tokenizer

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
    monkeypatch.setattr(row_use, "lengths_in_order", None)
    assert open_(path=path, sequence=32).source == corpus.source
    whole = cut_in_stream(lengths, 64)
    assert f"; rows cut {100 * whole / lengths.size:.1f} % of" in open_(path=path, sequence=64).source
    assert "rows cut" not in open_(path=path, sequence=33).source
    assert open_(path=path, sequence=33).fingerprint == corpus.fingerprint


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
