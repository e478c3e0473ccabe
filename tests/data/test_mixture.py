"""Mixtures: exact shares, rows without gaps, and an order that depends on the seed and the row alone."""

import hashlib
from fractions import Fraction

import numpy as np
import pytest

from jaxdist.data.mixing.mixture import WINDOW, Mixture, Phase, millionths
from jaxdist.data.order import permute, permute_each

WEIGHTS = {"web": 0.7, "code": 0.2, "books": 0.1}
SIZES = {"web": 5000, "code": 333, "books": 17}


def zipf(n: int) -> dict[str, float]:
    return {f"s{i:04d}": 1 / (i + 1) for i in range(n)}


def one_phase(weights, sizes=None, seed=0):
    return Mixture(seed, sizes or dict.fromkeys(weights, 10**6), [Phase(0, weights)])


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 16, 17, 1000, 65_537, 2**20 - 1, 2**40 + 1])
def test_each_position_is_permuted_as_if_alone(n):
    index = np.unique(np.random.default_rng(n).integers(0, n, 40))
    seeds = np.array([3, 2**64 - 1], np.uint64)
    for seed in seeds:
        for epoch in (0, 7):
            found = permute_each(np.full(index.size, seed), np.full(index.size, epoch), np.full(index.size, n), index)
            assert np.array_equal(found, permute(int(seed), epoch, n, index))


def test_positions_of_different_sets_do_not_disturb_each_other():
    rng = np.random.default_rng(0)
    sizes = rng.integers(1, 5000, 300)
    index = rng.integers(0, sizes)
    seeds, epochs = rng.integers(0, 2**63, 300).astype(np.uint64), rng.integers(0, 9, 300)
    wanted = [
        permute(int(seed), int(epoch), int(n), np.array([i]))[0]
        for seed, epoch, n, i in zip(seeds, epochs, sizes, index, strict=True)
    ]
    assert permute_each(seeds, epochs, sizes, index).tolist() == wanted


def test_weights_become_millionths_by_largest_remainders():
    parts = lambda *weights: millionths([Fraction(weight) for weight in weights])
    assert parts(1, 1, 1) == [333_334, 333_333, 333_333]
    assert parts("0.7", "0.2", "0.1") == [700_000, 200_000, 100_000]
    assert parts(1, 10**7) == [0, 1_000_000]


@pytest.mark.parametrize(
    "weights",
    [WEIGHTS, {"a": 0.37, "b": 0.63}, {"a": 1, "b": 999_999}, {"only": 3}, zipf(23), zipf(1500)],
    ids=["three", "two", "one in a million", "one", "23", "1500"],
)
def test_shares_are_exact_to_one_row_in_each_window_and_up_to_any(weights):
    mixture = one_phase(weights)
    windows = 120
    source, _ = mixture.numbered(np.arange(windows * WINDOW))
    counts = np.stack([np.bincount(rows, minlength=len(weights)) for rows in source.reshape(windows, WINDOW)])
    shares = np.array([weights[name] for name in mixture.names]) / sum(weights.values())
    # Weights are whole millionths, so that a share is off by half of one.
    assert np.abs(counts - shares * WINDOW).max() < 1 + 1e-3
    up_to = np.cumsum(counts, axis=0)
    assert np.abs(up_to - np.outer(np.arange(1, windows + 1) * WINDOW, shares)).max() < 1 + windows * 1e-3


PHASES = [
    Phase(0, {"web": 0.7, "code": 0.3}),
    Phase(33_337, {"web": 0.5, "code": 0.2, "books": 0.3}),
    Phase(60_001, {"books": 1}),
]


