"""Columns of whole numbers with many equal rows: what a scalar function costs is paid once per distinct row."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

Column = np.ndarray
"""One number for each candidate."""

FEW = 16
"""Columns of numbers below this bound are taken as they are: ranks would not be much smaller."""

LARGEST_IN_TABLE = 2**24
"""Numbers below this bound are looked up in a table with an entry for each possible value."""


Scalar = Callable[..., float]
"""A function of the numbers of a row."""


def map_distinct(function: Scalar, *columns: Column) -> Column:
    """Apply a scalar function to the rows of `columns`, calling it once for each distinct row.

    Columns with few distinct values make few calls, whatever their length.
    """
    return mapping(*columns)(function)


def mapping(*columns: Column) -> Callable[[Scalar], Column]:
    """Return `map_distinct` for any function of the rows of `columns`, whose distinct rows are found once."""
    examples, kinds = distinct_rows(*columns)
    rows = list(zip(*(column[examples].tolist() for column in columns), strict=True))

    def apply(function: Scalar) -> Column:
        return np.array([function(*row) for row in rows], float)[kinds]

    return apply


def distinct_rows(*columns: Column) -> tuple[Column, Column]:
    """Return the index of one row of each kind, and for each row its kind: its place among those."""
    kinds = np.zeros(len(columns[0]), np.int64)
    count = 1
    for column in columns:
        values, ranks = int(column.max(initial=0)) + 1, column
        if values > FEW:
            values, ranks = _ranks(column)
        kinds = kinds * values + ranks
        count *= values
        # Numbered anew where there are more numbers than rows could have, so that they do not grow with the product.
        if count > len(kinds):
            count, kinds = _ranks(kinds)
    count, kinds = _ranks(kinds)
    examples = np.zeros(count, np.int64)
    examples[kinds] = np.arange(len(kinds))
    return examples, kinds


def _ranks(column: Column) -> tuple[int, Column]:
    """Return how many distinct values a column has, and for each row the rank of its value among them."""
    if column.max(initial=0) >= LARGEST_IN_TABLE:
        values, ranks = np.unique(column, return_inverse=True)
        return len(values), ranks
    # A table is faster than the sort inside np.unique.
    seen = np.zeros(column.max(initial=0) + 1, bool)
    seen[column] = True
    return int(seen.sum()), (np.cumsum(seen) - 1)[column]
