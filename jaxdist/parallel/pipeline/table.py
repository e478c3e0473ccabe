"""A schedule as the numbers that an executor reads: what each rank runs in each tick, from which buffer slots.

Each rank has four ring buffers, whose slots are given out by a linear scan over lifetimes (Poletto and Sarkar 1999):

    acts       input of a chunk              from its arrival to F
    cots       gradient of a chunk's output  from its arrival (last chunk: F, where the head makes it) to B
    residuals  what F keeps for B            from F to B
    stash      what B keeps for W            from B to W

Within a tick: messages arrive, then F, the head, B, W. The buffers of all ranks are as deep as the deepest one. Each
has one more slot, the last, for what is not needed: messages of ranks that had nothing to run, and what such ranks
compute. Residuals and stash are large: there it is a slot that is free in the tick, and one more only where none is.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from heapq import heappop, heappush
from itertools import pairwise
from typing import Generic, NamedTuple, TypeVar

import numpy as np
from jaxtyping import Bool, Int

from jaxdist.parallel.pipeline.schedules import Schedule, Ticks

Flags = Bool[np.ndarray, "ticks stages"]
Numbers = Int[np.ndarray, "ticks stages"]
Segment = tuple[int, int, frozenset[str]]

Flag = TypeVar("Flag")
"""`Flags` in a table; one boolean where a device runs a row of it."""
Number = TypeVar("Number")
"""`Numbers` in a table; one integer where a device runs a row of it."""

MOST_SEGMENTS = 6


class Arrivals(NamedTuple, Generic[Number]):
    """Where the messages go that were sent in the tick before."""

    act: Number
    """Slot of the input that the previous rank has sent."""
    cot: Number
    """Slot of the gradient that the next rank has sent."""


class Forward(NamedTuple, Generic[Flag, Number]):
    """The F that a rank runs."""

    on: Flag
    chunk: Number
    """Virtual index v: the chunk is v * S + rank."""
    micro: Number
    act: Number
    """Slot of the input; of chunk 0, which reads the batch, the last one."""
    res: Number
    """Slot for the residuals."""
    cot: Number
    """Slot for the gradient that the head makes of the last chunk's output."""
    first: Flag
    """Whether it is chunk 0, which begins with the embedding."""
    last: Flag
    """Whether it is the last chunk, which the head follows."""


class Backward(NamedTuple, Generic[Flag, Number]):
    """The B that a rank runs."""

    on: Flag
    chunk: Number
    micro: Number
    cot: Number
    res: Number
    wst: Number
    """Slot for the stash."""
    first: Flag
    """Whether it is chunk 0, which the gradient of the embedding follows."""


class Weight(NamedTuple, Generic[Flag, Number]):
    """The W that a rank runs, where the schedule splits the backward pass."""

    on: Flag
    chunk: Number
    micro: Number
    wst: Number


class Everywhere(NamedTuple, Generic[Flag, Number]):
    """What all ranks run together, each with its part of the vocabulary."""

    on: Flag
    micro: Number


class Rows(NamedTuple, Generic[Flag, Number]):
    """The columns of a table, or one row of them for one rank."""

    arrivals: Arrivals[Number]
    F: Forward[Flag, Number]
    B: Backward[Flag, Number]
    W: Weight[Flag, Number]
    embed: Everywhere[Flag, Number]
    """Runs where chunk 0 runs F."""
    head: Everywhere[Flag, Number]
    """Runs where the last chunk runs F."""
    unembed: Everywhere[Flag, Number]
    """The gradient of the embedding: runs where chunk 0 runs B."""