def test_rows_of_a_source_come_without_gap_or_repetition_over_phases():
    """Each epoch of each source is a permutation of its rows, in another order than the one before."""
    mixture = Mixture(5, SIZES, PHASES)
    source, number = mixture.numbered(np.arange(70_000))
    _, row = mixture.rows(np.arange(70_000))
    for place, name in enumerate(mixture.names):
        of_source = source == place
        assert np.array_equal(number[of_source], np.arange(of_source.sum()))
        rows, size = row[of_source], SIZES[name]
        epochs = rows[: rows.size // size * size].reshape(-1, size)
        assert all(np.array_equal(np.sort(epoch), np.arange(size)) for epoch in epochs), name
        assert len(epochs) > 2
        assert (epochs[0] != epochs[1]).any()


@pytest.mark.parametrize("position", [0, 1, 999, 33_336, 33_337, 33_338, 60_000, 60_001, 69_999])
def test_rows_before_a_position_are_counted(position):
    mixture = Mixture(5, SIZES, PHASES)
    source, _ = mixture.numbered(np.arange(position))
    assert np.array_equal(mixture.rows_before(position), np.bincount(source, minlength=3))


def test_positions_may_be_asked_for_in_any_parts_and_any_order():
    """So that it does not matter how many hosts ask, each for rows of its own."""
    mixture = Mixture(5, SIZES, PHASES)
    wanted = np.stack(mixture.rows(np.arange(20_000, 70_000)))
    for hosts in (1, 3, 64):
        parts = [np.stack(mixture.rows(np.arange(20_000 + host, 70_000, hosts))) for host in range(hosts)]
        found = np.empty_like(wanted)
        for host, part in enumerate(parts):
            found[:, host::hosts] = part
        assert np.array_equal(found, wanted)
    backwards = np.stack(mixture.rows(np.arange(70_000)[::-1]))[:, ::-1]
    assert np.array_equal(backwards[:, 20_000:], wanted)


def test_a_source_that_is_added_later_changes_no_row_before():
    names = lambda mixture, rows: [mixture.names[place] for place in mixture.rows(rows)[0]]
    rows = np.arange(50_000)
    without = Mixture(5, {"web": 5000, "code": 333}, PHASES[:1])
    added = Mixture(5, {"alpha": 50, **SIZES}, [PHASES[0], Phase(40_000, {"alpha": 1})])
    assert names(added, rows[:40_000]) == names(without, rows[:40_000])
    assert np.array_equal(added.rows(rows[:40_000])[1], without.rows(rows[:40_000])[1])
    assert set(names(added, rows[40_000:])) == {"alpha"}


def test_the_order_in_which_sources_are_named_does_not_matter():
    rows = np.arange(5_000)
    mixture = Mixture(1, SIZES, [Phase(0, WEIGHTS)])
    turned = Mixture(1, dict(reversed(SIZES.items())), [Phase(0, dict(reversed(WEIGHTS.items())))])
    assert np.array_equal(mixture.rows(rows), turned.rows(rows))


def test_seeds_give_other_orders_with_the_same_shares():
    first, second = (one_phase(WEIGHTS, seed=seed).numbered(np.arange(WINDOW))[0] for seed in (0, 1))
    assert (first != second).any()
    assert np.array_equal(np.sort(first), np.sort(second))


PINNED = [[2, 2, 2, 2, 1, 1], [4609, 4167, 3643, 83, 263, 11]]
PINNED_DIGEST = "82801ef8d03ea6b6"


def test_the_order_is_pinned():
    """A run resumes with another release: 1,000 rows of each of two mixtures, and one far away."""
    found = hashlib.sha256()
    for mixture in (Mixture(0, SIZES, [Phase(0, WEIGHTS)]), Mixture(7, SIZES, PHASES)):
        found.update(np.stack(mixture.rows(np.arange(33_000, 34_000))).astype("<i8").tobytes())
    mixture = Mixture(0, SIZES, [Phase(0, WEIGHTS)])
    assert [part.tolist() for part in mixture.rows(np.arange(10**12, 10**12 + 6))] == PINNED
    assert found.hexdigest()[:16] == PINNED_DIGEST
