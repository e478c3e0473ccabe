"""How many documents are cut where one stream becomes rows: for one length of rows, or once for the usual ones.

The summary of a run says it without reading the tokens: it is counted when they are made, and kept with them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

from jaxdist.data.packing import cut_in_stream

USUAL = tuple(1 << power for power in range(5, 18))
"""Lengths of rows for which it is kept: 32 to 131,072 tokens."""

ABOUT = "about"
"""Whether it is reckoned from samples."""

KEPT = "row_use"
"""The fact of the cache that has it."""


class RowUse:
    """How many documents of one stream are cut where it becomes rows of `sequence` tokens."""

    def __init__(self, sequence: int):
        self.sequence = sequence
        self.documents = 0
        self.cut = 0
        """With data.pack cut."""
        self.longer = 0
        """With data.pack best-fit, which cuts only what is longer than a row."""
        self.tokens = 0
        """All of these documents."""

    def add(self, lengths: Int[np.ndarray, " documents"]) -> None:
        """Add the next documents of the stream."""
        self.documents += lengths.size
        self.cut += cut_in_stream(lengths, self.sequence, self.tokens)
        self.longer += int((lengths > self.sequence).sum())
        self.tokens += int(lengths.sum())


def usual_uses(lengths: Iterable[Int[np.ndarray, " documents"]], of: int | None = None) -> dict[str, Any]:
    """Return for the cache how rows of each of the `USUAL` lengths use a stream of documents of these lengths.

    Where these are samples of a stream of so many tokens, it is reckoned for all of it.
    """
    uses = [RowUse(sequence) for sequence in USUAL]
    for some in lengths:
        for use in uses:
            use.add(some)
    found = {"documents": uses[0].documents, **{str(use.sequence): [use.cut, use.longer] for use in uses}}
    if of is None:
        return {KEPT: found}
    part = of / max(1, uses[0].tokens)
    reckoned = {name: (np.array(counts) * part).tolist() for name, counts in found.items()}
    return {KEPT: {**reckoned, ABOUT: True}}


class Cut(NamedTuple):
    """How many documents are cut where a stream becomes rows of one length."""

    documents: float
    cut: float
    """With data.pack cut."""
    longer: float
    """With data.pack best-fit."""
    about: bool = False
    """Whether it is reckoned from what is kept of other lengths of rows."""

    def __str__(self) -> str:
        """Return a phrase about it."""
        cut, longer = (f"{100 * count / self.documents:.{0 if self.about else 1}f} %" for count in self[1:3])
        about = "about " if self.about else ""
        return f"rows cut {about}{cut} of the documents (with data.pack best-fit: {longer})"


def cut_of(facts: Mapping[str, Any], sequence: int) -> Cut | None:
    """Return it for rows of `sequence` tokens, from the facts of the cache.

    Between two of the `USUAL` lengths it is reckoned from both. None where nothing is kept, for a single document, and
    for rows that are shorter or longer than all of these.
    """
    kept = facts.get(KEPT, {})
    documents = kept.get("documents", 0)
    if documents < 2 or not USUAL[0] <= sequence <= USUAL[-1]:
        return None
    if str(sequence) in kept:
        cut, longer = kept[str(sequence)]
        return Cut(documents, cut, longer, ABOUT in kept)
    below = 1 << (sequence.bit_length() - 1)
    before, after = (Cut(documents, *kept[str(length)]) for length in (below, 2 * below))
    cut, longer = _between(before, after, below, sequence)
    return Cut(documents, cut, longer, about=True)


def _between(before: Cut, after: Cut, below: int, sequence: int) -> tuple[float, float]:
    """Return (cut, longer) of rows of a length between `below`, where it is `before`, and twice that: `after`.

    A document of n tokens that begins anywhere in a row of S tokens is cut with the chance min(n - 1, S) / S. So S
    times those that are cut is the sum of min(n - 1, S), which grows with S by the number of documents that are longer:
    with both known at both ends it is a cubic (Hermite) between them.
    """
    part = sequence / below - 1
    sums = (below * before.cut, 2 * below * after.cut)
    slopes = (below * before.longer, below * after.longer)
    inner = CubicHermite(sums, slopes)
    cut = float(np.clip(inner.at(part) / sequence, after.cut, before.cut))
    longer = float(np.clip(inner.slope(part) / below, after.longer, before.longer))
    return cut, longer


class CubicHermite(NamedTuple):
    """The cubic with these values and slopes at 0 and at 1."""

    values: tuple[float, float]
    slopes: tuple[float, float]

    def at(self, x: float) -> float:
        """Return its value."""
        rise = self.values[1] - self.values[0]
        first, last = (slope - rise for slope in self.slopes)
        return self.values[0] + x * rise + x * (1 - x) * ((1 - x) * first - x * last)

    def slope(self, x: float) -> float:
        """Return its slope."""
        rise = self.values[1] - self.values[0]
        first, last = (slope - rise for slope in self.slopes)
        return rise + (1 - x) * (1 - 3 * x) * first + x * (3 * x - 2) * last


def together(parts: Iterable[tuple[Cut | None, float]]) -> Cut | None:
    """Return what a run cuts of several sources, each read so many times; None where it is not known of one."""
    read = [(cut, epochs) for cut, epochs in parts if epochs]
    known = [(cut, epochs) for cut, epochs in read if cut]
    if not known or len(known) < len(read):
        return None
    documents, cut, longer = (sum(epochs * one[place] for one, epochs in known) for place in range(3))
    return Cut(documents, cut, longer, any(one.about for one, _ in known))
