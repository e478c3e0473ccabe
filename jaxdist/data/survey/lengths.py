"""How long documents are: every length with its count, and bins for a picture."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple

QUANTILES = {"median": 0.5, "p90": 0.9, "p99": 0.99}
"""What is told of the lengths, beside the shortest, the longest and the mean."""


class Bin(NamedTuple):
    """The documents of `low` to `high` units, both included."""

    low: int
    high: int
    documents: int


class Lengths:
    """Documents by their length.

    N documents of different lengths have at least N^2/2 units together, so that even 1 TB of text has at most 1.4
    million entries here.
    """

    def __init__(self) -> None:
        self.counts: Counter[int] = Counter()
        """The documents of each length."""

    def add(self, lengths: Iterable[int]) -> None:
        """Count documents of these lengths."""
        self.counts.update(lengths)

    @property
    def documents(self) -> int:
        """The number of documents."""
        return self.counts.total()

    @property
    def total(self) -> int:
        """The length of all documents together."""
        return sum(length * count for length, count in self.counts.items())

    def quantile(self, share: float) -> int:
        """Return the least length that `share` of the documents do not exceed. There must be documents."""
        wanted = max(1, math.ceil(share * self.documents))
        passed = 0
        for length in sorted(self.counts):
            passed += self.counts[length]
            if passed >= wanted:
                return length
        raise AssertionError("no documents")

    def bins(self) -> list[Bin]:
        """Return the documents by powers of two, from the shortest to the longest: 1, 2-3, 4-7, ..."""
        if not self.counts:
            return []
        by_power: Counter[int] = Counter()
        for length, count in self.counts.items():
            by_power[length.bit_length()] += count
        powers = range(min(by_power), max(by_power) + 1)
        return [Bin(1 << power >> 1, (1 << power) - 1, by_power[power]) for power in powers]

    def figures(self) -> dict[str, Any]:
        """Return what --json has; the lengths are null where there are no documents."""
        names = ("shortest", "mean", *QUANTILES, "longest")
        found: dict[str, Any] = {"documents": self.documents, "total": self.total, **dict.fromkeys(names)}
        if self.counts:
            found |= {name: self.quantile(share) for name, share in QUANTILES.items()}
            found["shortest"] = min(self.counts)
            found["longest"] = max(self.counts)
            found["mean"] = self.total / self.documents
        found["bins"] = [one._asdict() for one in self.bins()]
        return found
