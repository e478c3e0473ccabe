"""Shorter forms of the suite: of a long table of rows only some."""

from collections.abc import Iterable

import pytest


def thinned(rows: Iterable[tuple], every: int, first: int = 0) -> list:
    """All `rows`, each a tuple of arguments; all are slow but each `every`-th from number `first` on."""
    slow = lambda place: place < first or (place - first) % every
    return [pytest.param(*row, marks=pytest.mark.slow if slow(place) else ()) for place, row in enumerate(rows)]


def exhaustive(rows: Iterable[tuple]) -> list:
    """All `rows`, each a tuple of arguments, for `--exhaustive` alone."""
    return [pytest.param(*row, marks=pytest.mark.exhaustive) for row in rows]
