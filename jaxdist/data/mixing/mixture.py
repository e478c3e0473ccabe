"""Mix sources by weight: whose a row is, and which of its rows, as a pure function of (seed, row).

Rows go in windows of 1,000, and windows in periods of 1,000. Weights become whole millionths, so that a period has a
whole number of rows of each source. In each window a source has its share rounded down, or one row more: the additional
rows go to the sources that are furthest behind. So the shares of every window, and of all windows up to any, are exact
to one row. Within a window a permutation says whose a row is.

The rows of a source are numbered as they come. Divided by its size, the number gives the epoch and the place in it,
and a permutation with a seed of the source's name gives the row. Neither the order in which sources are named, nor a
source that is added in a later phase, changes a row.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from fractions import Fraction
from functools import lru_cache

import numpy as np
from jaxtyping import Int, UInt64

from jaxdist.data.mixing.phases import MILLION, Phase, millionths
from jaxdist.data.order import permute, permute_each, splitmix64, word

WINDOW = 1000
"""Rows in which shares are exact to one row."""

PERIOD = MILLION // WINDOW
"""Windows after which the numbers of rows of each source repeat."""

KEPT = 64
"""Windows that are kept, since batch after batch has rows of the same one."""

PURPOSE = int.from_bytes(b"mixture")
"""Separates the permutations of windows from those of the rows of a source."""


class Mixture:
    """The order of rows of several sources.

    `sizes` are the rows of each source by its name. Phases begin at growing rows, the first at 0, and each has a
    positive weight. A source of a positive weight has rows.
    """

    def __init__(self, seed: int, sizes: Mapping[str, int], phases: Sequence[Phase]):
        self.names = sorted(sizes)
        self.phases = list(phases)
        self.sizes = np.array([sizes[name] for name in self.names], np.int64)
        """The rows of each of these sources."""
        self._seeds = np.array([_seed_of(seed, name) for name in self.names], np.uint64)
        self._shares = [_Shares(seed, number, self._weights(phase)) for number, phase in enumerate(phases)]
        self._starts = np.array([phase.start for phase in phases], np.int64)
        assert self._starts[0] == 0, "the first phase begins at row 0"
        assert (np.diff(self._starts) > 0).all(), "phases begin one after another"
        rows_before = np.zeros(len(self.names), np.int64)
        self._rows_before = [rows_before]
        for shares, rows in zip(self._shares, np.diff(self._starts).tolist(), strict=False):
            rows_before = rows_before + shares.rows_before(rows)
            self._rows_before.append(rows_before)

    def _weights(self, phase: Phase) -> list[Fraction]:
        assert set(phase.weights) <= set(self.names), f"weights of {set(phase.weights) - set(self.names)}"
        # The decimals that were written: 0.1 is a tenth.
        return [Fraction(str(phase.weights.get(name, 0))) for name in self.names]

    def rows(self, position: Int[np.ndarray, " n"]) -> tuple[Int[np.ndarray, " n"], Int[np.ndarray, " n"]]:
        """Return for each position of the run's rows the place of its source in `names`, and the row of the source."""
        source, number = self.numbered(position)
        epoch, place = np.divmod(number, self.sizes[source])
        return source, permute_each(self._seeds[source], epoch, self.sizes[source], place)

    def numbered(self, position: Int[np.ndarray, " n"]) -> tuple[Int[np.ndarray, " n"], Int[np.ndarray, " n"]]:
        """Return for each position the place of its source, and how many rows of that source came before."""
        source = np.empty(position.shape, np.int64)
        number = np.empty(position.shape, np.int64)
        phases = np.searchsorted(self._starts, position, "right") - 1
        for phase in np.unique(phases).tolist():
            here = phases == phase
            shares = self._shares[phase]
            source[here], number[here] = shares.numbered(position[here] - self._starts[phase])
            number[here] += self._rows_before[phase][source[here]]
        return source, number

    def rows_before(self, position: int) -> Int[np.ndarray, " sources"]:
        """Return how many rows of each source come before a position."""
        phase = int(np.searchsorted(self._starts, position, "right")) - 1
        return self._rows_before[phase] + self._shares[phase].rows_before(position - int(self._starts[phase]))


class _Shares:
    """The rows of each source in a phase whose rows are counted from 0."""

    def __init__(self, seed: int, phase: int, weights: Sequence[Fraction]):
        self._seed = int(splitmix64(splitmix64(word(seed) ^ word(PURPOSE)) + word(phase))[0])
        self._period = np.array(millionths(weights), np.int64)
        """Rows of each source in a period."""
        self._window = self._period // PERIOD + _additional(self._period % PERIOD)
        """[PERIOD, sources]: rows of each source in each window."""
        self._before = np.concatenate([np.zeros((1, len(weights)), np.int64), np.cumsum(self._window, axis=0)])
        """[PERIOD + 1, sources]: rows of each source in the windows before."""
        self._owners = lru_cache(KEPT)(self._find_owners)

    def rows_before(self, position: int) -> Int[np.ndarray, " sources"]:
        """Return how many rows of each source come before a position."""
        window, place = divmod(position, WINDOW)
        owners, _ = self._owners(window)
        started = np.bincount(owners[:place], minlength=self._period.size)
        return self._before_window(np.array([window]))[0] + started

    def numbered(self, position: Int[np.ndarray, " n"]) -> tuple[Int[np.ndarray, " n"], Int[np.ndarray, " n"]]:
        """Return for each position the source, and how many rows of it came before."""
        window, place = np.divmod(position, WINDOW)
        windows, which = np.unique(window, return_inverse=True)
        owners, earlier = (np.stack(both) for both in zip(*map(self._owners, windows.tolist()), strict=True))
        source = owners[which, place]
        return source, self._before_window(windows)[which, source] + earlier[which, place]

    def _before_window(self, windows: Int[np.ndarray, " n"]) -> Int[np.ndarray, "n sources"]:
        """Return how many rows of each source come before these windows."""
        period, window = np.divmod(windows, PERIOD)
        return period[:, None] * self._period + self._before[window]

    def _find_owners(self, window: int) -> tuple[Int[np.ndarray, " WINDOW"], Int[np.ndarray, " WINDOW"]]:
        """Return the source of each row of a window, and how many rows of that source come before it in the window."""
        counts = self._window[window % PERIOD]
        owners = np.repeat(np.arange(counts.size), counts)[permute(self._seed, window, WINDOW, np.arange(WINDOW))]
        earlier = np.empty(WINDOW, np.int64)
        first = np.cumsum(counts) - counts
        by_source = np.argsort(owners, kind="stable")
        earlier[by_source] = np.arange(WINDOW) - np.repeat(first, counts)
        return owners, earlier


def _additional(rest: Int[np.ndarray, " sources"]) -> Int[np.ndarray, "PERIOD sources"]:
    """Return 0 or 1 rows of each source for each window, such that a source has `rest` in a period.

    Each window gives as many as the last one, to the sources that are furthest behind; ties go to the first ones.
    """
    each = int(rest.sum()) // PERIOD
    additional = np.zeros((PERIOD, rest.size), np.int64)
    behind = np.zeros(rest.size, np.int64)
    for window in range(PERIOD):
        behind += rest
        chosen = np.argsort(-behind, kind="stable")[:each]
        additional[window, chosen] = 1
        behind[chosen] -= PERIOD
    return additional


def _seed_of(seed: int, name: str) -> UInt64[np.ndarray, ""]:
    """Return the seed of a source, which its name determines, and not its place among others."""
    digest = hashlib.sha256(name.encode()).digest()
    return splitmix64(word(seed) ^ word(int.from_bytes(digest[:8], "little")))[0]
