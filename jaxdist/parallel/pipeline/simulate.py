"""What a schedule costs, counted unit by unit: its time, and how many micro-batches are in flight.

Times are those of a stage and a micro-batch; a chunk takes 1/v of them. The bubble is the time that a rank waits: the
time of the schedule less that of a rank's own work, M(F+B). Papers give it as a share of either: (S-1)/(M+S-1) of the
whole or (S-1)/M of the work, for GPipe. `share` here is of the whole.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jaxdist.parallel.pipeline.schedules import Schedule


@dataclass(frozen=True)
class Times:
    """Seconds, or any unit, of a stage and a micro-batch."""

    F: float = 1
    I: float = 1  # noqa: E741
    """The gradient with respect to the input; the recomputation of F, where there is one, is in it."""
    W: float = 1
    """The gradient with respect to the weights."""

    @property
    def B(self) -> float:
        """The whole backward pass."""
        return self.I + self.W


EQUAL = Times()


@dataclass(frozen=True)
class Bubble:
    work: float
    """What each rank computes: M(F+B)."""
    lockstep: float
    """Time of the schedule where every tick waits for the slowest rank: one compiled program."""
    free: float
    """Time where a rank waits for what it needs only: a program for each rank."""

    @property
    def share(self) -> float:
        """Of the time in lockstep, how much a rank waits."""
        return 1 - self.work / self.lockstep

    @property
    def free_share(self) -> float:
        return 1 - self.work / self.free


def bubble(schedule: Schedule, times: Times = EQUAL) -> Bubble:
    work = schedule.micro_batches * (times.F + times.B)
    return Bubble(work, lockstep_time(schedule, times), free_time(schedule, times))


def costs(schedule: Schedule, times: Times) -> dict[str, float]:
    """Kind of unit -> time of a chunk and a micro-batch."""
    whole = {"F": times.F, "B": times.I if schedule.split else times.B, "W": times.W}
    return {kind: whole[kind] / schedule.virtual for kind in schedule.units}


@dataclass(frozen=True)
class Column:
    """What all ranks do at a time: a slot of a tick, or a whole tick where each rank runs its own unit in it."""

    tick: int
    kinds: frozenset[str]
    start: float
    length: float


def columns(schedule: Schedule, times: Times) -> list[Column]:
    """The schedule in lockstep, in order of time.

    Uniform: every slot that any rank occupies is run by all, one after another. Else a tick lasts as the slowest unit.
    """
    cost, result, now = costs(schedule, times), [], 0
    occupied = {kind: set(ticks.ravel().tolist()) for kind, ticks in schedule.units.items()}
    for tick in range(schedule.ticks):
        kinds = [kind for kind in occupied if tick in occupied[kind]]
        for together in ({kind} for kind in kinds) if schedule.uniform else [set(kinds)] if kinds else []:
            length = max(cost[kind] for kind in together)
            result.append(Column(tick, frozenset(together), now, length))
            now += length
    return result


def lockstep_time(schedule: Schedule, times: Times) -> float:
    return sum(column.length for column in columns(schedule, times))


def free_time(schedule: Schedule, times: Times) -> float:
    """Each rank runs its units in their order, each as soon as what it needs is there. Messages take no time."""
    S, last, cost = schedule.stages, schedule.chunks - 1, costs(schedule, times)
    kinds = list(cost)
    units = [
        (int(tick), place, g, m)
        for place, kind in enumerate(kinds)
        for (g, m), tick in np.ndenumerate(schedule.units[kind])
    ]
    clock, ended = [0] * S, {}
    for _, place, g, m in sorted(units):  # what a unit needs is in an earlier tick, or in an earlier slot of its own
        kind = kinds[place]
        needs = {"F": ("F", g - 1, m), "B": ("F", g, m) if g == last else ("B", g + 1, m), "W": ("B", g, m)}[kind]
        clock[g % S] = ended[kind, g, m] = max(clock[g % S], ended.get(needs, 0)) + cost[kind]
    return max(clock)


def peak_in_flight(schedule: Schedule) -> list[int]:
    """Rank -> the most chunks times micro-batches that have begun F and not ended B, or W where there is one."""
    S, peaks = schedule.stages, []
    for rank in range(S):
        change = np.zeros(schedule.ticks + 1, int)
        np.add.at(change, schedule.forward[rank::S].ravel(), 1)
        np.add.at(change, schedule.last[rank::S].ravel() + 1, -1)
        peaks.append(int(change.cumsum().max()))
    return peaks
