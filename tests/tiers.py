"""Shorter forms of the suite: of a long table of rows only some, and rows that take no time in one test."""

from collections.abc import Callable, Iterable

import pytest


def thinned(rows: Iterable[tuple], every: int, first: int = 0) -> list:
    """All `rows`, each a tuple of arguments; all are slow but each `every`-th from number `first` on."""
    slow = lambda place: place < first or (place - first) % every
    return [pytest.param(*row, marks=pytest.mark.slow if slow(place) else ()) for place, row in enumerate(rows)]


def exhaustive(rows: Iterable[tuple]) -> list:
    """All `rows`, each a tuple of arguments, for `--exhaustive` alone."""
    return [pytest.param(*row, marks=pytest.mark.exhaustive) for row in rows]


def faults(rows: Iterable[tuple], check: Callable) -> list[str]:
    """What `check(*row)` raises for each of `rows`, a line for each that is wrong.

    Rows that take no time are one test, which tells all that are wrong at once.
    """
    found = []
    for row in rows:
        try:
            check(*row)
        except Exception as error:
            found.append(f"{row}: {type(error).__name__}: {error}")
    return found
