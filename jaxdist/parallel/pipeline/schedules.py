"""Pipeline schedules: in which tick each rank runs which unit. Numpy only, for the executor and the planner alike.

The layers are cut into v*S chunks; chunk g = virtual_index * S + rank lies on rank g % S. A unit is one chunk on one of
M micro-batches: F its forward pass, and B its backward pass; or, where that is split, B the gradient with respect to
the input and W the gradient with respect to the weights (zero bubble, Qi et al. 2024, section 2). All ranks count ticks
together. In a tick a rank runs at most one F, one B and one W, in this order, so the last chunk's B may share the tick
of its F. What a tick sends to a neighbour is there from the next tick on.

A tick lasts as long as its slowest rank. That is why F and B share a tick here ("paired") where the papers have one or
the other: neighbours would then do F and B in turns, and each tick would last as long as a B.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from jaxtyping import Int

from jaxdist.config.pipeline import SCHEDULES as TRAITS

Ticks = Int[np.ndarray, "chunks micro"]


@dataclass(frozen=True, eq=False)
class Schedule:
    """The tick of each unit, [v*S, M]."""

    name: str
    stages: int
    micro_batches: int
    virtual: int
    forward: Ticks
    backward: Ticks
    weight: Ticks | None = None
    """None where B is the whole backward pass."""

    def __post_init__(self) -> None:
        # `make` hands the same object to all callers.
        for ticks in self.units.values():
            ticks.flags.writeable = False

    @property
    def uniform(self) -> bool:
        """Whether every rank may run every slot that is occupied in a tick (`config.pipeline.Traits`)."""
        return TRAITS[self.name].uniform

    @property
    def flush(self) -> bool:
        """Whether the pipeline is empty at the end of a step (`config.pipeline.Traits`)."""
        return TRAITS[self.name].flush

    @property
    def units(self) -> dict[str, Ticks]:
        """The ticks of each kind of unit, in the order in which they run within a tick."""
        kinds = {"F": self.forward, "B": self.backward, "W": self.weight}
        return {kind: ticks for kind, ticks in kinds.items() if ticks is not None}

    @property
    def chunks(self) -> int:
        """v*S."""
        return self.stages * self.virtual

    @property
    def ticks(self) -> int:
        """How many ticks the schedule has."""
        return 1 + int(max(ticks.max() for ticks in self.units.values()))

    @cached_property
    def occupied(self) -> list[list[str]]:
        """Tick -> the kinds of units that any rank runs in it, in their order."""
        runs = [(kind, np.bincount(ticks.ravel(), minlength=self.ticks)) for kind, ticks in self.units.items()]
        return [[kind for kind, count in runs if count[tick]] for tick in range(self.ticks)]

    @property
    def split(self) -> bool:
        """Whether the backward pass is split into B and W."""
        return self.weight is not None

    @property
    def last(self) -> Ticks:
        """The tick that ends the life of what F has kept for the backward pass."""
        return self.backward if self.weight is None else self.weight


@dataclass(frozen=True)
class Places:
    """The place of each unit on its rank, where ranks take groups of micro-batches through chunk after chunk.

    A rank takes a group through its first chunk, then its second, and so on (Narayanan et al. 2021, section 2.2.2). The
    first of a group is back at rank 0, for the next chunk, S ticks later: a group of fewer than S would wait. More than
    S do as well (Llama Team 2024, section 3.3.2), so M micro-batches make M // S groups, as even as possible, and need
    no M % S == 0, as they do in Megatron-LM. With M < S each chunk but the last is followed by S - M ticks of waiting.
    """

    S: int
    M: int
    v: int

    @property
    def group(self) -> int:
        """Micro-batches of the largest group, the first one."""
        return -(-self.M // max(1, self.M // self.S))

    @property
    def period(self) -> int:
        """Ticks from a unit of the first group to the same micro-batch in the rank's next chunk."""
        return max(self.group, self.S)

    def along(self, backwards: bool, wait: bool = True) -> Ticks:
        """Return [v*S, M]: ticks since the first unit of the rank.

        `backwards` takes chunks from the last one to the first. Without `wait`, the units follow one another also where
        M < S.
        """
        groups = np.array_split(np.arange(self.M), max(1, self.M // self.S))
        sizes = np.array([len(group) for group in groups])
        # For each micro-batch: its group, and how many micro-batches are in groups before that.
        group = np.repeat(np.arange(len(sizes)), sizes)
        before = (np.cumsum(sizes) - sizes)[group]
        chunk = np.arange(self.v)[:, None]
        turn = self.v - 1 - chunk if backwards else chunk
        length = np.maximum(sizes, self.S if wait else 0)[group]
        place = self.v * before + turn * length + (np.arange(self.M) - before)
        return np.repeat(place, self.S, axis=0)

    @property
    def rank(self) -> Ticks:
        """The rank of each chunk, [v*S, 1]."""
        return np.tile(np.arange(self.S), self.v)[:, None]


def gpipe(S: int, M: int, v: int = 1) -> Schedule:
    """All forward passes, then all backward passes, last micro-batch first (GPipe, Huang et al. 2019, figure 2c)."""
    g = np.arange(S)[:, None]
    m = np.arange(M)
    forward = m + g
    # The last forward pass is in tick M + S - 2.
    backward = M + S - 1 + (M - 1 - m) + (S - 1 - g)
    return Schedule("gpipe", S, M, 1, forward, backward)


def one_f_one_b(S: int, M: int, v: int = 1) -> Schedule:
    """Turn each micro-batch back at the last stage at once: 1F1B (PipeDream-flush, Narayanan et al. 2021, 2.2.1)."""
    g = np.arange(S)[:, None]
    m = np.arange(M)
    forward = m + g
    # In the tick of its last F, which is m + S - 1, a micro-batch is at stage S - 1, and turns back.
    backward = m + 2 * (S - 1) - g
    return Schedule("1f1b", S, M, 1, forward, backward)


def interleaved(S: int, M: int, v: int) -> Schedule:
    """1F1B with v chunks on each rank: 1/v of the bubble (Narayanan et al. 2021, section 2.2.2); any M, by `Places`."""
    F, B = _interleaved(Places(S, M, v))
    return Schedule("interleaved", S, M, v, F, B)


def _interleaved(at: Places) -> tuple[Ticks, Ticks]:
    """Return F and B, where backward passes begin as soon as the first group is through its last chunk."""
    turn = (at.v - 1) * at.period + at.S - 1
    F = at.along(backwards=False) + at.rank
    B = turn + at.along(backwards=True) + at.S - 1 - at.rank
    return F, B


def zb_u(S: int, M: int, v: int = 1) -> Schedule:
    """1F1B with the backward pass split, and W of all ranks in the ticks in which rank 0 could run its own.

    W waits for the slowest rank, and so has no bubble: what is left is the bubble of F and B, (S-1)(F+B)/v. Everything
    that runs in a tick runs on all ranks, which the zero-bubble schedules of the paper (Qi et al. 2024) do not have.
    """
    at = Places(S, M, v)
    F, B = _interleaved(at)
    start = B.max() - (v * M - 1)
    return Schedule("zb-u", S, M, v, F, B, start + at.along(backwards=True, wait=False))


def zb_h1(S: int, M: int, v: int = 1) -> Schedule:
    """1F1B with the backward pass split, and W where a rank would wait (ZB-H1, Qi et al. 2024, section 2.1).

    One unit per tick and rank. Forward and backward passes keep the order of 1F1B, and each rank starts W so late that
    it has S micro-batches in flight, as rank 0 has in 1F1B: bubble (S-1)(F+B-W) where the three last equally long. With
    v chunks it is 1/v of that; in flight are (v-1) groups of `Places` and S chunks, v*S where S divides M.
    """
    F, B, W = _list_scheduling(Places(S, M, v))
    return Schedule("zb-h1", S, M, v, F, B, W)


def pipedream(S: int, M: int, v: int = 1) -> Schedule:
    """1F1B that goes on forever, of M micro-batches here, each of them a global batch (Narayanan et al. 2019).

    Each rank is updated after each B, so that rank r makes S-1-r updates between F and B of a micro-batch, and keeps
    as many older versions of its weights (weight stashing, section 3.3). F and B in one tick would make it twice as
    many.
    """
    g = np.arange(S)[:, None]
    m = np.arange(M)
    forward = 2 * m + g
    # The last stage has its B in the tick after its F; a rank has F and B in turns.
    backward = 2 * m + 2 * S - 1 - g
    return Schedule("pipedream", S, M, 1, forward, backward)


def _list_scheduling(at: Places) -> tuple[Ticks, Ticks, Ticks]:
    """Schedule greedily: tick by tick, each rank runs the first of its next F, B and W that can run.

    An F also has to fit into what may be in flight. That bound grows with every B, from where 1F1B has it on this rank
    to where it has it on rank 0.
    """
    S = at.S
    count = at.v * at.M
    never = np.iinfo(int).max
    F, B, W = (np.full((S * at.v, at.M), never) for _ in range(3))
    forwards = _orders(at, backwards=False)
    backwards = _orders(at, backwards=True)
    done = [[0, 0, 0] for _ in range(S)]
    most = (at.v - 1) * at.group + S
    t = 0
    while any(w < count for _, _, w in done):
        for rank in range(S):
            f, b, w = done[rank]
            unit = forwards[rank][min(f, count - 1)]
            back = backwards[rank][min(b, count - 1)]
            # F goes first, then B, and W fills the ticks in which neither can run.
            in_flight = f - w
            if f < count and in_flight < min(most, most - rank + b) and _neighbour_is_done(t, F, unit, -1):
                F[unit] = t
                done[rank][0] = f + 1
            elif b < count and F[back] < t and _neighbour_is_done(t, B, back, +1):
                B[back] = t
                done[rank][1] = b + 1
            elif w < b:
                W[backwards[rank][w]] = t
                done[rank][2] = w + 1
        t += 1
        # A tick in which no rank runs a unit would be followed by the same tick for ever.
        assert sum(map(sum, done)) >= t, f"{done} units have run by tick {t}, and no rank can run another"
    return F, B, W


def _orders(at: Places, backwards: bool) -> list[list[tuple[int, int]]]:
    """Return for each rank its units (g, m), in the order in which they run."""
    place = at.along(backwards)
    units = [[(g, m) for g in range(rank, at.S * at.v, at.S) for m in range(at.M)] for rank in range(at.S)]
    return [sorted(of_rank, key=place.__getitem__) for of_rank in units]


def _neighbour_is_done(t: int, ticks: Ticks, unit: tuple[int, int], step: int) -> bool:
    """Return whether the chunk `step` further on has run the same micro-batch before tick t, or does not exist."""
    g, m = unit
    neighbour = g + step
    return not 0 <= neighbour < len(ticks) or ticks[neighbour, m] < t


SCHEDULES: dict[str, Callable[[int, int, int], Schedule]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    "zb-h1": zb_h1,
    "zb-u": zb_u,
    "pipedream": pipedream,
}
"""Name on the command line -> (S, M, v) -> schedule."""


@lru_cache(maxsize=64)
def make(name: str, S: int, M: int, v: int = 1) -> Schedule:
    """Return the schedule `name` for S stages, M micro-batches and v virtual stages.

    Raises `ValueError`, in one sentence.
    """
    if name not in SCHEDULES:
        raise ValueError(f"there is no pipeline schedule '{name}'; there are {', '.join(SCHEDULES)}")
    for number, what in ((S, "stages"), (M, "micro-batches"), (v, "virtual stages")):
        if number < 1:
            raise ValueError(f"{number} {what} are no pipeline; ask for 1 or more")
    traits = TRAITS[name]
    if v > 1 and not traits.several:
        raise ValueError(
            f"schedule {name} has 1 virtual stage, but {v} were asked for; ask for 1, or for schedule interleaved"
        )
    if v < traits.chunks:
        raise ValueError(f"schedule {name} with 1 virtual stage is 1f1b; ask for 2 or more, or for schedule 1f1b")
    return SCHEDULES[name](S, M, v)
