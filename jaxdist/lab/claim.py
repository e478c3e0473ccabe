"""How a claim of the lecture is measured, and a setting with which it must fail."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


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
    """The measurement of a claim. It knows no expected value: that is passed in."""

    measure: Callable[..., Outcome]
    """Called as `measure(expected: str, tolerance: str, **settings)`, where expected value and tolerance are those of
    `claims.csv`. Every setting has a default, with which the claim must hold."""
    control: dict[str, Any] = field(default_factory=dict)
    """One changed setting, with which the claim must fail; empty if there is no such setting."""
