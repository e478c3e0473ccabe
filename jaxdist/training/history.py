"""Reading metrics.jsonl: a line for each logged step, and one for each validation. Any other line is skipped.

A process that is killed may leave half a line; a disk, an editor or somebody else may leave anything. This module does
not import jax.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jaxdist.config import Config
from jaxdist.files import read_regular, write_whole
from jaxdist.files.json_files import parse_json
from jaxdist.output.units import counted

VALIDATED = "validation_loss"
"""The key that only lines of a validation have."""

PER_SECOND = "s_per_second"
"""How the key of a speed ends; before it stands the unit, such as `token`."""

NUMBERS = ("loss", VALIDATED)
"""Keys whose values are numbers, or null, where a line has them."""

LISTED = 3
"""Stretches without lines that a note lists at most."""


class Line(NamedTuple):
    """A line that can be used."""

    values: dict[str, Any]
    text: bytes

    @property
    def step(self) -> int:
        """The step that the line is about."""
        return self.values["step"]

    @property
    def validates(self) -> bool:
        """Whether it is a line of a validation."""
        return VALIDATED in self.values


def read(path: Path) -> list[dict[str, Any]]:
    """Return the lines that can be used, in the order of the file; none where it cannot be read."""
    try:
        content = read_regular(path)
    except OSError:
        return []
    return [line.values for line in _parsed(content.split(b"\n"))]


def number(line: Mapping[str, Any], name: str) -> float | None:
    """Return the finite number of that name in a line; None where there is none."""
    value = line.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return value if math.isfinite(value) else None
    except OverflowError:
        # An integer may be larger than any float.
        return None


def unit_of(line: Mapping[str, Any]) -> str:
    """Return what the speed in a line is given per, such as `token`; empty where it has none."""
    return next((name.removesuffix(PER_SECOND) for name in line if name.endswith(PER_SECOND)), "")


def interval(config: Config) -> int:
    """Return the steps from one line to the next, at most; with local steps there are lines at the ends of rounds."""
    every = config.log.every
    local_steps = config.train.local_steps or 1
    return -(-every // local_steps) * local_steps


def cut(path: Path, step: int, every: Iterable[int]) -> list[str]:
    """Leave each step once, up to `step`, in order; later ones will be run again. Returns sentences about problems.

    Of two lines of one step the later one counts. `every` are the intervals at which the run may have written lines:
    a longer stretch without a line lacks some. Raises `OSError` where the file cannot be read or written.
    """
    content = read_regular(path) if path.exists() else b""
    torn = content.rpartition(b"\n")[2]
    # A process that was killed may have left half a line at the end.
    whole = content[: len(content) - len(torn)].split(b"\n")[:-1]
    lines = _parsed(whole)
    # A later line of the same step replaces the earlier one.
    last = {(line.step, line.validates): line for line in lines if line.step <= step}
    kept = [last[key] for key in sorted(last)]
    if path.exists():
        write_whole(path, b"".join(line.text + b"\n" for line in kept))
    notes = []
    bad = len(whole) - len(lines)
    if bad:
        notes.append(f"left out {counted(bad, 'line')} of {path} that could not be read")
    doubled = sum(line.step <= step for line in lines) - len(kept)
    if doubled:
        notes.append(f"left out {counted(doubled, 'line')} of {path} whose step appears again later")
    gaps = _gaps([line.step for line in kept if not line.validates], step, max(every))
    if gaps:
        stretches = ", ".join(f"{first} to {end}" for first, end in gaps[:LISTED])
        more = f" and {len(gaps) - LISTED} more stretches" if len(gaps) > LISTED else ""
        notes.append(f"{path} has no lines of steps {stretches}{more}, which are not run again; they stay missing")
    return notes


def _gaps(steps: list[int], end: int, every: int) -> list[tuple[int, int]]:
    """Return (first, last) of each stretch of `every` or more steps without a line, between 1 and `end`.

    A shorter stretch at the end is normal: its line was not due yet.
    """
    found = []
    for before, after in zip([0, *steps], [*steps, end + 1], strict=True):
        if after - before > every:
            found.append((before + 1, after - 1))
    return found


def _parsed(texts: Iterable[bytes]) -> list[Line]:
    """Return the texts that are lines of a run."""
    lines = []
    for text in texts:
        line = _line(text)
        if line is not None:
            lines.append(line)
    return lines


def _line(text: bytes) -> Line | None:
    """Return the line; None for a text that no run has written."""
    try:
        values = parse_json(text.decode("utf-8"))
    except ValueError:
        return None
    if not isinstance(values, dict) or not _is(int, values.get("step")) or values["step"] < 1:
        return None
    numbers = [values[name] for name in NUMBERS if name in values]
    if not numbers or not all(number is None or _is((int, float), number) for number in numbers):
        return None
    return Line(values, text)


def _is(kind: type | tuple[type, ...], value: object) -> bool:
    # JSON's true and false are integers in Python.
    return isinstance(value, kind) and not isinstance(value, bool)
