"""Two programs that take turns, and the ratio of their CPU time.

Other jobs of a machine stretch the wall time of a step, and its CPU time much less. A pair is four turns in the order
first, second, second, first: a load or a clock that drifts hits both alike.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median, quantiles

Turn = Callable[[], float]
"""Runs some steps, and returns their CPU seconds."""


def ratios(first: Turn, second: Turn, pairs: int) -> list[float]:
    """Return the CPU time of `second` over that of `first`, of each pair; a pair before them warms both up."""
    found = []
    for _ in range(1 + pairs):
        before, left, right, after = first(), second(), second(), first()
        found.append((left + right) / (before + after))
    return found[1:]


def sentence(found: list[float]) -> str:
    """Return median, quartiles and all ratios, as text."""
    low, _, high = quantiles(found, n=4)
    return f"median {median(found):.3f} [{low:.3f} {high:.3f}]   " + " ".join(f"{one:.3f}" for one in found)
