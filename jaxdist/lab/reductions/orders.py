"""Find the order in which counts grow: fit a + b f(K) for each f by least squares, and take the one that fits best."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

ORDERS = ("O(1)", "O(log K)", "O(K)", "O(K log K)", "O(K^2)")
"""The slowest growth first."""

ROUNDING = 1e-9


@dataclass(frozen=True)
class Fit:
    """Counts over K, and how well each order fits them."""

    sizes: tuple[int, ...]
    """The values of K."""
    counts: tuple[float, ...]
    errors: dict[str, float]
    """Order -> root mean square error of the best a + b f(K), relative to the root mean square of the counts."""

    @property
    def order(self) -> str:
        """The order with the least error; of several without any, the slowest, because all of them fit constants."""
        # Several orders can fit up to rounding, since a and b are free; they are sorted by growth.
        least = min(self.errors.values())
        return next(name for name, error in self.errors.items() if error <= least + ROUNDING)


def fit(sizes: Sequence[int], counts: Sequence[float]) -> Fit:
    """Fit every order to the counts; raises `ValueError` for fewer than four different sizes."""
    if len(set(sizes)) < 4:
        raise ValueError(f"{len(set(sizes))} sizes do not tell the orders apart; give 4 or more")
    K = np.asarray(sizes, float)
    count = np.asarray(counts, float)
    # O(1) is a alone.
    growth = (0 * K, np.log2(K), K, K * np.log2(K), K**2)
    errors = {}
    for name, f in zip(ORDERS, growth, strict=True):
        terms = np.stack([np.ones_like(K), f], 1)
        solution = np.linalg.lstsq(terms, count)[0]
        errors[name] = float(np.linalg.norm(count - terms @ solution) / np.linalg.norm(count))
    return Fit(tuple(sizes), tuple(counts), errors)
