"""Which order counts grow by: least squares of a + b f(K) for each f, and the one that leaves the least."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

ORDERS = {
    "O(1)": lambda K: 0 * K,
    "O(log K)": np.log2,
    "O(K)": lambda K: K,
    "O(K log K)": lambda K: K * np.log2(K),
    "O(K^2)": lambda K: K**2,
}
"""Name -> f, the slowest growth first."""

ROUNDING = 1e-9


@dataclass(frozen=True)
class Fit:
    sizes: tuple[int, ...]
    """K."""
    counts: tuple[float, ...]
    errors: dict[str, float]
    """Order -> what a + b f(K) leaves of the counts at best: root mean square, as a share of that of the counts."""

    @property
    def order(self) -> str:
        """The one that leaves the least; of several that leave nothing, the slowest: constants fit all of them."""
        least = min(self.errors.values())
        return next(name for name, error in self.errors.items() if error <= least + ROUNDING)


def fit(sizes: Sequence[int], counts: Sequence[float]) -> Fit:
    """Raises `ValueError` for fewer sizes than tell a line from a curve."""
    if len(set(sizes)) < 4:
        raise ValueError(f"{len(set(sizes))} sizes do not tell the orders apart; give 4 or more")
    K, count = np.asarray(sizes, float), np.asarray(counts, float)
    errors = {name: _left(np.stack([np.ones_like(K), f(K)], 1), count) for name, f in ORDERS.items()}
    return Fit(tuple(sizes), tuple(counts), errors)


def _left(terms: np.ndarray, count: np.ndarray) -> float:
    solution = np.linalg.lstsq(terms, count)[0]
    return float(np.linalg.norm(count - terms @ solution) / np.linalg.norm(count))
