"""Check what must hold of every schedule and table; raises AssertionError naming the unit that is wrong."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from jaxdist.parallel.pipeline.schedules import Schedule
from jaxdist.parallel.pipeline.table import Backward, Flags, Forward, Numbers, Table, Weight

Entry = tuple[str, int, int]
"""(what, chunk, micro-batch): "x" an input, "d" the gradient of an output, "r" residuals, "s" a stash."""
Buffers = list[list[Entry | None]]
"""Rank -> slots."""


def check_schedule(schedule: Schedule) -> None:
    """Check that every unit runs once, after all that it needs, and no two of a kind on a rank in one tick."""
    S = schedule.stages
    F = schedule.forward
    B = schedule.backward
    W = schedule.weight
    shape = (schedule.chunks, schedule.micro_batches)
    for kind, ticks in schedule.units.items():
        assert ticks.shape == shape, f"{kind} has ticks {ticks.shape} for units {shape}"
        _all(ticks >= 0, partial(_before_the_first_tick, kind))
        for rank in range(S):
            of_rank = ticks[rank::S]
            tick, count = np.unique(of_rank, return_counts=True)
            assert of_rank.size == tick.size, f"rank {rank} runs two {kind} in tick {tick[count > 1][0]}"
    _all(F[1:] > F[:-1], lambda g, m: f"F({g + 1},{m}) is not after F({g},{m})")
    _all(B[:-1] > B[1:], lambda g, m: f"B({g},{m}) is not after B({g + 1},{m})")
    _all(B >= F, lambda g, m: f"B({g},{m}) is before F({g},{m})")
    if W is not None:
        _all(W >= B, lambda g, m: f"W({g},{m}) is before B({g},{m})")
    if not schedule.uniform:
        for rank in range(S):
            ticks = np.concatenate([units[rank::S].ravel() for units in schedule.units.values()])
            assert ticks.size == np.unique(ticks).size, f"rank {rank} runs two units in one tick"


def _before_the_first_tick(kind: str, g: int, m: int) -> str:
    return f"{kind}({g},{m}) is before tick 0"


def _all(holds: np.ndarray, message: Callable[[int, int], str]) -> None:
    assert holds.all(), message(*np.argwhere(~holds)[0])


def check_table(table: Table) -> None:
    """Run the table with names in place of arrays: what a unit reads must be what it needs.

    As in a program that masks, everything is written in every tick, also by ranks that have nothing to run: these write
    None, which no unit needs.
    """
    replay = _Replay(table)
    replay.run()
    for kind, ticks in table.schedule.units.items():
        for (g, m), tick in np.ndenumerate(ticks):
            found = replay.ran.get((kind, g, m))
            assert found == tick, f"{kind}({g},{m}) belongs in tick {tick} and runs in {found}"
    _check_segments(table)


class _Replay:
    """The buffers of all ranks, and what has run."""

    def __init__(self, table: Table):
        self.table = table
        self.rows = table.rows
        self.S = table.schedule.stages
        self.last = table.schedule.chunks - 1
        self.act = self._empty(table.acts)
        self.cot = self._empty(table.cots)
        self.res = self._empty(table.residuals)
        self.wst = self._empty(table.stash)
        self.ran: dict[tuple[str, int, int], int] = {}
        """Unit -> the tick in which it ran."""
        self.now: list[tuple[str, int, int]] = []
        """The units of this tick."""

    def _empty(self, depth: int) -> Buffers:
        return [[None] * (depth + 1) for _ in range(self.S)]

    def run(self) -> None:
        """Run all ticks."""
        down: list[Entry | None] = [None] * self.S
        up: list[Entry | None] = [None] * self.S
        for t in range(self.table.schedule.ticks):
            self.now = []
            for rank in range(self.S):
                self._write(t, rank, "arrival", self.act, "arrivals.act", down[rank - 1])
                self._write(t, rank, "arrival", self.cot, "arrivals.cot", up[(rank + 1) % self.S])
            down = [self._forward(t, rank) for rank in range(self.S)]
            up = [self._backward(t, rank) for rank in range(self.S)]
            for rank in range(self.S):
                self._weight(t, rank)
            self._check_everywhere(t)

    def _forward(self, t: int, rank: int) -> Entry | None:
        """Run F, and return what the next rank is sent."""
        unit, g, m = self._unit("F", self.rows.F, t, rank)
        self._check_flag(unit, "first", self.rows.F.first[t, rank], g == 0)
        self._check_flag(unit, "last", self.rows.F.last[t, rank], g == self.last)
        if g is None or m is None:
            # A rank that has nothing to run writes all the same, to slots that are not needed.
            self._write(t, rank, unit, self.res, "F.res", None)
            self._write(t, rank, unit, self.cot, "F.cot", None)
            return None
        if g > 0:
            self._read(t, rank, unit, self.act, "F.act", ("x", g, m))
        self._write(t, rank, unit, self.res, "F.res", ("r", g, m))
        self._write(t, rank, unit, self.cot, "F.cot", ("d", g, m) if g == self.last else None)
        return ("x", g + 1, m) if g < self.last else None

    def _backward(self, t: int, rank: int) -> Entry | None:
        """Run B, and return what the previous rank is sent."""
        unit, g, m = self._unit("B", self.rows.B, t, rank)
        self._check_flag(unit, "first", self.rows.B.first[t, rank], g == 0)
        if g is None or m is None:
            self._write(t, rank, unit, self.wst, "B.wst", None)
            return None
        self._read(t, rank, unit, self.cot, "B.cot", ("d", g, m))
        self._read(t, rank, unit, self.res, "B.res", ("r", g, m))
        self._write(t, rank, unit, self.wst, "B.wst", ("s", g, m))
        return ("d", g - 1, m) if g > 0 else None

    def _weight(self, t: int, rank: int) -> None:
        """Run W."""
        unit, g, m = self._unit("W", self.rows.W, t, rank)
        if g is not None and m is not None:
            self._read(t, rank, unit, self.wst, "W.wst", ("s", g, m))

    def _unit(
        self,
        kind: str,
        columns: Forward[Flags, Numbers] | Backward[Flags, Numbers] | Weight[Flags, Numbers],
        t: int,
        rank: int,
    ) -> tuple[str, int | None, int | None]:
        """Return the name of the unit, its chunk and its micro-batch; None twice for a rank that has none to run."""
        if not columns.on[t, rank]:
            return f"rank {rank} without {kind} in tick {t}", None, None
        g = int(columns.chunk[t, rank]) * self.S + rank
        m = int(columns.micro[t, rank])
        name = f"{kind}({g},{m})"
        assert (kind, g, m) not in self.ran, f"{name} runs in tick {self.ran[kind, g, m]} and in {t}"
        self.ran[kind, g, m] = t
        self.now.append((kind, g, m))
        return name, g, m

    def _check_flag(self, unit: str, name: str, flag: bool, wanted: bool) -> None:
        assert flag == wanted, f"{unit} has {name}: {bool(flag)}"

    def _read(self, t: int, rank: int, unit: str, buffers: Buffers, column: str, needed: Entry) -> None:
        buffer = buffers[rank]
        slot = self._slot(column)[t, rank]
        assert 0 <= slot < len(buffer) - 1, f"{unit} reads slot {slot} by {column}, of {len(buffer) - 1}"
        assert buffer[slot] == needed, f"{unit} needs {needed}, but {column} is slot {slot} with {buffer[slot]}"

    def _write(self, t: int, rank: int, unit: str, buffers: Buffers, column: str, entry: Entry | None) -> None:
        buffer = buffers[rank]
        slot = self._slot(column)[t, rank]
        assert 0 <= slot < len(buffer), f"{unit} writes to slot {slot} by {column}, of {len(buffer) - 1}"
        buffer[slot] = entry

    def _slot(self, column: str) -> np.ndarray:
        """Return a column by its name, such as "F.act"."""
        group, name = column.split(".")
        return getattr(getattr(self.rows, group), name)

    def _check_everywhere(self, t: int) -> None:
        """Check what all ranks run together for the first and the last chunk."""
        for name, kind, chunk in (("embed", "F", 0), ("head", "F", self.last), ("unembed", "B", 0)):
            columns = getattr(self.rows, name)
            micro = [columns.micro[t]] if columns.on[t] else []
            runs = [m for one, g, m in self.now if (one, g) == (kind, chunk)]
            assert micro == runs, f"tick {t}: {name} has micro-batch {micro}, {kind} of chunk {chunk} has {runs}"


def _check_segments(table: Table) -> None:
    """Check that segments, one after another, are all ticks, and each has every slot that its ticks need."""
    rows = table.rows
    at = 0
    for begin, end, slots in table.segments:
        assert begin == at < end, f"segment {begin} to {end} does not begin at tick {at}"
        for slot, on in (("F", rows.F.on), ("H", rows.head.on), ("B", rows.B.on), ("W", rows.W.on)):
            assert slot in slots or not on[begin:end].any(), (
                f"{slot} runs in ticks {begin} to {end}, which leave it out"
            )
        at = end
    assert at == table.schedule.ticks, f"segments end at tick {at} of {table.schedule.ticks}"
