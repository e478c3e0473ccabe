"""A schedule as the numbers that an executor reads: what each rank runs in each tick, from which buffer slots.

Four ring buffers on each rank, with slots given by a linear scan over lifetimes (Poletto and Sarkar 1999):

    acts       input of a chunk              from its arrival to F
    cots       gradient of a chunk's output  from its arrival (last chunk: F, where the head makes it) to B
    residuals  what F keeps for B            from F to B
    stash      what B keeps for W            from B to W

Within a tick: messages arrive, then F, the head, B, W. The buffers of all ranks are as deep as the deepest one. One
slot more, the last, takes what nobody needs: messages of ranks that had nothing to run, and what such ranks compute.
Residuals and stash are large: there it is a slot that is free in the tick, and one more only where none is.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from heapq import heappop, heappush
from itertools import pairwise

import numpy as np
from jaxtyping import Bool, Int

from jaxdist.parallel.pipeline.schedules import Schedule, Ticks

Flags = Bool[np.ndarray, "ticks stages"]
Numbers = Int[np.ndarray, "ticks stages"]
Segment = tuple[int, int, frozenset[str]]

MOST_SEGMENTS = 6


@dataclass(frozen=True, eq=False)
class Table:
    """Arrays [T, S] by tick and rank, and [T] where all ranks have the same. A slot not used is the last one."""

    schedule: Schedule
    acts: int
    cots: int
    residuals: int
    stash: int
    """Slots of each buffer, without the last one that takes what nobody needs."""

    recv_act: Numbers
    """Slot of the input that the previous rank has sent in the tick before."""
    recv_cot: Numbers
    """Slot of the gradient that the next rank has sent in the tick before."""

    f_on: Flags
    f_chunk: Numbers
    """Virtual index: chunk f_chunk * S + rank."""
    f_micro: Numbers
    f_act: Numbers
    """Slot of the input; of chunk 0, which reads the batch, the last one."""
    f_res: Numbers
    f_cot: Numbers
    """Slot for the gradient that the head makes of the last chunk's output."""
    f_first: Flags
    f_last: Flags

    b_on: Flags
    b_chunk: Numbers
    b_micro: Numbers
    b_cot: Numbers
    b_res: Numbers
    b_wst: Numbers
    b_first: Flags

    w_on: Flags
    w_chunk: Numbers
    w_micro: Numbers
    w_wst: Numbers

    embed_on: Bool[np.ndarray, " ticks"]
    """Chunk 0 runs F: for an embedding that is split over the ranks."""
    embed_micro: Int[np.ndarray, " ticks"]
    head_on: Bool[np.ndarray, " ticks"]
    """The last chunk runs F."""
    head_micro: Int[np.ndarray, " ticks"]
    unembed_on: Bool[np.ndarray, " ticks"]
    """Chunk 0 runs B."""
    unembed_micro: Int[np.ndarray, " ticks"]

    segments: tuple[Segment, ...]
    """(first tick, last tick + 1, slots), in order. See `segments_of`."""

    @property
    def slots(self) -> dict[str, int]:
        """Slots of each buffer, with the one that takes what nobody needs, if there is one."""
        residuals = self.residuals + self._spare("F", self.f_res, self.residuals)
        stash = self.stash + self._spare("B", self.b_wst, self.stash)
        return dict(acts=self.acts + 1, cots=self.cots + 1, residuals=residuals, stash=stash)

    def _spare(self, kind: str, slots: Numbers, depth: int) -> bool:
        """Whether ranks that have no such unit to run write beyond `depth`."""
        runs = np.concatenate([np.full(end - begin, kind in units) for begin, end, units in self.segments])
        return self.schedule.uniform and bool((slots[runs] == depth).any())


