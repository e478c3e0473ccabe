"""The short form of the suite, `pytest -m "not slow"`: of a long table of rows only some."""

from collections.abc import Iterable

import pytest


def thinned(rows: Iterable[tuple], every: int) -> list:
    """All `rows`, each a tuple of arguments; all but each `every`-th are slow, the first is not."""
    return [pytest.param(*row, marks=pytest.mark.slow if place % every else ()) for place, row in enumerate(rows)]
