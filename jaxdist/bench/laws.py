"""Amdahl's and Gustafson's laws, and how well they describe measured speed-ups. Plain numbers, no jax.

With N processors and the serial fraction s of the work:

    Amdahl     S = 1 / (s + (1 - s) / N)     the same problem on more processors; s of the time on ONE of them
    Gustafson  S = N - s (N - 1)             a problem that grows with them; s of the time on N of them

G. M. Amdahl, "Validity of the single processor approach to achieving large scale computing capabilities", AFIPS 1967.
J. L. Gustafson, "Reevaluating Amdahl's law", Communications of the ACM 31 (5), 1988.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass


def amdahl(serial: float, n: float) -> float:
    """Speed-up of a fixed problem on `n` processors."""
    return 1 / (serial + (1 - serial) / n)


def gustafson(serial: float, n: float) -> float:
    """Scaled speed-up, of a problem that grows with the `n` processors."""
    return n - serial * (n - 1)


@dataclass(frozen=True)
class Fit:
    law: Callable[[float, float], float]
    """`amdahl` or `gustafson`."""
    serial: float
    """The serial fraction, between 0 and 1."""
    residual: float
    """Root mean square of what the law leaves over: of 1/S for Amdahl's, of S for Gustafson's. No unit."""
    bounded: bool
    """Whether the best fraction lies outside 0 to 1 and was moved to the end: the law does not describe the data."""

    @property
    def name(self) -> str:
        return self.law.__name__.capitalize()


def fit_amdahl(points: Sequence[tuple[float, float]]) -> Fit:
    """Least squares in 1/S, which is linear in s: 1/S - 1/N = s (1 - 1/N). As `fit_gustafson` otherwise."""
    return _fit(amdahl, [(1 - 1 / n, 1 / speed_up - 1 / n) for n, speed_up in points if n > 1])


def fit_gustafson(points: Sequence[tuple[float, float]]) -> Fit:
    """Least squares in S, which is linear in s: N - S = s (N - 1).

    `points` are (N, S). What has N = 1 is S = 1 by definition and does not count. Raises `ValueError` for no point
    with more.
    """
    return _fit(gustafson, [(n - 1, n - speed_up) for n, speed_up in points if n > 1])


def _fit(law: Callable[[float, float], float], lines: list[tuple[float, float]]) -> Fit:
    """The s in [0, 1] for which y = s x is nearest to the (x, y) of `lines`."""
    if not lines:
        raise ValueError("a serial fraction needs a speed-up on more than one processor; measure two or more counts")
    best = math.fsum(x * y for x, y in lines) / math.fsum(x * x for x, _ in lines)
    serial = min(max(best, 0.0), 1.0)
    residual = math.sqrt(math.fsum((y - serial * x) ** 2 for x, y in lines) / len(lines))
    bounded = abs(best - serial) > 1e-9
    return Fit(law, serial, residual, bounded)
