"""`python -m jaxdist.lab schedules`: draw pipeline schedules, and compare bubble and memory with the formulas.

Nothing runs on a device: units are counted one by one, and must equal the closed formulas exactly.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any

from jaxdist.config import RequestError
from jaxdist.config.pipeline import SCHEDULES as TRAITS
from jaxdist.config.pipeline import Traits
from jaxdist.output.tables import table
from jaxdist.parallel.pipeline import timeline
from jaxdist.parallel.pipeline.formulas import free_bubble, in_flight, lockstep_bubble
from jaxdist.parallel.pipeline.schedules import SCHEDULES, Schedule, make
from jaxdist.parallel.pipeline.simulate import Bubble, Times, bubble, peak_in_flight
from jaxdist.parallel.pipeline.table import Table, make_table
from jaxdist.parallel.pipeline.validate import check_schedule, check_table

# As in figure 1 of Qi et al. 2024: a backward pass takes twice as long as a forward pass, half of it for the weights.
# They are fractions, so that sums are exact.
TIMES = Times(Fraction(1), Fraction(1), Fraction(1))

MOST_UNITS = 2**13
"""The most forward passes that are counted one by one and drawn; that takes seconds."""


@dataclass(frozen=True)
class ScheduleReport:
    """What was counted of a schedule."""

    schedule: Schedule
    wrong: str
    """What the checks of schedule and table have found; empty if nothing."""

    @classmethod
    def at(cls, schedule: Schedule) -> ScheduleReport:
        """Check a schedule and its table."""
        try:
            check_schedule(schedule)
            check_table(make_table(schedule))
        except AssertionError as error:
            return cls(schedule, str(error))
        return cls(schedule, "")

    @property
    def request(self) -> tuple[str, int, int, int]:
        """Name, stages, micro-batches and virtual stages of the schedule."""
        return self.schedule.name, self.schedule.stages, self.schedule.micro_batches, self.schedule.virtual

    @cached_property
    def table(self) -> Table:
        """The table that the executor runs."""
        return make_table(self.schedule)

    @cached_property
    def cost(self) -> Bubble:
        """The simulated times of the schedule."""
        return bubble(self.schedule, TIMES)

    @property
    def counted(self) -> dict[str, Any]:
        """Bubbles, in forward passes of a stage, and micro-batches in flight, as counted."""
        return {
            "bubble": self.cost.lockstep - self.cost.work,
            "free_bubble": self.cost.free - self.cost.work,
            "in_flight": peak_in_flight(self.schedule),
        }

    @property
    def formulas(self) -> dict[str, Any]:
        """The same by the formulas; what has no known formula is left out."""
        known = {
            "bubble": lockstep_bubble(*self.request, TIMES),
            "free_bubble": free_bubble(*self.request, TIMES),
            "in_flight": in_flight(*self.request),
        }
        return {name: value for name, value in known.items() if value is not None}

    @property
    def passed(self) -> bool:
        """Whether the schedule is valid, and the counts equal the formulas."""
        return not self.wrong and all(self.counted[name] == value for name, value in self.formulas.items())

    def json(self) -> dict[str, Any]:
        """Return the report as a JSON object."""
        return {
            "name": self.schedule.name,
            "virtual_stages": self.schedule.virtual,
            "passed": self.passed,
            "wrong": self.wrong,
            "ticks": self.schedule.ticks,
            "bubble_share": float(self.cost.share),
            "free_bubble_share": float(self.cost.free_share),
            "counted": _plain(self.counted),
            "formulas": _plain(self.formulas),
            "slots": {name: getattr(self.table, name) for name in ("acts", "cots", "residuals", "stash")},
            "segments": [[begin, end, "".join(sorted(slots))] for begin, end, slots in self.table.segments],
            "timeline": timeline.text(self.schedule).splitlines(),
        }


def _plain(numbers: dict[str, Any]) -> dict[str, Any]:
    """Return fractions as floats, for JSON; lists stay."""
    return {name: value if isinstance(value, list) else float(value) for name, value in numbers.items()}


@dataclass(frozen=True)
class Result:
    """The reports of all schedules that were requested."""

    reports: list[ScheduleReport]

    @property
    def passed(self) -> bool:
        """Whether every schedule is valid and as the formulas say."""
        return all(report.passed for report in self.reports)

    def json(self) -> dict[str, Any]:
        """Return the result as a JSON object."""
        first = self.reports[0].schedule
        return {
            "id": "schedules",
            "passed": self.passed,
            "value": {report.schedule.name: _plain(report.counted) for report in self.reports},
            "expected": {report.schedule.name: _plain(report.formulas) for report in self.reports},
            "stages": first.stages,
            "micro_batches": first.micro_batches,
            "schedules": [report.json() for report in self.reports],
        }

    def lines(self) -> list[str]:
        """Return the legend, a table, and the timelines, in at most 120 columns."""
        first = self.reports[0].schedule
        rows = [("schedule", "virtual", "ticks", "bubble", "of the time", "free", "of the time", "in flight by rank")]
        rows += [_row(report) for report in self.reports]
        lines = [
            f"{first.stages} stages, {first.micro_batches} micro-batches. A stage takes 1 for F, its forward pass, and",
            "2 for B, its backward pass; zb-h1 and zb-u split it: B is for its input, W for its weights, 1 each.",
            "bubble: how long a rank waits if in every tick all wait for the slowest. free: if each waits for what it",
            "needs only. in flight: its chunks times micro-batches that have begun F and not ended B, or W.",
            "",
            *table(rows),
        ]
        for report in self.reports:
            lines += ["", report.schedule.name, *timeline.text(report.schedule).splitlines()]
        return [*lines, "", *self._verdict()]

    def _verdict(self) -> list[str]:
        if self.passed:
            return ["PASSED: every unit finds what it needs; bubbles and what is in flight are as the formulas say."]
        lines = ["NOT AS CLAIMED:"]
        for report in self.reports:
            if report.passed:
                continue
            reason = report.wrong
            if not reason:
                reason = f"counted {_plain(report.counted)}, formulas {_plain(report.formulas)}"
            lines.append(f"{report.schedule.name}: {reason}")
        return lines


def _row(report: ScheduleReport) -> tuple[str, ...]:
    counted = report.counted
    cost = report.cost
    return (
        report.schedule.name,
        str(report.schedule.virtual),
        str(report.schedule.ticks),
        f"{float(counted['bubble']):g}",
        f"{float(cost.share):.1%}",
        f"{float(counted['free_bubble']):g}",
        f"{float(cost.free_share):.1%}",
        " ".join(map(str, counted["in_flight"])),
    )


def measure(stages: int, microbatches: int, virtual_stages: int, schedule: str, picture: str) -> Result:
    """Count one schedule, or all; `virtual_stages` 0 means 2 for interleaved, 1 for the others."""
    # Checked before any schedule is made, which would take minutes.
    units = stages * microbatches * max(virtual_stages, 1)
    if units > MOST_UNITS:
        chunks = ""
        if virtual_stages > 1:
            chunks = f" x --virtual-stages {virtual_stages}"
        raise RequestError(
            f"--stages {stages} x --microbatches {microbatches}{chunks} are {units} forward passes; at most "
            f"{MOST_UNITS} are counted and drawn, so lower one of them"
        )
    names = list(SCHEDULES) if schedule == "all" else [schedule]
    try:
        schedules = [make(name, stages, microbatches, _virtual(name, virtual_stages, len(names))) for name in names]
    except ValueError as error:
        raise RequestError(str(error)) from None
    if picture:
        timeline.picture(schedules, picture)
    return Result([ScheduleReport.at(one) for one in schedules])


def _virtual(name: str, requested: int, schedules: int) -> int:
    """Return the virtual stages that a schedule runs with."""
    # A name without a row is refused where the schedule is made.
    traits = TRAITS.get(name, Traits())
    if schedules > 1 and not traits.several:
        # It cannot have the requested chunks, but it is there to compare with.
        return 1
    return requested or traits.chunks