@dataclass(frozen=True, eq=False)
class Table:
    """A schedule, the depths of its buffers, and its columns: [T, S], or [T] where all ranks have the same.

    A slot that is not used is the last one.
    """

    schedule: Schedule
    acts: int
    cots: int
    residuals: int
    stash: int
    """Slots of each buffer, without the last one, which takes what is not needed."""
    rows: Rows[Flags, Numbers]
    segments: tuple[Segment, ...]
    """(first tick, last tick + 1, slots), in order. See `segments_of`."""

    @property
    def slots(self) -> dict[str, int]:
        """Slots of each buffer, with the one that takes what is not needed, if there is one."""
        return dict(
            acts=self.acts + 1,
            cots=self.cots + 1,
            residuals=self.residuals + self._spare("F", self.rows.F.res, self.residuals),
            stash=self.stash + self._spare("B", self.rows.B.wst, self.stash),
        )

    def _spare(self, kind: str, slots: Numbers, depth: int) -> bool:
        """Return whether ranks that have no unit of this `kind` to run write beyond `depth`."""
        runs = np.concatenate([np.full(end - begin, kind in units) for begin, end, units in self.segments])
        return self.schedule.uniform and bool((slots[runs] == depth).any())


@lru_cache(maxsize=64)
def make_table(schedule: Schedule) -> Table:
    """Return the table of a schedule."""
    S = schedule.stages
    T = schedule.ticks
    F = schedule.forward
    B = schedule.backward
    lives = _lifetimes(schedule)
    slots = {name: _allocate(*life, S) for name, life in lives.items()}
    depths = {name: int(slot.max(initial=-1)) + 1 for name, slot in slots.items()}
    free_residual = _free(lives["residuals"], slots["residuals"], S, T)
    free_stash = _free(lives["stash"], slots["stash"], S, T)

    columns = _Columns(schedule)
    acts = slots["acts"], depths["acts"]
    cots = slots["cots"], depths["cots"]
    residuals = slots["residuals"]
    stash = slots["stash"]
    # Which units have an entry: chunk 0 receives no input, and the last chunk receives no gradient.
    first, last = np.s_[:1], np.s_[-1:]
    not_first, not_last = np.s_[1:], np.s_[:-1]
    rows = Rows(
        Arrivals(
            act=columns.at(F[not_last] + 1, *acts, not_first),
            cot=columns.at(B[not_first] + 1, *cots, not_last),
        ),
        Forward(
            **columns.units(F),
            act=columns.at(F[not_first], *acts, not_first),
            res=columns.at(F, residuals, free_residual),
            cot=columns.at(F[last], *cots, last),
            first=columns.flags(F[first], first),
            last=columns.flags(F[last], last),
        ),
        Backward(
            **columns.units(B),
            cot=columns.at(B, *cots),
            res=columns.at(B, residuals),
            wst=columns.at(B if schedule.split else None, stash, free_stash),
            first=columns.flags(B[first], first),
        ),
        Weight(**columns.units(schedule.weight), wst=columns.at(schedule.weight, stash)),
        embed=_everywhere(F[0], T),
        head=_everywhere(F[-1], T),
        unembed=_everywhere(B[0], T),
    )
    return Table(schedule, **depths, rows=rows, segments=segments_of(schedule))


class _Columns:
    """Spreads a value of every unit, [v*S, M], over ticks and ranks: [T, S]."""

    def __init__(self, schedule: Schedule):
        chunk = np.arange(schedule.chunks)[:, None]
        self.shape = schedule.ticks, schedule.stages
        self.units_shape = schedule.chunks, schedule.micro_batches
        self.rank = chunk % schedule.stages
        self.virtual = chunk // schedule.stages
        self.micro = np.arange(schedule.micro_batches)

    def at(self, ticks: Ticks | None, value: np.ndarray, default: int | Numbers = 0, of: slice = np.s_[:]) -> Numbers:
        """Return the values of the units `of` at their `ticks`, and `default` elsewhere; `ticks` None: no unit."""
        return self._spread(np.full(self.shape, default, np.int32), ticks, value, of)

    def flags(self, ticks: Ticks | None, of: slice = np.s_[:]) -> Flags:
        """Return True at the `ticks` of the units `of`, and False elsewhere."""
        return self._spread(np.zeros(self.shape, bool), ticks, np.array(True), of)

    def units(self, ticks: Ticks | None) -> dict[str, np.ndarray]:
        """Return the columns that F, B and W all have."""
        return dict(on=self.flags(ticks), chunk=self.at(ticks, self.virtual), micro=self.at(ticks, self.micro))

    def _spread(self, column: np.ndarray, ticks: Ticks | None, value: np.ndarray, of: slice) -> np.ndarray:
        if ticks is not None:
            column[ticks, self.rank[of]] = np.broadcast_to(value, self.units_shape)[of]
        return column


