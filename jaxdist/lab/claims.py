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
from typing import Any

from jaxdist.config import RequestError
from jaxdist.lab.claim import Check, Claim, Outcome

TABLE = Path(__file__).parent / "claims.csv"

TOPICS = (
    *("memory", "compute", "optimizer", "pipelines", "drawn_pipelines", "traffic", "tensor"),
    *(
        "experts",
        "long_rows",
        "data",
        "scaling",
        "scripts",
        "launching",
        "planned",
        "primitives",
        "at_rest",
        "overlapped",
    ),
)
MODULES = (
    "jaxdist.lab.reductions.checks",
    "jaxdist.lab.slow_networks.checks",
    *(f"jaxdist.lab.checks.{topic}" for topic in TOPICS),
)
"""Each module has `CHECKS`, a dict from a claim's id to its `Check`."""

DEVICES = 8
"""The most CPU devices that a claim needs; they are made at the start, since a process can split its CPU only once."""


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
        """Return id, verdict, label, value and expected value."""
        value = None if self.outcome is None else self.outcome.value
        return {
            "id": self.claim.id,
            "passed": self.passed,
            "label": self.claim.label,
            "value": value,
            "expected": plain(self.claim.expected),
        }

    def lines(self) -> list[str]:
        """Return the report as lines of text."""
        claim = self.claim
        lines = [f"{claim.id} ({claim.topic}): {claim.claim}", f"expected  {claim.wanted}"]
        if self.outcome is None:
            return [*lines, f"NOT CHECKED: {self.reason}"]
        lines += [f"{claim.label:<10}{self.value}", "", *self.outcome.lines]
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
        return Report(claim, check.measure(claim, **settings))
    except RequestError as error:
        # This machine lacks something that the check needs.
        return Report(claim, None, "; ".join(error.problems))