@lru_cache(maxsize=64)
def make_table(schedule: Schedule) -> Table:
    """The table of a schedule."""
    S, T, M = schedule.stages, schedule.ticks, schedule.micro_batches
    F, B, W = schedule.forward, schedule.backward, schedule.weight
    lives = _lifetimes(schedule)
    slots = {name: _allocate(*life, S) for name, life in lives.items()}
    depths = {name: int(slot.max(initial=-1)) + 1 for name, slot in slots.items()}
    act, cot = ((slots[name], depths[name]) for name in ("acts", "cots"))
    res, wst = ((slots[name], _free(lives[name], slots[name], S, T)) for name in ("residuals", "stash"))

    g = np.arange(schedule.chunks)[:, None]
    rank, chunk, micro, one = g % S, g // S, np.arange(M), np.array(True)

    def column(ticks: Ticks | None, value: np.ndarray, default: int | Numbers = 0, of: slice = np.s_[:]) -> Numbers:
        """[T, S] with the values of units `of` at their ticks, and `default` elsewhere."""
        array = np.full((T, S), default, bool if value is one else np.int32)
        if ticks is not None:
            array[ticks, rank[of]] = np.broadcast_to(value, (schedule.chunks, M))[of]
        return array

    unit = lambda kind, ticks: {
        f"{kind}_on": column(ticks, one), f"{kind}_chunk": column(ticks, chunk), f"{kind}_micro": column(ticks, micro)
    }  # fmt: skip
    first, last, rest, before = np.s_[:1], np.s_[-1:], np.s_[1:], np.s_[:-1]
    return Table(
        schedule, **depths, **unit("f", F), **unit("b", B), **unit("w", W),
        recv_act=column(F[before] + 1, *act, rest), recv_cot=column(B[rest] + 1, *cot, before),
        f_act=column(F[rest], *act, rest), f_res=column(F, *res), f_cot=column(F[last], *cot, last),
        f_first=column(F[first], one, of=first), f_last=column(F[last], one, of=last),
        b_cot=column(B, *cot), b_res=column(B, res[0]), b_wst=column(None if W is None else B, *wst),
        b_first=column(B[first], one, of=first), w_wst=column(W, wst[0]),
        **_everywhere("embed", F[0], T), **_everywhere("head", F[-1], T), **_everywhere("unembed", B[0], T),
        segments=segments_of(schedule),
    )  # fmt: skip


def _everywhere(name: str, ticks: Int[np.ndarray, " micro"], T: int) -> dict[str, np.ndarray]:
    """What one chunk runs, for all ranks to know."""
    on, micro = np.zeros(T, bool), np.zeros(T, np.int32)
    on[ticks], micro[ticks] = True, np.arange(len(ticks))
    return {f"{name}_on": on, f"{name}_micro": micro}


def _lifetimes(schedule: Schedule) -> dict[str, tuple[Ticks, Ticks]]:
    """Buffer -> first and last tick in which each unit's entry is there; an entry that does not exist ends before.

    Both ticks count whole: what arrives, F or B writes in a tick comes before what B or W still reads in it.
    """
    F, B, W = schedule.forward, schedule.backward, schedule.weight
    none = np.full_like(F[:1], -1)
    return {
        "acts": (np.concatenate([none + 1, F[:-1] + 1]), np.concatenate([none, F[1:]])),
        "cots": (np.concatenate([B[1:] + 1, F[-1:]]), B),
        "residuals": (F, B),
        "stash": (B, B - 1 if W is None else W),
    }


def _allocate(start: Ticks, end: Ticks, S: int) -> Ticks:
    """The slot of each unit's entry, the lowest that is free on its rank; -1 for an entry that does not exist."""
    slot = np.full_like(start, -1)
    for rank in range(S):
        free, busy, used = [], [], 0
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
    """[T, S]: the first slot in which nothing lives in the tick; one more than there are where all are taken."""
    busy = np.zeros((T, S, int(slot.max(initial=-1)) + 2), bool)
    for (g, m), at in np.ndenumerate(slot):
        if at >= 0:
            busy[life[0][g, m] : life[1][g, m] + 1, g % S, at] = True
    return busy.argmin(-1).astype(np.int32)


def segments_of(schedule: Schedule) -> tuple[Segment, ...]:
    """Runs of ticks in which the same slots are occupied on any rank: "F", "H" (head: the last chunk's F), "B", "W".

    A loop with its own program is compiled for each, so there are at most MOST_SEGMENTS: a slot that comes and goes
    counts as occupied from its first tick to its last. F, B and W of uniform schedules never do. The head does, in
    interleaved ones: chunk by chunk a rank goes through a group, and only the last chunk of them has a head. A program
    that runs the head wherever "H" is runs it v*M times, not M; `head_on` is the same on all ranks, so that it may
    branch on it.
    """
    units = {"F": schedule.forward, "H": schedule.forward[-1], **schedule.units}
    span = {slot: (int(ticks.min()), int(ticks.max()) + 1) for slot, ticks in units.items()}
    edges = sorted({edge for ends in span.values() for edge in ends})
    segments = tuple(
        (begin, end, frozenset(slot for slot, (first, stop) in span.items() if first <= begin < stop))
        for begin, end in pairwise(edges)
    )
    assert len(segments) <= MOST_SEGMENTS, segments
    return segments
