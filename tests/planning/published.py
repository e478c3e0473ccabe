"""Published rows and what judges each: a closed form, the planner's model of time, or a reason why none does.

`tests/data/published.csv` has one value a row. A judge predicts it from the row's configuration, or from another value
of the same table (a share of the peak from a rate). `step_tables.TABLES` are times, which `scripts/fit_planner.py`
judges. `NOT_JUDGED` names the others.
Every row belongs to exactly one entry of the three.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import SimpleNamespace

CSV = Path(__file__).parent.parent / "data" / "published.csv"
NUMBERS = {"params", "layers", "hidden", "heads", "seq", "vocab", "global_batch", "microbatch"}
NUMBERS |= {"gpus", "tp", "pp", "dp", "ep", "cp"}
OF_THE_VALUE = {"metric", "value", "unit", "kind", "where", "note"}

Row = SimpleNamespace
"""A row of the file by its columns. Numbers are floats, None where a cell is empty; `text` is the value as printed."""


@cache
def rows() -> list[Row]:
    with CSV.open(newline="") as file:
        return [_row(cells) for cells in csv.DictReader(file)]


def _row(cells: dict[str, str]) -> Row:
    numbers = {name: float(cells[name]) if cells[name] else None for name in NUMBERS}
    configuration = tuple(value for name, value in cells.items() if name not in OF_THE_VALUE)
    value = dict(text=cells["value"], value=float(cells["value"]), configuration=configuration)
    return Row(**{**cells, **numbers, **value})


def beside(row: Row, metric: str) -> float:
    """Another value of the same configuration."""
    found = {r.value for r in rows() if r.configuration == row.configuration and r.metric == metric}
    assert len(found) == 1, (row, found)
    return found.pop()


def like(row: Row, metric: str | None = None, **changed: object) -> float:
    """The value of the row of this table that differs in these columns; `metric`, if it is another."""
    wanted = {"metric": metric or row.metric, "model": row.model, **changed}
    found = {
        r.value
        for r in rows()
        if (r.source, r.table) == (row.source, changed.get("table", row.table))
        and all(getattr(r, name) == value for name, value in wanted.items())
    }
    assert len(found) == 1, (row, changed, found)
    return found.pop()


@dataclass(frozen=True)
class Entry:
    """Some rows of a source, and how many. `where` selects among those of the metrics and tables."""

    source: str
    metrics: str
    """Names apart by spaces, each of which begins a metric's name; all if empty."""
    count: int
    where: Callable[[Row], bool] = field(default=lambda row: True, kw_only=True)

    @property
    def name(self) -> str:
        return f"{self.source}: {self.metrics or 'all'}"

    def has(self, row: Row) -> bool:
        names = self.metrics.split() or [""]
        return row.source == self.source and any(row.metric.startswith(n) for n in names) and self.where(row)


@dataclass(frozen=True)
class Tolerance:
    """How far a prediction may lie from a row."""

    text: str
    holds: Callable[[Row, float], bool]


def within(percent: float) -> Tolerance:
    return Tolerance(f"{percent} %", lambda row, x: abs(x - row.value) <= percent / 100 * abs(row.value))


def points(most: float) -> Tolerance:
    return Tolerance(f"{most} {'points' if most != 1 else 'unit'}", lambda row, x: abs(x - row.value) <= most)


def _printed(row: Row, x: float) -> bool:
    """Rounded or cut off at the last digit that is printed: table 1 of the ZeRO paper does both."""
    scale = 10 ** len(row.text.partition(".")[2])
    wanted, found = round(row.value * scale), x * scale
    return wanted in (math.floor(found + 1e-9), math.floor(found + 0.5 + 1e-9))


AS_PRINTED = Tolerance("as printed", _printed)

NETWORK = "a measured bandwidth or latency: it goes into a model of a cluster, and is no prediction of one"

NOT_JUDGED = {
    "times: computed in 8 bits, by kernels that jaxdist does not have": [
        Entry("torchtitan", "tokens_per_s", 13, where=lambda r: r.precision.startswith("fp8")),
        Entry("Megatron-Bridge", "tokens_per_s", 9, where=lambda r: r.precision != "BF16"),
        Entry("NeMo 24.12", "tokens_per_s", 11),
    ],
    "times: the micro-batch is not told": [
        Entry("Megatron-LM README", "achieved_TFLOPs", 8),
        Entry("Llama3", "achieved_TFLOPs", 2),
    ],
    "times: what selective recomputation keeps is not told": [
        Entry("torchtitan", "tokens_per_s", 4, where=lambda r: r.precision.startswith("bf16")),
    ],
    "times: of mixtures of experts and of images the planner has no model": [
        Entry("Alpa", "achieved_TFLOPs", 22, where=lambda r: r.model.startswith(("MoE", "Wide-ResNet"))),
        Entry("Megatron-Bridge", "tokens_per_s", 1, where=lambda r: r.precision == "BF16"),
    ],
    "times: model, mesh and micro-batch are not told, and the chips are TPUs": [
        Entry("MaxText (JAX)", "achieved_TFLOPs", 12),
    ],
    "times: of a compilation, which is not predicted": [Entry("Alpa", "compile_time", 1)],
    NETWORK: [
        Entry("CSCS Alps NCCL", "all_reduce", 7),
        Entry("Galvatron hw config", "all_reduce", 5),
    ],
    "mesh and micro-batch were the planner's own choice and are not told": [
        Entry("Alpa", "peak_memory", 8, where=lambda r: r.table.startswith("fig8a")),
        Entry("Alpa", "achieved_TFLOPs iteration_time", 26, where=lambda r: r.table[:3] == "fig" and "GPT" in r.model),
    ],
    "what is recomputed, or the micro-batch, is not told; from these rows others are judged by what differs": [
        Entry("torchtitan", "peak_memory", 3, where=lambda r: r.table == "1"),
        Entry("torchtitan", "peak_memory", 1, where=lambda r: r.table == "6" and r.cp == 1),
    ],
    "what is recomputed, or the micro-batch, is not told": [
        Entry("torchtitan", "peak_memory", 3, where=lambda r: r.table in ("5", "H200 trainy")),
    ],
    "the shape of the model is not told": [Entry("DeepSpeed#5305", "peak_memory iteration_time", 8)],
    "latent attention and prediction of several tokens, for which there is no form here": [
        Entry("Megatron-Bridge", "model_TFLOPs", 1, where=lambda r: r.model.startswith("DeepSeek")),
    ],
    "the utilisation of the other three runs is taken from this one": [
        Entry("LLaMA", "gpu_hours", 1, where=lambda r: r.model == "65B"),
    ],
}
"""Reason -> rows that neither a closed form nor the planner's model of time judges."""
