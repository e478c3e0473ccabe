"""What is found in data before a training: lengths, duplicates, empty texts."""

from itertools import pairwise

import numpy as np

from jaxdist.data import packed_rows
from jaxdist.data.packed_rows import document_lengths, lengths_in_order
from jaxdist.data.packing import cut_in_stream
from jaxdist.data.row_use import RowUse
from jaxdist.data.skipped import Skipped
from jaxdist.data.sources import Source
from jaxdist.data.survey import duplicates
from jaxdist.data.survey.duplicates import Hashes
from jaxdist.data.survey.lengths import Lengths
from jaxdist.data.tokens import Tokens
from jaxdist.huggingface.special_tokens import SpecialTokens
from tests.data.files import ids, lines

BOS, EOS = 1, 2


def test_empty_texts_are_counted(write):
    path = write("a.jsonl", lines("", "one", "", "two") + "\n" + lines(""))
    rows = Skipped(skips=False)
    found = [document.text for document in Source.of(path).documents(rows=rows)]
    assert (found, rows.empty) == (["one", "two"], 3)


def test_lengths_do_not_depend_on_how_much_is_read_at_a_time(write, monkeypatch):
    rng = np.random.default_rng(0)
    stream = rng.integers(0, 12, 500)
    tokens = Tokens.open(write("t.bin", ids(*stream)), "uint16")
    for special in (SpecialTokens(eos=EOS), SpecialTokens(bos=BOS), SpecialTokens(bos=BOS, eos=EOS), SpecialTokens()):
        whole = document_lengths(tokens, special)
        assert whole.sum() == 500
        assert whole.min() > 0
        borders = {0, 500} | {int(i) + 1 for i in np.flatnonzero(stream == EOS) if special.eos is not None}
        borders |= {int(i) for i in np.flatnonzero(stream == BOS) if special.bos is not None}
        assert whole.tolist() == np.diff(sorted(borders)).tolist()
        for chunk in (1, 7, 64):
            monkeypatch.setattr(packed_rows, "CHUNK", chunk)
            assert np.concatenate(list(lengths_in_order(tokens, special))).tolist() == whole.tolist()
        monkeypatch.undo()


def test_rows_are_used_alike_however_documents_come():
    lengths = np.random.default_rng(1).integers(1, 60, 300)
    use = RowUse(32)
    for part in np.array_split(lengths, 7):
        use.add(part)
    borders = np.concatenate([[0], np.cumsum(lengths)])
    rows = [range(a // 32, (b - 1) // 32 + 1) for a, b in pairwise(borders.tolist())]
    assert use.cut == sum(len(row) > 1 for row in rows) == cut_in_stream(lengths, 32)
    assert use.longer == sum(length > 32 for length in lengths.tolist())
    assert use.documents == 300


def test_lengths_are_those_of_numpy():
    lengths = np.random.default_rng(2).integers(1, 5000, 1001).tolist()
    counted = Lengths()
    counted.add(lengths[:400])
    counted.add(lengths[400:])
    figures = counted.figures()
    quantiles = np.quantile(lengths, [0.5, 0.9, 0.99], method="inverted_cdf")
    assert [figures[name] for name in ("median", "p90", "p99")] == quantiles.tolist()
    assert (figures["total"], figures["documents"]) == (sum(lengths), 1001)
    assert (figures["shortest"], figures["longest"]) == (min(lengths), max(lengths))
    for low, high, count in counted.bins():
        assert count == sum(low <= length <= high for length in lengths)
    assert sum(one.documents for one in counted.bins()) == 1001


def test_bins_are_powers_of_two_without_a_hole():
    counted = Lengths()
    counted.add([1, 2, 3, 9, 0])
    assert counted.bins() == [(0, 0, 1), (1, 1, 1), (2, 3, 2), (4, 7, 0), (8, 15, 1)]
    assert Lengths().bins() == []
    assert Lengths().figures()["median"] is None


def test_the_first_pair_of_equal_documents(monkeypatch):
    monkeypatch.setattr(duplicates, "BLOCK", 2)
    hashes = Hashes()
    for one in (5, 2**64 - 1, 7, 8, 7, 5, 7):
        hashes.add(one)
    assert hashes.duplicates() == (7, 3, (2, 4))
    assert Hashes().duplicates() == (0, 0, None)


def test_memory_of_hashes_is_bounded(monkeypatch):
    monkeypatch.setattr(duplicates, "LIMIT", 3)
    hashes = Hashes()
    for one in (1, 2, 3, 3, 3):
        hashes.add(one)
    assert hashes.duplicates() == (3, 0, None)
