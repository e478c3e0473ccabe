"""What must hold of every schedule and table, checked: raises AssertionError naming the unit that is wrong."""

from __future__ import annotations

import numpy as np

from jaxdist.parallel.pipeline.schedules import Schedule
from jaxdist.parallel.pipeline.table import Table


def check_schedule(schedule: Schedule) -> None:
    """Every unit once, after all that it needs, and no two units of a kind on a rank in one tick."""
    S, shape = schedule.stages, (schedule.chunks, schedule.micro_batches)
    F, B, W = schedule.forward, schedule.backward, schedule.weight
    for kind, ticks in schedule.units.items():
        assert ticks.shape == shape, f"{kind} has ticks {ticks.shape} for units {shape}"
        _all(ticks >= 0, lambda g, m, kind=kind: f"{kind}({g},{m}) is before tick 0")
        for rank in range(S):
            of = ticks[rank::S]
            tick, count = np.unique(of, return_counts=True)
            assert of.size == tick.size, f"rank {rank} runs two {kind} in tick {tick[count > 1][0]}"
    _all(F[1:] > F[:-1], lambda g, m: f"F({g + 1},{m}) is not after F({g},{m})")
    _all(B[:-1] > B[1:], lambda g, m: f"B({g},{m}) is not after B({g + 1},{m})")
    _all(B >= F, lambda g, m: f"B({g},{m}) is before F({g},{m})")
    if W is not None:
        _all(W >= B, lambda g, m: f"W({g},{m}) is before B({g},{m})")
    if not schedule.uniform:
        for rank in range(S):
            ticks = np.concatenate([of[rank::S].ravel() for of in schedule.units.values()])
            assert ticks.size == np.unique(ticks).size, f"rank {rank} runs two units in one tick"


def _all(holds: np.ndarray, told) -> None:
    assert holds.all(), told(*np.argwhere(~holds)[0])


def check_table(table: Table) -> None:
    """Run the table with names in the place of arrays: what a unit reads must be what it needs.

    As in a program that masks, everything is written in every tick, also by ranks that have nothing to run: None, which
    no unit needs.
    """
    replay = _Replay(table)
    replay.run()
    for kind, ticks in table.schedule.units.items():
        for (g, m), tick in np.ndenumerate(ticks):
            found = replay.ran.get((kind, g, m))
            assert found == tick, f"{kind}({g},{m}) belongs in tick {tick} and runs in {found}"
    _check_segments(table)


class _Replay:
    """The buffers of all ranks. An entry is (what, chunk, micro-batch): x input, d gradient of the output, r, s."""

    def __init__(self, table: Table):
        self.table, self.S, self.last = table, table.schedule.stages, table.schedule.chunks - 1
        empty = lambda depth: [[None] * (depth + 1) for _ in range(self.S)]
        self.act, self.cot = empty(table.acts), empty(table.cots)
        self.res, self.wst = empty(table.residuals), empty(table.stash)
        self.ran: dict[tuple[str, int, int], int] = {}
        self.now: list[tuple[str, int, int]] = []

    def run(self) -> None:
        down = up = [None] * self.S
        for t in range(self.table.schedule.ticks):
            self.now = []
            for rank in range(self.S):
                self._write(t, rank, "arrival", self.act, "recv_act", down[rank - 1])
                self._write(t, rank, "arrival", self.cot, "recv_cot", up[(rank + 1) % self.S])
            down = [self._forward(t, rank) for rank in range(self.S)]
            up = [self._backward(t, rank) for rank in range(self.S)]
            for rank in range(self.S):
                self._weight(t, rank)
            self._check_everywhere(t)

    def _forward(self, t: int, rank: int) -> tuple | None:
        """Returns what the next rank is sent."""
        told, g, m = self._unit("F", t, rank, first=0, last=self.last)
        if g is not None and g > 0:
            self._read(t, rank, told, self.act, "f_act", ("x", g, m))
        self._write(t, rank, told, self.res, "f_res", g is not None and ("r", g, m))
        self._write(t, rank, told, self.cot, "f_cot", g == self.last and ("d", g, m))
        return ("x", g + 1, m) if g is not None and g < self.last else None

    def _backward(self, t: int, rank: int) -> tuple | None:
        """Returns what the previous rank is sent."""
        told, g, m = self._unit("B", t, rank, first=0)
        if g is not None:
            self._read(t, rank, told, self.cot, "b_cot", ("d", g, m))
            self._read(t, rank, told, self.res, "b_res", ("r", g, m))
        self._write(t, rank, told, self.wst, "b_wst", g is not None and ("s", g, m))
        return ("d", g - 1, m) if g else None

    def _weight(self, t: int, rank: int) -> None:
        told, g, m = self._unit("W", t, rank)
        if g is not None:
            self._read(t, rank, told, self.wst, "w_wst", ("s", g, m))

    def _unit(self, kind: str, t: int, rank: int, **ends: int) -> tuple[str, int | None, int | None]:
        """What to call the unit, its chunk and its micro-batch; None and None for a rank that has nothing to run."""
        column = lambda name: getattr(self.table, f"{kind.lower()}_{name}")[t, rank]
        if not column("on"):
            told, g, m = f"rank {rank} without {kind} in tick {t}", None, None
        else:
            g, m = int(column("chunk")) * self.S + rank, int(column("micro"))
            told = f"{kind}({g},{m})"
            assert (kind, g, m) not in self.ran, f"{told} runs in tick {self.ran[kind, g, m]} and in {t}"
            self.ran[kind, g, m] = t
            self.now.append((kind, g, m))
        for end, chunk in ends.items():
            assert column(end) == (g == chunk), f"{told} is told {end}: {bool(column(end))}"
        return told, g, m

    def _read(self, t: int, rank: int, told: str, buffers: list[list], column: str, needed: tuple) -> None:
        slot, buffer = getattr(self.table, column)[t, rank], buffers[rank]
        assert 0 <= slot < len(buffer) - 1, f"{told} reads slot {slot} by {column}, of {len(buffer) - 1}"
        assert buffer[slot] == needed, f"{told} needs {needed}, but {column} is slot {slot} with {buffer[slot]}"

    def _write(self, t: int, rank: int, told: str, buffers: list[list], column: str, entry: tuple | None) -> None:
        slot, buffer = getattr(self.table, column)[t, rank], buffers[rank]
        assert 0 <= slot < len(buffer), f"{told} writes to slot {slot} by {column}, of {len(buffer) - 1}"
        buffer[slot] = entry or None

    def _check_everywhere(self, t: int) -> None:
        """What all ranks are told of the two end chunks."""
        for name, kind, chunk in (("embed", "F", 0), ("head", "F", self.last), ("unembed", "B", 0)):
            micro = [getattr(self.table, f"{name}_micro")[t]] if getattr(self.table, f"{name}_on")[t] else []
            runs = [m for one, g, m in self.now if (one, g) == (kind, chunk)]
            assert micro == runs, f"tick {t}: {name} has micro-batch {micro}, {kind} of chunk {chunk} has {runs}"


def _check_segments(table: Table) -> None:
    """One after another they are all ticks, and each has every slot that its ticks need."""
    at = 0
    for begin, end, slots in table.segments:
        assert begin == at < end, f"segment {begin} to {end} does not begin at tick {at}"
        for slot, on in (("F", table.f_on), ("H", table.head_on), ("B", table.b_on), ("W", table.w_on)):
            assert slot in slots or not on[begin:end].any(), f"{slot} runs in ticks {begin} to {end}, that leave it out"
        at = end
    assert at == table.schedule.ticks, f"segments end at tick {at} of {table.schedule.ticks}"
