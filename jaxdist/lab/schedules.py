"""`python -m jaxdist.lab schedules`: pipeline schedules drawn, and their bubble and memory beside the formulas.

Nothing runs on a device: units are counted, one by one, and must come out as the closed formulas say, exactly.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import chain
from typing import Any

from jaxdist.config import RequestError
from jaxdist.parallel.pipeline import timeline
from jaxdist.parallel.pipeline.formulas import free_bubble, in_flight, lockstep_bubble
from jaxdist.parallel.pipeline.schedules import ONE_CHUNK, SCHEDULES, Schedule, make
from jaxdist.parallel.pipeline.simulate import Bubble, Times, bubble, peak_in_flight
from jaxdist.parallel.pipeline.table import Table, make_table
from jaxdist.parallel.pipeline.validate import check_schedule, check_table
from jaxdist.planning.tables import table

TIMES = Times(Fraction(1), Fraction(1), Fraction(1))
"""As in figure 1 of Qi et al. 2024: a backward pass takes twice as long as a forward pass, half of it for the weights.
Fractions, so that what is equal is equal."""


MOST_UNITS = 2**13
"""Forward passes that are counted one by one, and drawn, in seconds."""


@dataclass(frozen=True)
class Look:
    """A schedule looked at."""

    schedule: Schedule
    wrong: str
    """What the checks of schedule and table have found; empty when nothing."""

    @classmethod
    def at(cls, schedule: Schedule) -> Look:
        try:
            check_schedule(schedule)
            check_table(make_table(schedule))
        except AssertionError as error:
            return cls(schedule, str(error))
        return cls(schedule, "")

    @property
    def request(self) -> tuple[str, int, int, int]:
        return self.schedule.name, self.schedule.stages, self.schedule.micro_batches, self.schedule.virtual

    @cached_property
    def table(self) -> Table:
        return make_table(self.schedule)

    @cached_property
    def cost(self) -> Bubble:
        return bubble(self.schedule, TIMES)

    @property
    def counted(self) -> dict[str, Any]:
        """Bubbles in forward passes of a stage."""
        return {
            "bubble": self.cost.lockstep - self.cost.work,
            "free_bubble": self.cost.free - self.cost.work,
            "in_flight": peak_in_flight(self.schedule),
        }

    @property
    def formulas(self) -> dict[str, Any]:
        """The same; what no formula is known for is left out."""
        known = {
            "bubble": lockstep_bubble(*self.request, TIMES),
            "free_bubble": free_bubble(*self.request, TIMES),
            "in_flight": in_flight(*self.request),
        }
        return {name: value for name, value in known.items() if value is not None}

    @property
    def passed(self) -> bool:
        return not self.wrong and all(self.counted[name] == value for name, value in self.formulas.items())

    def json(self) -> dict[str, Any]:
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
    return {name: value if isinstance(value, list) else float(value) for name, value in numbers.items()}


@dataclass(frozen=True)
class Result:
    looks: list[Look]

    @property
    def passed(self) -> bool:
        return all(look.passed for look in self.looks)

    def json(self) -> dict[str, Any]:
        first = self.looks[0].schedule
        return {
            "id": "schedules",
            "passed": self.passed,
            "value": {look.schedule.name: _plain(look.counted) for look in self.looks},
            "expected": {look.schedule.name: _plain(look.formulas) for look in self.looks},
            "stages": first.stages,
            "micro_batches": first.micro_batches,
            "schedules": [look.json() for look in self.looks],
        }

    def lines(self) -> list[str]:
        first = self.looks[0].schedule
        head = ("schedule", "virtual", "ticks", "bubble", "of the time", "free", "of the time", "in flight by rank")
        rows = [
            (
                look.schedule.name, str(look.schedule.virtual), str(look.schedule.ticks),
                f"{float(look.counted['bubble']):g}", f"{float(look.cost.share):.1%}",
                f"{float(look.counted['free_bubble']):g}", f"{float(look.cost.free_share):.1%}",
                " ".join(map(str, look.counted["in_flight"])),
            )
            for look in self.looks
        ]  # fmt: skip
        drawn = [("", look.schedule.name, *timeline.text(look.schedule).splitlines()) for look in self.looks]
        return [
            f"{first.stages} stages, {first.micro_batches} micro-batches. A stage takes 1 for F, its forward pass, and",
            "2 for B, its backward pass; zb-h1 and zb-u split it: B is for its input, W for its weights, 1 each.",
            "bubble: how long a rank waits if in every tick all wait for the slowest. free: if each waits for what it",
            "needs only. in flight: its chunks times micro-batches that have begun F and not ended B, or W.",
            "",
            *table([head, *rows]),
            *chain.from_iterable(drawn),
            "",
            *self._verdict(),
        ]

    def _verdict(self) -> list[str]:
        if self.passed:
            return ["PASSED: every unit finds what it needs; bubbles and what is in flight are as the formulas say."]
        told = [
            f"{look.schedule.name}: {look.wrong or f'counted {_plain(look.counted)}, formulas {_plain(look.formulas)}'}"
            for look in self.looks
            if not look.passed
        ]
        return ["NOT AS CLAIMED:", *told]


def measure(stages: int, microbatches: int, virtual_stages: int, schedule: str, picture: str) -> Result:
    """Look at one schedule, or at all. `virtual_stages` 0 is 2 for interleaved, 1 for the others."""
    units = stages * microbatches * max(virtual_stages, 1)
    if units > MOST_UNITS:
        chunks = f" x --virtual-stages {virtual_stages}" * (virtual_stages > 1)
        raise RequestError(
            f"--stages {stages} x --microbatches {microbatches}{chunks} are {units} forward passes; at most "
            f"{MOST_UNITS} are counted and drawn, so lower one of them"
        )
    try:
        if schedule == "all":
            found = [make(name, stages, microbatches, _virtual(name, virtual_stages, True)) for name in SCHEDULES]
        else:
            found = [make(schedule, stages, microbatches, _virtual(schedule, virtual_stages, False))]
    except ValueError as error:
        raise RequestError(str(error)) from None
    if picture:
        timeline.picture(found, picture)
    return Result([Look.at(one) for one in found])


def _virtual(name: str, asked: int, among_others: bool) -> int:
    """One of all that cannot have the chunks that were asked for has one: it is there to compare with."""
    if name in ONE_CHUNK and among_others:
        return 1
    return asked or (2 if name == "interleaved" else 1)
