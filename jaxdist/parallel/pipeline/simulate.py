"""What a schedule costs, counted unit by unit: its time, and how many micro-batches are in flight.

Times are for a stage and a micro-batch; a chunk takes 1/v of them. The bubble is the time that a rank waits: the
time of the schedule less the time of a rank's own work, M(F+B). Papers give it as a share of either: for GPipe,
(S-1)/(M+S-1) of the whole or (S-1)/M of the work. `share` here is of the whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from jaxdist.parallel.pipeline.schedules import Schedule


@dataclass(frozen=True)
class Times:
    """Seconds, or any unit, of a stage and a micro-batch."""

    F: float = 1
    """The forward pass."""
    I: float = 1  # noqa: E741
    """The gradient with respect to the input, and the recomputation of F, where there is one."""
    W: float = 1
    """The gradient with respect to the weights."""

    @property
    def B(self) -> float:
        """The whole backward pass."""
        return self.I + self.W

    def times(self, count: float) -> Times:
        """Return these times, each of them `count` times."""
        return Times(count * self.F, count * self.I, count * self.W)

    def plus(self, others: Times) -> Times:
        """Return these times and `others`, one after the other."""
        return Times(self.F + others.F, self.I + others.I, self.W + others.W)


EQUAL = Times()


@dataclass(frozen=True)
class Bubble:
    """The time of a schedule, and how much of it a rank waits."""

    work: float
    """What each rank computes: M(F+B)."""
    lockstep: float
    """Time of the schedule where every tick waits for the slowest rank: one compiled program."""
    free: float
    """Time where a rank waits only for what it needs: a program for each rank."""

    @property
    def share(self) -> float:
        """The share of the time in lockstep that a rank waits."""
        return 1 - self.work / self.lockstep

    @property
    def free_share(self) -> float:
        """The share of the time that a rank waits where it waits only for what it needs."""
        return 1 - self.work / self.free


def bubble(schedule: Schedule, times: Times = EQUAL) -> Bubble:
    """Return the bubble of a schedule."""
    work = schedule.micro_batches * (times.F + times.B)
    return Bubble(work, lockstep_time(schedule, times), free_time(schedule, times))


def costs(schedule: Schedule, times: Times) -> dict[str, float]:
    """Return for each kind of unit the time of a chunk and a micro-batch."""
    of_stage = {"F": times.F, "B": times.I if schedule.split else times.B, "W": times.W}
    return {kind: of_stage[kind] / schedule.virtual for kind in schedule.units}


@dataclass(frozen=True)
class Column:
    """What all ranks do at a time: a slot of a tick, or a whole tick where each rank runs its own unit in it."""

    tick: int
    kinds: frozenset[str]
    start: float
    length: float


def columns(schedule: Schedule, times: Times) -> list[Column]:
    """Return the schedule in lockstep, in order of time.

    In a uniform schedule, every slot that any rank occupies is run by all, one after another. In others a tick lasts as
    long as its slowest unit.
    """
    result = []
    now: float = 0  # an integer, so that fractions stay exact
    for tick, kinds, length in _in_lockstep(schedule, times):
        result.append(Column(tick, kinds, now, length))
        now += length
    return result


def _in_lockstep(schedule: Schedule, times: Times) -> Iterator[tuple[int, frozenset[str], float]]:
    """Yield the tick, the kinds and the length of each column."""
    cost = costs(schedule, times)
    for tick, kinds in enumerate(schedule.occupied):
        # In a uniform schedule all ranks run every slot, so slots follow one another; else each runs its own at once.
        groups = [{kind} for kind in kinds]
        if kinds and not schedule.uniform:
            groups = [set(kinds)]
        for together in groups:
            yield tick, frozenset(together), max(cost[kind] for kind in together)


def lockstep_time(schedule: Schedule, times: Times) -> float:
    """Return the time of a schedule where every tick waits for the slowest rank."""
    return sum(length for _, _, length in _in_lockstep(schedule, times))


def free_time(schedule: Schedule, times: Times) -> float:
    """Return the time where each rank runs its units in their order, each as soon as what it needs is there.

    Messages take no time.
    """
    S = schedule.stages
    cost = costs(schedule, times)
    kinds = list(cost)
    units = []
    for place, kind in enumerate(kinds):
        for (g, m), tick in np.ndenumerate(schedule.units[kind]):
            units.append((int(tick), place, g, m))
    clock: list[float] = [0] * S
    ended: dict[tuple[str, int, int], float] = {}
    # In this order, because what a unit needs is in an earlier tick, or in an earlier slot of its own.
    for _, place, g, m in sorted(units):
        kind = kinds[place]
        ready = ended.get(_needed(schedule, kind, g, m), 0)
        clock[g % S] = max(clock[g % S], ready) + cost[kind]
        ended[kind, g, m] = clock[g % S]
    return max(clock)


def _needed(schedule: Schedule, kind: str, g: int, m: int) -> tuple[str, int, int]:
    """Return the unit that this one waits for; there is none such for F of chunk 0."""
    if kind == "F":
        return "F", g - 1, m
    if kind == "W":
        return "B", g, m
    if g == schedule.chunks - 1:
        return "F", g, m
    return "B", g + 1, m


def peak_in_flight(schedule: Schedule) -> list[int]:
    """Return for each rank the most chunks times micro-batches in flight: from F to the end of B, or of W if split."""
    peaks = []
    for rank in range(schedule.stages):
        # +1 where F begins, -1 after the last tick: the running sum is what is in flight.
        change = np.zeros(schedule.ticks + 1, int)
        np.add.at(change, schedule.forward[rank :: schedule.stages].ravel(), 1)
        np.add.at(change, schedule.last[rank :: schedule.stages].ravel() + 1, -1)
        peaks.append(int(np.max(change.cumsum())))
    return peaks
