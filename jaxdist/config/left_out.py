"""Batches that a run leaves out (`data.skip`): which ones, and which batch each step takes. Pure functions of a text.

Batches are numbered from 1 in the order of the data: without `data.skip`, batch n is that of step n.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

RANGE = re.compile(r"[1-9][0-9]{0,8}(-[1-9][0-9]{0,8})?")
"""A batch or a step, or the first and the last one of a range."""

Ranges = Sequence[tuple[int, int]]
"""The (first, last) of each stretch of batches that are left out: ascending, with a batch between any two of them."""


def problem_of(text: str) -> str:
    """Return what is wrong with the text of data.skip, as the end of a sentence; empty if nothing is."""
    for part in text.split(",") if text else ():
        if not RANGE.fullmatch(part.strip()):
            return "must be batches, counted from 1, or ranges of them, such as 1200-1450,2000"
        first, last = _ends(part)
        if last < first:
            return f"has {part.strip()}, which ends before it begins; write {last}-{first}"
    return ""


def ranges_of(text: str) -> list[tuple[int, int]]:
    """Return the ranges of a text in which nothing is wrong, in order; those that touch are one."""
    found: list[tuple[int, int]] = []
    for first, last in sorted(map(_ends, text.split(","))) if text else ():
        if found and first <= found[-1][1] + 1:
            found[-1] = (found[-1][0], max(last, found[-1][1]))
        else:
            found.append((first, last))
    return found


def batches_until(ranges: Ranges, step: int) -> int:
    """Return the number of the batch that `step` takes: so many batches are taken or left out by its end; 0 for 0."""
    number = step
    for first, last in ranges if step else ():
        if first > number:
            break
        number += last - first + 1
    return number


def steps_before(ranges: Ranges, batch: int) -> int:
    """Return the number of steps that take a batch before `batch`."""
    left_out = sum(min(last, batch - 1) - first + 1 for first, last in ranges if first < batch)
    return batch - 1 - left_out


def first_difference(one: Ranges, other: Ranges) -> int | None:
    """Return the first batch that only one of both leaves out; None where they leave out the same."""
    for a, b in zip(one, other, strict=False):
        if a[0] != b[0]:
            return min(a[0], b[0])
        if a[1] != b[1]:
            return min(a[1], b[1]) + 1
    more = [*one[len(other) :], *other[len(one) :]]
    return more[0][0] if more else None


def without(text: str, before: int, last: int) -> str:
    """Return how a run whose data.skip is `text` goes on without the batches of the steps after `before` to `last`."""
    going_back = f"--resume with step {before} or one before it" if before else "start anew"
    return f"to leave its batches out: {going_back}, and --data.skip {joined(text, batches_of(text, before, last))}"


def batches_of(text: str, before: int, last: int) -> str:
    """Return the batches of the steps after `before` to `last` of a run whose data.skip is `text`, as a range."""
    ranges = ranges_of(text)
    return f"{batches_until(ranges, before + 1)}-{batches_until(ranges, last)}"


def joined(text: str, more: str) -> str:
    """Return a text that leaves out what `text` does, and `more`; `text` itself where that is no more."""
    if ranges_of(f"{text},{more}" if text else more) == ranges_of(text):
        return text
    return f"{text},{more}" if text else more


def _ends(part: str) -> tuple[int, int]:
    first, _, last = part.strip().partition("-")
    return int(first), int(last or first)
