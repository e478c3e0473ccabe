"""Tables of published times: what of them is predicted, how well, and what is chosen within a model."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from statistics import mean, median

from tests.planning.published import Entry, Row, rows
from tests.planning.steps import Step
from tests.planning.theory import flops


def of_rate(row: Row) -> float:
    """Seconds, from hardware FLOPs with full recomputation."""
    work = flops.gpt_step(row.global_batch, row.seq, row.layers, row.hidden, row.vocab, "full")
    return work / (row.value * 1e12 * row.gpus)


def of_tokens(row: Row) -> float:
    return row.global_batch * row.seq / (row.value * row.gpus)


def of_milliseconds(row: Row) -> float:
    return row.value / 1e3


def whole(row: Row) -> float:
    return sum(Step(row).parts().values())


def plain(row: Row) -> float:
    """Seconds of jaxdist's own step."""
    return Step(row).plain.seconds


def forward(row: Row) -> float:
    return Step(row).layer(backward=False)


def backward(row: Row) -> float:
    return Step(row).layer(backward=True)


ZERO_3 = "as if communication hid behind nothing, and reached a fifth to a seventh of what the links can do"


@dataclass(frozen=True)
class Timed:
    row: Row
    predicted: float
    """Seconds."""
    measured: float

    @property
    def ratio(self) -> float:
        return self.predicted / self.measured

    @property
    def name(self) -> str:
        r = self.row
        return f"{r.model}, {r.gpus:g} GPUs, {r.microbatch:g} x {r.seq:g}"


@dataclass(frozen=True)
class Table(Entry):
    """Rows of one source and cluster whose time is predicted from their configuration."""

    title: str
    seconds: Callable[[Row], float] = lambda row: row.value
    """Measured."""
    predict: Callable[[Row], float] = whole
    failing: tuple[str, ...] = ()
    """Names of the rows that are more than a fifth off."""
    why: str = ""

    @property
    def full_title(self) -> str:
        return f"{self.source}, {self.title}"

    @cached_property
    def timed(self) -> list[Timed]:
        return [Timed(row, self.predict(row), self.seconds(row)) for row in rows() if self.has(row)]

    @property
    def ratio(self) -> float:
        """Predicted over measured."""
        return mean(one.ratio for one in self.timed)

    @property
    def error(self) -> float:
        """The mean of their sizes, relative; nothing is fitted."""
        return mean(abs(one.ratio - 1) for one in self.timed)

    @property
    def scalar(self) -> float:
        """One factor for the table: by the median row, which a few that fail do not move."""
        return math.exp(median(math.log(one.ratio) for one in self.timed))

    @property
    def error_after(self) -> float:
        return mean(abs(one.ratio / self.scalar - 1) for one in self.timed)


def on(gpu: str) -> Callable[[Row], bool]:
    return lambda row: row.gpu == gpu


