"""Amdahl's and Gustafson's laws, and how well they describe measured speed-ups, in plain Python without jax.

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
    """Return the speed-up of a fixed problem on `n` processors."""
    return 1 / (serial + (1 - serial) / n)


def gustafson(serial: float, n: float) -> float:
    """Return the scaled speed-up of a problem that grows with the `n` processors."""
    return n - serial * (n - 1)


@dataclass(frozen=True)
class Fit:
    """A law with the serial fraction that fits measured speed-ups best."""

    law: Callable[[float, float], float]
    """`amdahl` or `gustafson`."""
    serial: float
    """The serial fraction, between 0 and 1."""
    residual: float
    """Root mean square difference from the law: of 1/S for Amdahl's, of S for Gustafson's. No unit."""
    bounded: bool
    """Whether the best fraction lies outside 0 to 1 and was clipped: the law does not describe the data."""

    @property
    def name(self) -> str:
        """`Amdahl` or `Gustafson`."""
        return self.law.__name__.capitalize()


def fit_amdahl(points: Sequence[tuple[float, float]]) -> Fit:
    """Fit Amdahl's law by least squares in 1/S, which is linear in s: 1/S - 1/N = s (1 - 1/N).

    `points` and the error raised are as in `fit_gustafson`.
    """
    lines = [(1 - 1 / n, 1 / speed_up - 1 / n) for n, speed_up in points if n > 1]
    return _fit(amdahl, lines)


def fit_gustafson(points: Sequence[tuple[float, float]]) -> Fit:
    """Fit Gustafson's law by least squares in S, which is linear in s: N - S = s (N - 1).

    `points` are (N, S). A point with N = 1 has S = 1 by definition and does not count. Raises `ValueError` if no point
    has a larger N.
    """
    lines = [(n - 1, n - speed_up) for n, speed_up in points if n > 1]
    return _fit(gustafson, lines)


def _fit(law: Callable[[float, float], float], lines: list[tuple[float, float]]) -> Fit:
    """Return the s in [0, 1] for which y = s x is nearest to the (x, y) of `lines`."""
    if not lines:
        raise ValueError("a serial fraction needs a speed-up on more than one processor; measure two or more counts")
    # `fsum` rounds once, so that the points of an exact curve give its fraction back.
    best = math.fsum(x * y for x, y in lines) / math.fsum(x * x for x, _ in lines)
    serial = min(max(best, 0.0), 1.0)
    residual = math.sqrt(math.fsum((y - serial * x) ** 2 for x, y in lines) / len(lines))
    bounded = abs(best - serial) > 1e-9
    return Fit(law, serial, residual, bounded)
