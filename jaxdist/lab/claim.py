"""A claim of the lecture, how it is measured, and a setting with which it must fail."""

from __future__ import annotations

import pathlib
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

WRONG = "shown as wrong"
"""Words in the notes of a claim that corrects the lecture."""

LABELS = {
    "measured": "a program ran, and this is what it gave",
    "counted": "read from what the system builds: a compiled program, a schedule, shapes and shardings of arrays",
    "predicted": "arithmetic of the planner or of a formula; nothing ran",
    "looked up": "published by others; the source is in the notes",
}
"""How a claim's value came about -> what that means."""


@dataclass(frozen=True)
class Claim:
    """A row of the table, as it is written there."""

    id: str
    topic: str
    label: str
    """One of `LABELS`."""
    claim: str
    expected: str
    unit: str
    tolerance: str
    fails_if: str
    """Mistakes in the system that make the claim fail, with `; ` between them; every one is run by a test."""
    notes: str

    @property
    def command(self) -> str:
        """The command that measures the claim."""
        return f"python -m jaxdist.lab {self.id}"

    @property
    def wanted(self) -> str:
        """Expected value, unit and tolerance: `16.6 (GB), within 1%`.

        The unit `-` stands for a number without one and is left out.
        """
        unit = "" if self.unit == "-" else f" ({self.unit})"
        how = f"within {self.tolerance}"
        if self.tolerance.startswith("exact"):
            how = self.tolerance.replace("exact", "exactly", 1)
        return f"{self.expected}{unit}, {how}"

    def met(self, value: float | bool | str, of: float | None = None) -> bool:
        """Return whether a value is as near to the expected one as the table asks.

        A tolerance is `exact`, a share (`1%`) of the expected value or of another value `of`, or a number (`1e-5`). The
        words after it, as in `1% at N=1024` or `2% of the loss`, say with which settings, or of what. A text is exact.
        """
        if isinstance(value, bool):
            value = str(value).lower()
        if isinstance(value, str):
            return value == self.expected
        target = float(self.expected)
        allowed = self.tolerance.split()[0]
        if allowed == "exact":
            return value == target
        if allowed.endswith("%"):
            whole = target if of is None else of
            return abs(value - target) <= float(allowed[:-1]) / 100 * abs(whole)
        return abs(value - target) <= float(allowed)

    @property
    def documents(self) -> list[str]:
        """The documents of the lecture, 000 to 004, that the notes name; none for what several documents say."""
        return sorted(set(re.findall(r"\b00[0-4]\b", self.notes)))

    @property
    def mistakes(self) -> list[str]:
        """The mistakes of `fails_if`, one by one."""
        return self.fails_if.split("; ") if self.fails_if else []

    @property
    def corrects(self) -> bool:
        """Whether the lecture says otherwise, and is wrong."""
        return WRONG in self.notes


@dataclass(frozen=True)
class Outcome:
    """The result of a measurement."""

    value: Any
    """A number or a text, as in JSON."""
    passed: bool
    """Whether the value is what the lecture expects."""
    lines: tuple[str, ...] = ()
    """Lines of text on how the value came about."""
    picture: Callable[[pathlib.Path], None] | None = None
    """A function that draws the measurement into a PNG file, if there is one."""


@dataclass(frozen=True)
class Check:
    """The measurement of a claim. It knows no expected value: the claim has it."""

    measure: Callable[..., Outcome]
    """Called as `measure(claim, **settings)`. Every setting has a default, with which the claim must hold."""
    control: dict[str, Any] = field(default_factory=dict)
    """One changed setting, with which the claim must fail; empty if there is no such setting."""
