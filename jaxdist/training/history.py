"""What metrics.jsonl holds: a line for each logged step, and one for each validation. What is no such line is skipped.

A process that is killed may leave half a line; a disk, an editor or somebody else may leave anything. No jax here.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from jaxdist.files import read_regular, write_whole
from jaxdist.training.checkpoint.step_dir import WRONG_CONTENT

VALIDATED = "validation_loss"
"""The key that a line of a validation has, and no other."""

NUMBERS = ("loss", VALIDATED)
"""Keys whose values are numbers, or null, where a line has them."""


class Line(NamedTuple):
    """One that can be used."""

    values: dict[str, Any]
    text: bytes

    @property
    def step(self) -> int:
        return self.values["step"]

    @property
    def validates(self) -> bool:
        return VALIDATED in self.values


def read(path: Path) -> list[dict[str, Any]]:
    """The lines that can be used, in the order of the file; none where it cannot be read."""
    return [line.values for line in _usable(path)]


def cut(path: Path, step: int, every: Iterable[int]) -> list[str]:
    """Leave each step once, up to `step`, in order; later ones will be run again. Returns sentences of what is wrong.

    Of two lines of one step the later one counts. `every` are the intervals at which the run may have written lines:
    where a longer stretch has none, they are missing. Raises `OSError` where the file cannot be read or written.
    """
    content = read_regular(path) if path.exists() else b""
    torn = content.rpartition(b"\n")[2]
    whole = content[: len(content) - len(torn)].split(b"\n")[:-1]  # half a line is what a kill leaves
    lines = [line for line in map(_line, whole) if line is not None]
    last = {(line.step, line.validates): line for line in lines if line.step <= step}
    kept = [last[key] for key in sorted(last)]
    if path.exists():
        write_whole(path, b"".join(line.text + b"\n" for line in kept))
    notes = []
    if bad := len(whole) - len(lines):
        notes.append(f"{bad} line(s) of {path} could not be read and are left out")
    if doubled := sum(line.step <= step for line in lines) - len(kept):
        notes.append(f"{doubled} line(s) of {path} stood there twice; the later one is kept")
    if gaps := _gaps([line.step for line in kept if not line.validates], step, max(every)):
        stretches = ", ".join(f"{first} to {end}" for first, end in gaps[:3])
        more = f" and {len(gaps) - 3} more stretches" if len(gaps) > 3 else ""
        notes.append(f"{path} has no lines of steps {stretches}{more}, which are not run again; they stay missing")
    return notes


def _gaps(steps: list[int], end: int, every: int) -> list[tuple[int, int]]:
    """(first, last) of stretches of `every` steps and more without a line, between 1 and `end`.

    The stretch at the end may be shorter than `every` by itself.
    """
    found = []
    for before, after in zip([0, *steps], [*steps, end + 1], strict=True):
        if after - before > every:
            found.append((before + 1, after - 1))
    return found


def _usable(path: Path) -> list[Line]:
    try:
        content = read_regular(path)
    except OSError:
        return []
    return [line for line in map(_line, content.split(b"\n")) if line is not None]


def _line(text: bytes) -> Line | None:
    """None for what no run has written."""
    try:
        values = json.loads(text)
    except WRONG_CONTENT:
        return None
    if not isinstance(values, dict) or not _is(int, values.get("step")) or values["step"] < 1:
        return None
    numbers = [values[name] for name in NUMBERS if name in values]
    if not numbers or not all(number is None or _is((int, float), number) for number in numbers):
        return None
    return Line(values, text)


def _is(kind: type | tuple[type, ...], value: object) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)