def _everywhere(
    ticks: Int[np.ndarray, " micro"], T: int
) -> Everywhere[Bool[np.ndarray, " ticks"], Int[np.ndarray, " ticks"]]:
    """Return what one chunk runs at its `ticks`, for all ranks to know."""
    on = np.zeros(T, bool)
    micro = np.zeros(T, np.int32)
    on[ticks] = True
    micro[ticks] = np.arange(len(ticks))
    return Everywhere(on, micro)


def _lifetimes(schedule: Schedule) -> dict[str, tuple[Ticks, Ticks]]:
    """Return for each buffer the first and last tick of each unit's entry.

    An entry that does not exist ends before it begins. Both ticks count whole: what arrives, F or B writes in a tick
    comes before what B or W still reads in it.
    """
    F = schedule.forward
    B = schedule.backward
    W = schedule.weight
    none = np.full_like(F[:1], -1)
    return {
        "acts": (np.concatenate([none + 1, F[:-1] + 1]), np.concatenate([none, F[1:]])),
        "cots": (np.concatenate([B[1:] + 1, F[-1:]]), B),
        "residuals": (F, B),
        "stash": (B, B - 1 if W is None else W),
    }


def _allocate(start: Ticks, end: Ticks, S: int) -> Ticks:
    """Return the slot of each unit's entry, the lowest that is free on its rank; -1 where there is no entry."""
    slot = np.full_like(start, -1)
    for rank in range(S):
        free: list[int] = []
        busy: list[tuple[int, int]] = []
        used = 0
        units = [(start[g, m], end[g, m], g, m) for g in range(rank, len(start), S) for m in range(start.shape[1])]
        for begins, ends, g, m in sorted(units):
            if ends < begins:
                continue
            while busy and busy[0][0] < begins:
                heappush(free, heappop(busy)[1])
            if not free:
                heappush(free, used)
                used += 1
            slot[g, m] = heappop(free)
            heappush(busy, (ends, slot[g, m]))
    return slot


def _free(life: tuple[Ticks, Ticks], slot: Ticks, S: int, T: int) -> Numbers:
    """Return [T, S]: the first slot in which nothing lives in the tick; one more than there are where all are taken."""
    busy = np.zeros((T, S, int(slot.max(initial=-1)) + 2), bool)
    for (g, m), at in np.ndenumerate(slot):
        if at >= 0:
            busy[life[0][g, m] : life[1][g, m] + 1, g % S, at] = True
    return busy.argmin(-1).astype(np.int32)


def segments_of(schedule: Schedule) -> tuple[Segment, ...]:
    """Return runs of ticks in which the same slots are occupied on any rank: "F", "H" (the head), "B", "W".

    A loop with its own program is compiled for each, so there are at most MOST_SEGMENTS: a slot that comes and goes
    counts as occupied from its first tick to its last. F, B and W of uniform schedules never come and go. The head does
    in interleaved ones: a rank takes a group through chunk after chunk, and only the last chunk of them has a head. A
    program that runs the head wherever "H" is runs it v*M times, not M; `head.on` is the same on all ranks, so that it
    may branch on it.
    """
    units = {"F": schedule.forward, "H": schedule.forward[-1], **schedule.units}
    span = {slot: (int(ticks.min()), int(ticks.max()) + 1) for slot, ticks in units.items()}
    edges = sorted({edge for ends in span.values() for edge in ends})
    segments = []
    for begin, end in pairwise(edges):
        occupied = frozenset(slot for slot, (first, stop) in span.items() if first <= begin < stop)
        segments.append((begin, end, occupied))
    assert len(segments) <= MOST_SEGMENTS, segments
    return tuple(segments)