TABLES = [
    Table(
        "MosaicML llm-foundry",
        "tokens_per_s",
        17,
        "A100 40 GB",
        of_tokens,
        where=on("a100_40gb"),
        failing=("MPT-70b, 64 GPUs, 2 x 2048",),
        why="the fewest GPUs that hold the model: of twice as many each is 36 % faster; not known why",
    ),
    Table(
        "MosaicML llm-foundry",
        "tokens_per_s",
        16,
        "A100 80 GB",
        of_tokens,
        where=on("a100_80gb"),
        failing=("MPT-30b, 8 GPUs, 1 x 8192",),
        why="not known: 7B and 13B with 8192 tokens and more are within 5 %",
    ),
    Table(
        "MosaicML llm-foundry",
        "tokens_per_s",
        26,
        "H100",
        of_tokens,
        where=on("h100_80gb"),
        failing=(
            "MPT-70b, 512 GPUs, 8 x 2048",
            "MPT-70b, 256 GPUs, 8 x 2048",
            "MPT-7b, 512 GPUs, 6 x 2048",
            "MPT-30b, 8 GPUs, 1 x 8192",
            "MPT-13b, 64 GPUs, 2 x 2048",
            "MPT-13b, 32 GPUs, 2 x 2048",
            "MPT-13b, 16 GPUs, 2 x 2048",
            "MPT-13b, 8 GPUs, 2 x 2048",
        ),
        why="few tokens for each gather of weights, or hundreds of GPUs: as if FSDP's communication hid behind nothing",
    ),
    Table("Korthikanti2022", "iteration_time", 6, "table 5"),
    Table("Korthikanti2022", "layer_forward_time", 5, "table 4, forward", of_milliseconds, forward),
    Table(
        "Korthikanti2022",
        "layer_backward_time",
        4,
        "table 4, backward",
        of_milliseconds,
        backward,
        where=lambda row: row.remat != "full",  # that of full is judged from the others
    ),
    Table(
        "Narayanan2021",
        "achieved_TFLOPs",
        9,
        "table 1",
        of_rate,
        where=lambda row: row.table == "1",
        failing=("1.7B, 32 GPUs, 16 x 2048",),
        why="the narrowest model, of which what is no product is the greatest part",
    ),
    Table(  # "1F1B/interleaved" is read as one chunk on each rank: with more, times are 4 % shorter to 3 % longer
        "Narayanan2021",
        "achieved_TFLOPs",
        4,
        "table 2, Megatron",
        of_rate,
        where=lambda row: row.table == "2" and row.zero == "0",
    ),
    Table(
        "Narayanan2021",
        "achieved_TFLOPs",
        5,
        "table 2, ZeRO 3",
        of_rate,
        where=lambda row: row.zero == "3",
        failing=(
            "174.6B, 768 GPUs, 2 x 2048",
            "174.6B, 1536 GPUs, 1 x 2048",
            "529.6B, 640 GPUs, 4 x 2048",
            "529.6B, 1120 GPUs, 2 x 2048",
            "529.6B, 2240 GPUs, 1 x 2048",
        ),
        why=ZERO_3,
    ),
    Table(
        "MT-NLG530B",
        "iteration_time",
        2,
        "section 2.4",
        failing=("530B, 2800 GPUs, 1 x 2048", "530B, 3360 GPUs, 1 x 2048"),
        why="slower than the same model of the same authors in table 1 of Narayanan 2021; not known",
    ),
    Table("Alpa", "iteration_time", 1, "benchmark README", where=lambda row: row.table == "benchmark README"),
]
"""Each with one cluster and one program: what "one factor for each cluster" is fitted to."""


# -- the choice within a model and a number of devices


@dataclass(frozen=True)
class Group:
    """Rows of one table with the same model and devices."""

    table: Table
    timed: list[Timed]

    @property
    def name(self) -> str:
        row = self.timed[0].row
        return f"{self.table.title}, {row.model}, {row.gpus:g} GPUs"

    def speed(self, one: Timed, seconds: float) -> float:
        """Tokens a second."""
        return one.row.global_batch * one.row.seq / seconds

    def regret(self, chosen: Timed) -> float:
        """How much slower than the best row, which is 0."""
        speeds = [self.speed(one, one.measured) for one in self.timed]
        return max(speeds) / self.speed(chosen, chosen.measured) - 1

    @property
    def ours(self) -> float:
        return self.regret(max(self.timed, key=lambda one: self.speed(one, one.predicted)))

    @property
    def random(self) -> float:
        """Of a row drawn at random, in the mean."""
        return mean(map(self.regret, self.timed))


def groups(least: int = 4) -> list[Group]:
    """Those with at least so many rows."""
    found = []
    for table in TABLES:
        by: dict[tuple, list[Timed]] = {}
        for one in table.timed:
            by.setdefault((one.row.model, one.row.gpus), []).append(one)
        found += [Group(table, mine) for mine in by.values() if len(mine) >= least and table.predict is whole]
    return found


@dataclass(frozen=True)
class Pair:
    """The only rows of one model and number of devices whose meshes are told and differ: Narayanan's table 2."""

    sharded: Timed
    """ZeRO 3 over all devices."""
    megatron: Timed
    """Tensor in a host, then pipeline, then data."""

    @property
    def name(self) -> str:
        return f"{self.sharded.row.model}, {self.sharded.row.gpus:g} GPUs"

    @property
    def regret(self) -> float:
        """Of the one that is predicted to be faster; both have the same batch."""
        both = (self.sharded, self.megatron)
        return min(both, key=lambda one: one.predicted).measured / min(one.measured for one in both) - 1


def pairs() -> list[Pair]:
    megatron, sharded = (
        next(table for table in TABLES if table.title == title).timed
        for title in ("table 2, Megatron", "table 2, ZeRO 3")
    )
    same = lambda a, b: (a.row.model, a.row.gpus, a.row.global_batch) == (b.row.model, b.row.gpus, b.row.global_batch)
    return [Pair(one, other) for one in sharded for other in megatron if same(one, other)]
