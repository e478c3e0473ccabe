"""What stands behind a claim of the lecture: how it is measured, and what makes it fail."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Outcome:
    """What a measurement has come to."""

    value: Any
    """A number, or a text, as JSON can say it."""
    passed: bool
    """Whether it is what the lecture expects."""
    lines: tuple[str, ...] = ()
    """What else there is to see, for a person."""
    picture: Callable[[pathlib.Path], None] | None = None
    """Writes a PNG."""


@dataclass(frozen=True)
class Check:
    """A claim's measurement. Nothing that is expected is written in it."""

    measure: Callable[..., Outcome]
    """`measure(expected: str, tolerance: str, **settings)`, the first two as `claims.csv` has them; every setting has a
    default, with which the claim is to hold."""
    control: dict[str, Any] = field(default_factory=dict)
    """One changed setting, with which the claim must fail. Empty where there is no such setting."""
