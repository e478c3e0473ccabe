"""The lecture's claims, `claims.csv`, joined with the checks that measure them.

A claim that no module checks is told as "not checked": it has not passed.
"""

from __future__ import annotations

import csv
import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxdist.config import RequestError

if TYPE_CHECKING:
    from jaxdist.lab.claim import Check, Outcome

TABLE = Path(__file__).parent / "claims.csv"

TOPICS = ("memory", "compute", "optimizer", "pipelines", "traffic", "tensor", "data", "scaling")
MODULES = ("jaxdist.lab.reductions", *(f"jaxdist.lab.checks.{topic}" for topic in TOPICS))
"""Each has `CHECKS`, from a claim's id to its `Check`."""

DEVICES = 8
"""CPU devices that all claims together need: a process can split its CPU once."""

WRONG = "shown as wrong"
"""In the notes of a claim that corrects the lecture."""


@dataclass(frozen=True)
class Claim:
    """A row of the table, as it is written there."""

    id: str
    topic: str
    claim: str
    expected: str
    unit: str
    tolerance: str
    notes: str

    @property
    def command(self) -> str:
        return f"python -m jaxdist.lab {self.id}"

    @property
    def wanted(self) -> str:
        """`16.6 (GB), within 1%`."""
        unit = "" if self.unit == "-" else f" ({self.unit})"
        how = "exactly" if self.tolerance == "exact" else f"within {self.tolerance}"
        return f"{self.expected}{unit}, {how}"

    @property
    def corrects(self) -> bool:
        """Whether the lecture says otherwise, and is wrong."""
        return WRONG in self.notes


@dataclass(frozen=True)
class Told:
    """A claim after it was looked at."""

    claim: Claim
    outcome: Outcome | None
    """None: nothing checks it here."""
    reason: str = ""
    """Why not."""

    @property
    def passed(self) -> bool:
        return self.outcome is not None and self.outcome.passed

    @property
    def status(self) -> str:
        return "not checked" if self.outcome is None else "passed" if self.passed else "FAILED"

    @property
    def value(self) -> str:
        """For a person."""
        if self.outcome is None:
            return ""
        value = self.outcome.value
        if isinstance(value, bool):
            return str(value).lower()
        return f"{value:.5g}" if isinstance(value, float) else str(value)

    def json(self) -> dict[str, Any]:
        claim = self.claim
        value = None if self.outcome is None else self.outcome.value
        return {"id": claim.id, "passed": self.passed, "value": value, "expected": plain(claim.expected)}

    def lines(self) -> list[str]:
        claim = self.claim
        head = [f"{claim.id} ({claim.topic}): {claim.claim}", f"expected  {claim.wanted}"]
        if self.outcome is None:
            return [*head, f"NOT CHECKED: {self.reason}"]
        wrong = [f"The lecture is wrong here: {claim.notes}."] if claim.corrects else []
        verdict = "PASSED" if self.passed else "NOT AS CLAIMED"
        return [*head, f"value     {self.value}", "", *self.outcome.lines, *wrong, verdict]


def plain(text: str) -> float | bool | str:
    """What is expected, as JSON has it."""
    if text in ("true", "false"):
        return text == "true"
    try:
        return float(text)
    except ValueError:
        return text


def within(value: float, expected: str, tolerance: str) -> bool:
    """Whether they are as near as the table asks: `exact`, a part of what is expected (`1%`), or a number (`1e-5`).

    What follows in the tolerance, as in `1% at N=1024`, says with which settings.
    """
    target, allowed = float(expected), tolerance.split()[0]
    if allowed == "exact":
        return value == target
    if allowed.endswith("%"):
        return abs(value - target) <= float(allowed[:-1]) / 100 * abs(target)
    return abs(value - target) <= float(allowed)


@cache
def claims() -> dict[str, Claim]:
    """Every claim by its id, as the table orders them."""
    with TABLE.open(newline="") as file:
        return {row["id"]: Claim(**row) for row in csv.DictReader(file)}


def topics() -> Iterator[tuple[str, list[Claim]]]:
    """The claims topic by topic; one that the table comes back to stands where it has it first."""
    order = list(dict.fromkeys(claim.topic for claim in claims().values()))
    ordered = sorted(claims().values(), key=lambda claim: order.index(claim.topic))
    for topic, group in groupby(ordered, key=lambda claim: claim.topic):
        yield topic, list(group)


@cache
def checks() -> dict[str, Check]:
    """Every check by the id of its claim. Imports JAX."""
    found: dict[str, Check] = {}
    for module in MODULES:
        found |= importlib.import_module(module).CHECKS
    if unknown := found.keys() - claims().keys():
        raise ValueError(f"checks of claims that the table does not have: {', '.join(sorted(unknown))}")
    return found


def look(claim: Claim, **settings: Any) -> Told:
    """Measure it, with other settings than its own where they are given."""
    check = checks().get(claim.id)
    if check is None:
        return Told(claim, None, "nothing here measures it yet")
    try:
        return Told(claim, check.measure(claim.expected, claim.tolerance, **settings))
    except RequestError as error:  # of what this machine lacks
        return Told(claim, None, "; ".join(error.problems))
