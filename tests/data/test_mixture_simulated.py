"""A mixture beside a plain simulation: one row after another, with counters, fractions and lists."""

import hashlib
from fractions import Fraction

import numpy as np
import pytest

from jaxdist.data.mixing.mixture import PURPOSE, WINDOW, Mixture, Phase
from jaxdist.data.order import permute, splitmix64, word

SEED = 11


def weights_of(sources):
    """Of 2 sources numbers that no count of windows divides; of more, as 1 to the n-th."""
    if sources == 2:
        return {"web": 0.123457, "code": 0.876543}
    return {f"s{i:04d}": 1 / (i + 1) for i in range(sources)}


def exact(weights):
    """Shares as whole millionths, those with the largest remainders rounded up."""
    total = sum(Fraction(str(weight)) for weight in weights.values())
    wanted = {name: Fraction(str(weights[name])) * 10**6 / total for name in sorted(weights)}
    parts = {name: int(part) for name, part in wanted.items()}
    by_remainder = sorted(wanted, key=lambda name: parts[name] - wanted[name])
    for name in by_remainder[: 10**6 - sum(parts.values())]:
        parts[name] += 1
    return parts


def owners(weights, phase, rows):
    """Whose each row of a phase is: the source that has come least for its share gets the next row that is left."""
    parts = exact(weights)
    state = int(splitmix64(splitmix64(word(SEED) ^ word(PURPOSE)) + word(phase))[0])
    given = dict.fromkeys(parts, 0)
    found = []
    for window in range(-(-rows // WINDOW)):
        # All that follows is in millionths of a row.
        counts = {name: part * WINDOW // 10**6 for name, part in parts.items()}
        # What is behind is that of a fractional row: whole rows of a window are given to all.
        behind = {
            name: parts[name] * WINDOW % 10**6 * (window + 1) - (given[name] - window * counts[name]) * 10**6
            for name in parts
        }
        for name in sorted(parts, key=lambda name: -behind[name])[: WINDOW - sum(counts.values())]:
            counts[name] += 1
        for name, count in counts.items():
            given[name] += count
        listed = [name for name, count in counts.items() for _ in range(count)]
        found += [listed[place] for place in permute(state, window, WINDOW, np.arange(WINDOW)).tolist()]
    return found[:rows]


def seed_of(name):
    low = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
    return int(splitmix64(word(SEED) ^ word(low))[0])


def simulate(sizes, phases, rows):
    """Yield the source and its row, of each row of the run."""
    orders = {}
    came = dict.fromkeys(sizes, 0)
    for number, phase in enumerate(phases):
        stop = phases[number + 1].start if number + 1 < len(phases) else rows
        for name in owners(phase.weights, number, stop - phase.start):
            epoch, place = divmod(came[name], sizes[name])
            if place == 0:
                orders[name] = permute(seed_of(name), epoch, sizes[name], np.arange(sizes[name])).tolist()
            yield name, orders[name][place]
            came[name] += 1


SMALL = [(2, 12_000, 5_001), (17, 12_000, 5_001), (1500, 3_000, 1_001)]
MILLION = [(2, 1_002_000, 333_337), (17, 1_002_000, 333_337), (1500, 1_002_000, 333_337)]


@pytest.mark.parametrize(
    ("sources", "rows", "second"),
    [*SMALL, *(pytest.param(*case, marks=pytest.mark.slow, id=f"{case[0]} million") for case in MILLION)],
)
def test_rows_and_shares_are_those_of_a_simulation(sources, rows, second):
    """Each row, where weights change within a window; the shares in windows, and up to each. 5 to 15 s a million."""
    weights = weights_of(sources)
    sizes = {name: 20_000 // sources + 97 + 13 * number for number, name in enumerate(sorted(weights))}
    turned = dict(zip(sorted(weights), sorted(weights.values(), reverse=True), strict=True))
    phases = [Phase(0, weights), Phase(second, turned)]
    mixture = Mixture(SEED, sizes, phases)
    position = np.arange(rows)
    source, row = (
        np.concatenate(parts) for parts in zip(*map(mixture.rows, np.array_split(position, 50)), strict=True)
    )
    expected = simulate(sizes, phases, rows)
    names = mixture.names
    wrong = [i for i, (which, one) in enumerate(expected) if (names[source[i]], row[i]) != (which, one)]
    assert wrong == []
    for phase, stop in zip(phases, (second, rows), strict=True):
        shares = np.array([Fraction(part, 10**6) for part in map(exact(phase.weights).get, names)])
        windows = (stop - phase.start) // WINDOW
        whole = source[phase.start : phase.start + windows * WINDOW].reshape(windows, WINDOW)
        counts = np.stack([np.bincount(window, minlength=sources) for window in whole])
        exactly = (shares * WINDOW).astype(float)
        assert np.abs(counts - exactly).max() < 1
        up_to = np.arange(1, windows + 1)[:, None] * exactly
        assert np.abs(np.cumsum(counts, axis=0) - up_to).max() < 1
