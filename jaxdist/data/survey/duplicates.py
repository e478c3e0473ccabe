"""Documents that are there more than once, found by a 64-bit hash of each, in 8 bytes of memory a document.

Of 67 million different documents two have the same XXH3 with a probability of 1 in 8,000.
"""

from __future__ import annotations

from array import array
from typing import NamedTuple

import numpy as np
from jaxtyping import UInt64

LIMIT = 1 << 26
"""Documents that are compared; later ones are not. Their hashes take 512 MiB, and while they are sorted twice that."""

BLOCK = 1 << 20
"""Hashes that are looked up at a time."""


class Duplicates(NamedTuple):
    """What was found."""

    compared: int
    """Documents that were compared."""
    repeated: int
    """Those that came before."""
    first: tuple[int, int] | None
    """The numbers, from 0, of the first document that came before and of the one that it repeats, that one first."""


class Hashes:
    """The hashes of documents, in their order."""

    def __init__(self) -> None:
        self.count = 0
        """Documents so far, also those that are not compared."""
        self._hashes = array("Q")

    def add(self, content: int) -> None:
        """Add the hash of the next document."""
        self.count += 1
        if len(self._hashes) < LIMIT:
            self._hashes.append(content)

    def duplicates(self) -> Duplicates:
        """Return which documents are there more than once."""
        hashes = np.frombuffer(self._hashes, np.uint64)
        ordered = np.sort(hashes)
        again = ordered[1:][ordered[1:] == ordered[:-1]]
        first = _first_pair(hashes, again) if again.size else None
        return Duplicates(hashes.size, again.size, first)


def _first_pair(hashes: UInt64[np.ndarray, " n"], again: UInt64[np.ndarray, " m"]) -> tuple[int, int]:
    """Return the places of the first hash that came before: where it was, and where it comes again."""
    seen: dict[int, int] = {}
    for start in range(0, hashes.size, BLOCK):
        block = hashes[start : start + BLOCK]
        at = np.minimum(np.searchsorted(again, block), again.size - 1)
        for offset in np.flatnonzero(again[at] == block).tolist():
            content = int(block[offset])
            if content in seen:
                return seen[content], start + offset
            seen[content] = start + offset
    raise AssertionError("no hash comes again")
