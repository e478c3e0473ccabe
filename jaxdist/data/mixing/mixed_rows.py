"""Rows of several sources, numbered one source after another."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jaxtyping import Int

from jaxdist.data.rows import Lack, TokenRows
from jaxdist.data.tokens import Tokens


@dataclass(frozen=True)
class MixedRows(TokenRows):
    """The rows of all `parts`: first those of the first one, then those of the second one, and so on.

    In all parts documents are apart, or in none.
    """

    parts: tuple[TokenRows, ...]
    sequence: int

    @cached_property
    def firsts(self) -> Int[np.ndarray, " parts+1"]:
        """The number of the first row of each part, and at the end the number of all rows."""
        return np.cumsum([0, *(part.count for part in self.parts)])

    @property
    def count(self) -> int:
        """The number of rows."""
        return int(self.firsts[-1])

    @property
    def apart(self) -> bool:
        """Whether documents are apart."""
        return self.parts[0].apart

    @property
    def streams(self) -> tuple[Tokens, ...]:
        """Those of all parts."""
        return tuple(tokens for part in self.parts for tokens in part.streams)

    def read(self, numbers: Int[np.ndarray, " n"]) -> dict[str, np.ndarray]:
        """Return the arrays of these rows."""
        assert numbers.size == 0 or -1 <= numbers.min() <= numbers.max() < self.count, "row outside the sources"
        # Padding is the same of any part.
        owners = np.maximum(np.searchsorted(self.firsts, numbers, "right") - 1, 0)
        arrays = self.parts[0].read(np.full(numbers.shape, -1))
        for owner in np.unique(owners).tolist():
            here = owners == owner
            places = np.where(numbers[here] < 0, -1, numbers[here] - self.firsts[owner])
            for name, array in self.parts[owner].read(places).items():
                arrays[name][here] = array
        return arrays

    def lack(self) -> Lack | None:
        """Return why there is nothing to learn from the first part without anything to learn."""
        return next((lack for part in self.parts if (lack := part.lack())), None)

    def unigram_entropy(self) -> float:
        """Return the mean over the rows of the entropy of their part: a guess may know where a token comes from."""
        return sum(part.count * part.unigram_entropy() for part in self.parts) / self.count
