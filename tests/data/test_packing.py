"""Best-fit packing: no document that fits is cut, all tokens are kept, and little is wasted."""

import numpy as np
import pytest

from jaxdist.data import packing
from jaxdist.data.packing import best_fit, pieces, plan


def lengths_of(kind: str, n: int) -> np.ndarray:
    rng = np.random.default_rng(0)
    if kind == "web":
        return np.minimum(rng.lognormal(np.log(600), 1.1, n).astype(int) + 1, 200_000)
    return np.minimum((rng.pareto(1.3, n) * 900 + 200).astype(int), 200_000)


def best_fit_by_hand(lengths: list[int], sequence: int) -> list[int]:
    """The rule itself: the fullest row that takes the piece; of several, the last one that came to its space."""
    rows: list[tuple[int, int]] = []  # (space, when the row came to it)
    row_of = [0] * len(lengths)
    for when, i in enumerate(sorted(range(len(lengths)), key=lambda i: -lengths[i])):
        fitting = [(space, -since, row) for row, (space, since) in enumerate(rows) if space >= lengths[i]]
        if fitting:
            space, _, row = min(fitting)
        else:
            space, row = sequence, len(rows)
            rows.append((0, 0))
        rows[row] = (space - lengths[i], when)
        row_of[i] = row
    return row_of


@pytest.mark.parametrize("seed", range(5))
def test_pieces_go_where_the_rule_says(seed):
    lengths = np.random.default_rng(seed).integers(1, 33, 80)
    row_of, rows = best_fit(lengths, 32)
    wanted = best_fit_by_hand(lengths.tolist(), 32)
    assert (row_of.tolist(), rows) == (wanted, max(wanted) + 1)


@pytest.mark.parametrize("kind", ["web", "code"])
@pytest.mark.parametrize("sequence", [512, 2048])
def test_every_token_is_in_one_row_and_what_fits_is_whole(kind, sequence):
    lengths = lengths_of(kind, 25_000)
    packed = plan(lengths, sequence)
    seen = np.zeros(lengths.sum() + 1, np.int64)
    np.add.at(seen, packed.start, 1)
    np.add.at(seen, packed.start + packed.length, -1)
    assert (np.cumsum(seen)[:-1] == 1).all()
    filled = np.add.reduceat(packed.length, packed.first[:-1])
    assert 0 < filled.min() <= filled.max() <= sequence
    # A document is cut only if it is longer than a row, and then only every `sequence` tokens.
    starts = np.cumsum(lengths) - lengths
    document = np.searchsorted(starts, packed.start, "right") - 1
    assert ((packed.start - starts[document]) % sequence == 0).all()
    assert (np.bincount(document) == -(-lengths // sequence)).all()
    assert 1 - packed.length.sum() / (packed.rows * sequence) < 0.006


def test_pieces_of_a_row_stand_in_the_order_of_the_stream():
    packed = plan(lengths_of("web", 3000), 2048)
    for first, after in zip(packed.first[:-1], packed.first[1:], strict=True):
        assert (np.diff(packed.start[first:after]) > 0).all()


def test_windows_are_packed_by_themselves(monkeypatch):
    """So that documents that are added at the end change no row of a whole window before."""
    monkeypatch.setattr(packing, "WINDOW", 100)
    lengths = lengths_of("web", 350)
    whole, shorter = plan(lengths, 1024), plan(lengths[:300], 1024)
    n = shorter.first.size
    assert np.array_equal(whole.first[:n], shorter.first)
    assert np.array_equal(whole.start[: shorter.start.size], shorter.start)


def test_long_documents_are_cut_and_their_rest_is_kept():
    start, length = pieces(np.array([0, 5, 30]), np.array([5, 25, 10]), 10)
    assert start.tolist() == [0, 5, 15, 25, 30]
    assert length.tolist() == [5, 10, 10, 5, 10]


def test_no_documents_make_no_rows():
    assert plan(np.zeros(0, np.int64), 8).rows == 0
