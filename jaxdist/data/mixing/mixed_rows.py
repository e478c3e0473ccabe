"""Rows of several sources, numbered one source after another."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jaxtyping import Int

from jaxdist.data.rows import CutRows, CutTogether, Lack, TokenRows
from jaxdist.data.token_samples import OF_MIXTURE
from jaxdist.data.tokens import Tokens

FEW = 16
"""Parts, and up to nearly twice as many, whose entropy is counted as that of a single source is."""


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
        places = np.where(numbers < 0, -1, numbers - self.firsts[owners])
        if self._cut:
            return self._cut.read(owners, places)
        arrays = self.parts[0].read(np.full(numbers.shape, -1))
        for owner in np.unique(owners).tolist():
            here = owners == owner
            for name, array in self.parts[owner].read(places[here]).items():
                arrays[name][here] = array
        return arrays

    @cached_property
    def _cut(self) -> CutTogether | None:
        """The parts if all are cut alike, so that they can be read together."""
        cut = tuple(part for part in self.parts if isinstance(part, CutRows))
        borders = {(part.tokens.begin, part.tokens.end) for part in cut}
        return CutTogether(cut) if len(cut) == len(self.parts) and len(borders) == 1 else None

    def lack(self) -> Lack | None:
        """Return why there is nothing to learn from the first part without anything to learn."""
        return next((lack for part in self.parts if (lack := part.lack())), None)

    def unigram_entropy(self, sharing: int = 1) -> float:
        """Return the mean over the rows of the entropy of their part: a guess may know where a token comes from.

        The more parts there are, the less is read of each.
        """
        sharing = max(sharing, min(OF_MIXTURE, len(self.parts) // FEW))
        return sum(part.count * part.unigram_entropy(sharing) for part in self.parts) / self.count
