"""Rows that have no text that can be read: the first one is refused, or they are left out and counted (data.on_error).

Data with more than a few such rows are not what they seem to be: beyond a share they are refused all the same.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxdist.config import RequestError
from jaxdist.output.units import counted

FEW = 100
"""Rows that are left out whatever their share is."""

ONE_IN = 100
"""More of them are left out while they are at most one in so many rows."""

SHOWN = 3
"""Rows of which it is said what is wrong with them."""

QUOTED = re.compile(" of '[^']*'")
"""How a reason names its file, behind the number of the row."""

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
        self._wrong: list[str] = []

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
        if len(self._wrong) < SHOWN:
            self._wrong.append(str(error))
        rows = self._good + self.count
        if self._limited and self.count > FEW and self.count * ONE_IN > rows:
            raise RequestError(
                f"{self.count:,} of {rows:,} rows cannot be read, and data.on_error skip leaves out {FEW}, or one in "
                f"{ONE_IN}; the first: {self._wrong[0]}"
            ) from error

    @property
    def first(self) -> str:
        """What is wrong with the first of them, without remedies, a line each; an empty text if there is none."""
        return "\n".join(wrong.partition("; ")[0] for wrong in self._wrong)


class Count(NamedTuple):
    """What was left out of a part of the data."""

    empty: int = 0
    skipped: int = 0
    first_skipped: str = ""
    """What is wrong with the first rows that were skipped, a line each."""


def facts(parts: Iterable[Count]) -> dict[str, Any]:
    """Return for the cache what was left out of all parts of the data; nothing where nothing was."""
    parts = list(parts)
    found: dict[str, Any] = {"empty": sum(part.empty for part in parts), "skipped": sum(part.skipped for part in parts)}
    # Where a piece has several parts, each of them knows the first rows of the piece.
    wrong = dict.fromkeys(line for part in parts if part.skipped for line in part.first_skipped.splitlines())
    found["first_skipped"] = "\n".join(list(wrong)[:SHOWN])
    return {name: value for name, value in found.items() if value}


def identity(facts: Mapping[str, Any]) -> list[Any]:
    """Return what names the rows that were left out: nothing if there are none."""
    return ["skipped", facts["skipped"]] if "skipped" in facts else []


def describe(facts: Mapping[str, Any], paths: Sequence[Path]) -> list[str]:
    """Return a phrase about the rows of these files that were skipped, if there are any."""
    if "skipped" not in facts:
        return []
    reasons = facts["first_skipped"].split("\n")
    if len(paths) == 1:
        # The only file may have had another name when its rows were read.
        reasons = [QUOTED.sub(lambda _: f" of '{paths[0]}'", reason, count=1) for reason in reasons]
    first, *others = reasons
    return ["; ".join([f"{counted(facts['skipped'], 'row')} skipped, the first: {first}", *others])]


def describe_empty(facts: Mapping[str, Any]) -> list[str]:
    """Return a phrase about texts without a character, if there are any."""
    return [counted(facts["empty"], "empty text")] if "empty" in facts else []
