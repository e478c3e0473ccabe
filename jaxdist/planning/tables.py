"""Rows of words as lines."""

from __future__ import annotations

from collections.abc import Sequence


def table(rows: Sequence[Sequence[str]], right: bool = False) -> list[str]:
    """Columns as wide as their widest entry, the first row the heading; `right` puts those of numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    numeric = lambda cell: cell[:1].isdigit() or cell in ("", "-")
    number = [right and all(numeric(row[i]) for row in rows[1:]) for i in range(len(widths))]
    pad = lambda cell, width, right: cell.rjust(width) if right else cell.ljust(width)
    return ["  ".join(map(pad, row, widths, number)).rstrip() for row in rows]
