"""Rows that have no text that can be read: the first one is refused, or they are left out and counted (data.on_error).

Data with more than a few such rows are not what they seem to be: beyond a share they are refused all the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from jaxdist.config import RequestError
from jaxdist.output.units import counted

FEW = 100
"""Rows that are left out whatever their share is."""

ONE_IN = 100
"""More of them are left out while they are at most one in so many rows."""

HINT = "or leave such rows out with data.on_error skip"


class Skipped:
    """What is done with the rows that cannot be read, of a piece of the data."""

    def __init__(self, skips: bool, limited: bool = True):
        """Without `skips` the first one is refused. If it is not `limited`, any number of them is left out."""
        self._skips = skips
        self._limited = limited
        self._good = 0
        self.count = 0
        """Rows that were left out."""
        self.empty = 0
        """Texts without a character, which are no documents either."""
        self._first = ""

    def blank(self) -> None:
        """Count a text that is empty."""
        self.empty += 1

    def good(self) -> None:
        """Count a row that was read."""
        self._good += 1

    def bad(self, error: RequestError) -> None:
        """Raise what is wrong with a row, or leave the row out. Raises `RequestError` for more than may be left out."""
        if not self._skips:
            # Of a file whose first row is wrong, all may be.
            raise RequestError(f"{error}, {HINT}") if self._good else error
        self.count += 1
        self._first = self._first or str(error)
        rows = self._good + self.count
        if self._limited and self.count > FEW and self.count * ONE_IN > rows:
            raise RequestError(
                f"{self.count:,} of {rows:,} rows cannot be read, and data.on_error skip leaves out {FEW}, or one in "
                f"{ONE_IN}; the first: {self._first}"
            ) from error

    @property
    def first(self) -> str:
        """What is wrong with the first of them, without a remedy; an empty text if there is none."""
        return self._first.partition("; ")[0]


class Count(NamedTuple):
    """What was left out of a part of the data."""

    empty: int = 0
    skipped: int = 0
    first_skipped: str = ""
    """What is wrong with the first row that was skipped."""


def facts(parts: Iterable[Count]) -> dict[str, Any]:
    """Return for the cache what was left out of all parts of the data; nothing where nothing was."""
    parts = list(parts)
    found: dict[str, Any] = {"empty": sum(part.empty for part in parts), "skipped": sum(part.skipped for part in parts)}
    found["first_skipped"] = next((part.first_skipped for part in parts if part.skipped), "")
    return {name: value for name, value in found.items() if value}


def identity(facts: Mapping[str, Any]) -> list[Any]:
    """Return what names the rows that were left out: nothing if there are none."""
    return ["skipped", facts["skipped"]] if "skipped" in facts else []


def describe(facts: Mapping[str, Any]) -> list[str]:
    """Return a phrase about the rows that were skipped, if there are any."""
    if "skipped" not in facts:
        return []
    return [f"{counted(facts['skipped'], 'row')} skipped, the first: {facts['first_skipped']}"]


def describe_empty(facts: Mapping[str, Any]) -> list[str]:
    """Return a phrase about texts without a character, if there are any."""
    return [counted(facts["empty"], "empty text")] if "empty" in facts else []
