"""Format rows of text as an aligned table."""

from __future__ import annotations

from collections.abc import Sequence


def table(rows: Sequence[Sequence[str]], right: bool = False) -> list[str]:
    """Return lines with columns as wide as their widest entry; the first row is the heading.

    `right` aligns columns of numbers to the right.
    """
    columns = list(zip(*rows, strict=True))
    aligned = []
    for cells in columns:
        width = max(map(len, cells))
        if right and all(map(_is_number, cells[1:])):
            aligned.append([cell.rjust(width) for cell in cells])
        else:
            aligned.append([cell.ljust(width) for cell in cells])
    return ["  ".join(cells).rstrip() for cells in zip(*aligned, strict=True)]


def _is_number(cell: str) -> bool:
    """Return whether a cell may stand in a column of numbers."""
    return cell[:1].isdigit() or cell in ("", "-")
