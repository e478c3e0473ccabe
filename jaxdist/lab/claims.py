"""The lecture's claims, `claims.csv`, joined with the checks that measure them.

A claim that no module checks is reported as "not checked", and has not passed.
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

TOPICS = ("memory", "compute", "optimizer", "pipelines", "traffic", "tensor", "experts", "long_rows", "data", "scaling")
MODULES = (
    "jaxdist.lab.reductions.checks",
    "jaxdist.lab.slow_networks.checks",
    *(f"jaxdist.lab.checks.{topic}" for topic in TOPICS),
)
"""Each module has `CHECKS`, a dict from a claim's id to its `Check`."""

DEVICES = 8
"""The most CPU devices that a claim needs; they are made at the start, since a process can split its CPU only once."""

WRONG = "shown as wrong"
"""Words in the notes of a claim that corrects the lecture."""


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

    @property
    def corrects(self) -> bool:
        """Whether the lecture says otherwise, and is wrong."""
        return WRONG in self.notes


@dataclass(frozen=True)
class Report:
    """A claim and what was measured of it."""

    claim: Claim
    outcome: Outcome | None
    """None if the claim was not checked."""
    reason: str = ""
    """Why it was not checked."""

    @property
    def passed(self) -> bool:
        """Whether the claim was checked and holds."""
        return self.outcome is not None and self.outcome.passed

    @property
    def status(self) -> str:
        """`passed`, `FAILED` or `not checked`.

        Only a failure is in capitals, so that it is found in a long list.
        """
        if self.outcome is None:
            return "not checked"
        if self.outcome.passed:
            return "passed"
        return "FAILED"

    @property
    def value(self) -> str:
        """The measured value as text."""
        if self.outcome is None:
            return ""
        value = self.outcome.value
        if isinstance(value, bool):
            return str(value).lower()
        if isinstance(value, float):
            return f"{value:.5g}"
        return str(value)

    def json(self) -> dict[str, Any]:
        """Return id, verdict, measured and expected value."""
        value = None if self.outcome is None else self.outcome.value
        return {"id": self.claim.id, "passed": self.passed, "value": value, "expected": plain(self.claim.expected)}

    def lines(self) -> list[str]:
        """Return the report as lines of text."""
        claim = self.claim
        lines = [f"{claim.id} ({claim.topic}): {claim.claim}", f"expected  {claim.wanted}"]
        if self.outcome is None:
            return [*lines, f"NOT CHECKED: {self.reason}"]
        lines += [f"value     {self.value}", "", *self.outcome.lines]
        if claim.corrects:
            lines.append(f"Correction: {claim.notes}.")
        lines.append("PASSED" if self.passed else "NOT AS CLAIMED")
        return lines


def plain(text: str) -> float | bool | str:
    """Return an expected value of the table as JSON has it."""
    if text in ("true", "false"):
        return text == "true"
    try:
        return float(text)
    except ValueError:
        return text


def within(value: float, expected: str, tolerance: str, of: float | None = None) -> bool:
    """Return whether a value is as near to the expected one as the table asks.

    A tolerance is `exact`, a share (`1%`) of the expected value or of another value `of`, or a number (`1e-5`). The
    words after it, as in `1% at N=1024` or `2% of the loss`, say with which settings, or of what.
    """
    target = float(expected)
    allowed = tolerance.split()[0]
    if allowed == "exact":
        return value == target
    if allowed.endswith("%"):
        whole = target if of is None else of
        return abs(value - target) <= float(allowed[:-1]) / 100 * abs(whole)
    return abs(value - target) <= float(allowed)


@cache
def claims() -> dict[str, Claim]:
    """Return every claim by its id, in the order of the table."""
    with TABLE.open(newline="") as file:
        return {row["id"]: Claim(**row) for row in csv.DictReader(file)}


def topics() -> Iterator[tuple[str, list[Claim]]]:
    """Yield each topic with its claims, in the order in which the table first names the topics."""
    # The table may come back to a topic; its claims belong together all the same.
    order = list(dict.fromkeys(claim.topic for claim in claims().values()))
    ordered = sorted(claims().values(), key=lambda claim: order.index(claim.topic))
    for topic, group in groupby(ordered, key=lambda claim: claim.topic):
        yield topic, list(group)


@cache
def checks() -> dict[str, Check]:
    """Import all checks, and JAX with them; returns them by the id of their claim."""
    found: dict[str, Check] = {}
    for module in MODULES:
        found |= importlib.import_module(module).CHECKS
    unknown = found.keys() - claims().keys()
    if unknown:
        raise ValueError(f"checks of claims that the table does not have: {', '.join(sorted(unknown))}")
    return found


def measure(claim: Claim, **settings: Any) -> Report:
    """Measure a claim; `settings` replace the defaults of its check."""
    check = checks().get(claim.id)
    if check is None:
        return Report(claim, None, "nothing here measures it yet")
    try:
        return Report(claim, check.measure(claim.expected, claim.tolerance, **settings))
    except RequestError as error:
        # This machine lacks something that the check needs.
        return Report(claim, None, "; ".join(error.problems))
