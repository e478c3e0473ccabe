"""How an attention scores keys: the scale of its scores, and how far back a query sees."""

from __future__ import annotations

from dataclasses import dataclass, replace

from jaxtyping import Array, Bool, Int


@dataclass(frozen=True)
class Scores:
    """What a query times a key is multiplied by, and which keys are hidden from a query, documents aside."""

    scale: float
    window: int = 0
    """A query sees itself and the window - 1 tokens before it; 0: all before it."""

    @classmethod
    def of(cls, head_size: int, window: int = 0) -> Scores:
        """Return the scores of Vaswani et al. 2017, eq. 1, for queries and keys of this size."""
        return cls(head_size**-0.5, window)

    def within(self, sequence: int) -> Scores:
        """Return the same for rows of `sequence` tokens, without a window that hides nothing of them."""
        return replace(self, window=effective_window(self.window, sequence))

    def seen(self, queries: Int[Array, "..."], keys: Int[Array, "..."]) -> Bool[Array, "..."]:
        """Return whether queries at these positions see keys at those; the arrays are broadcast."""
        seen = keys <= queries
        if self.window:
            seen &= keys > queries - self.window
        return seen


def effective_window(window: int, sequence: int) -> int:
    """Return the window, or 0 where it hides nothing from a row of `sequence` tokens."""
    return window if window < sequence else 0
