"""Differences between the prediction and the compiled program that are expected: where, since which jax, and why.

The prediction is exact for jax 0.10. What a newer compiler does otherwise, and can be bounded by a rule, is listed
here. `explain` reports such a row as known; any other difference is a fault of the prediction or of the program.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from packaging.version import Version

from jaxdist.config import Config
from jaxdist.planning.parameter_layout import compute_width
from jaxdist.planning.pipelines import Pipeline, pipeline_of
from jaxdist.planning.predicted_collectives import ALL_GATHER, ALL_REDUCE, F32, Transfer
from jaxdist.sharding import Layout

if TYPE_CHECKING:
    from jaxdist.planning.report import Row

GRADIENTS_OF_LAYERS = "gradients of layers"
STREAM_OF_LAYERS = "residual stream of the layers"
"""`Transfer.what` of two purposes."""


@dataclass(frozen=True)
class Case:
    """The step that was compiled."""

    config: Config
    layout: Layout
    jax: str
    """The version that compiled it."""
    transfers: Sequence[Transfer]
    """As predicted."""


@dataclass(frozen=True)
class Known:
    """A kind of difference that is expected."""

    name: str
    platforms: tuple[str, ...]
    """Of `Layout.platform`."""
    since: str
    """The first version of jax that has it."""
    applies: Callable[[Row, Case], bool]
    """Whether a row differs in this way, to the element."""
    reason: str

    def explains(self, row: Row, case: Case) -> bool:
        if case.layout.platform not in self.platforms:
            return False
        if Version(case.jax).release < Version(self.since).release:
            return False
        return self.applies(row, case)


def reason(row: Row, case: Case) -> str:
    """Why it is expected that `row` is not as predicted; empty where it is not expected."""
    for known in KNOWN:
        if known.explains(row, case):
            return known.reason
    return ""


def _is_not_foretold(row: Row, case: Case) -> bool:
    return not row.foretold


def _sends_once_for_all_groups(row: Row, case: Case) -> bool:
    """Gradients of layers that are predicted once per group of micro-batches go over the axes of `row` once a step."""
    config = case.config
    in_groups = config.parallel.zero >= 2 and config.parallel.micro_batches == "outside"
    if pipeline_of(config, case.layout) or not in_groups:
        return False
    groups = config.train.accumulation
    reduced = _predicted(row, case, ALL_REDUCE, GRADIENTS_OF_LAYERS)
    return _sends_less(row, [one.elements - one.elements // groups for one in reduced], F32)


def _sends_once_for_all_ticks(row: Row, case: Case) -> bool:
    """Gradients of layers that are predicted once per tick go over the axes of `row` once per loop over ticks."""
    pipe = pipeline_of(case.config, case.layout)
    if not pipe:
        return False
    ticks, loops = _ticks_and_loops(pipe)
    reduced = _predicted(row, case, ALL_REDUCE, GRADIENTS_OF_LAYERS)
    in_ticks = [one for one in reduced if one.calls % ticks == 0]
    return _sends_less(row, [one.elements - one.elements // ticks * loops for one in in_ticks], F32)


def _sends_once_for_all_ticks_of_one_layer(row: Row, case: Case) -> bool:
    """As `_sends_once_for_all_ticks`, where a stage is one layer, and so no loop stands between gradients and ticks."""
    pipe = pipeline_of(case.config, case.layout)
    return bool(pipe) and pipe.stages.depth == 1 and _sends_once_for_all_ticks(row, case)


def _ticks_and_loops(pipe: Pipeline) -> tuple[int, int]:
    """In how many ticks gradients of weights are made, and in how many loops the executor runs these ticks."""
    slot = "W" if pipe.schedule.split else "B"
    loops = [slots for _, _, slots in pipe.table.segments if slot in slots]
    return pipe.ticks(slot), len(loops)


def _gathers_once_for_both_products(row: Row, case: Case) -> bool:
    """Where a stage is one layer that B computes again, B gathers the residual stream once for that and for gradients
    of weights."""
    pipe = pipeline_of(case.config, case.layout)
    if not pipe or pipe.stages.depth > 1 or pipe.schedule.split or not pipe.recomputes:
        return False
    gathered = _predicted(row, case, ALL_GATHER, STREAM_OF_LAYERS)
    once_a_tick = [one.elements // one.calls * pipe.ticks("B") for one in gathered]
    return _sends_less(row, once_a_tick, compute_width(case.config))


def _predicted(row: Row, case: Case, kind: str, what: str) -> list[Transfer]:
    """The transfers of this kind and purpose that are predicted in `row`."""
    if row.kind != kind:
        return []
    return [one for one in case.transfers if (one.axes, one.kind, one.what) == (row.axes, kind, what)]


def _sends_less(row: Row, savings: Iterable[int], width: int) -> bool:
    """Whether the program leaves out exactly some of `savings`, in elements of `width` bytes: XLA chooses for each."""
    sums = {0}
    for saved in savings:
        sums |= {saved + others for others in sums}
    return any(row.without(saved, width).as_predicted for saved in sums)


KNOWN = (
    Known(
        "classifier with dropout",
        platforms=("cpu", "gpu"),
        since="0.10",
        applies=_is_not_foretold,
        reason="a classifier with dropout runs all rows of a micro-batch at once, so that its masks are those of one "
        "device, and the compiler chooses where gradients and statistics are reduced",
    ),
    Known(
        "micro-batches outside the layers",
        platforms=("gpu",),
        since="0.11",
        applies=_sends_once_for_all_groups,
        reason="XLA:GPU since jax 0.11 adds up small gradients of the layers, such as those of norms and biases, over "
        "all micro-batches, and reduces them once",
    ),
    Known(
        "ticks of stages of one layer",
        platforms=("gpu",),
        since="0.10",
        applies=_sends_once_for_all_ticks_of_one_layer,
        reason="XLA:GPU adds up gradients of a stage's only layer over the ticks of a loop, and reduces them once",
    ),
    Known(
        "ticks of a pipeline",
        platforms=("gpu",),
        since="0.11",
        applies=_sends_once_for_all_ticks,
        reason="XLA:GPU since jax 0.11 adds up gradients of the layers over the ticks of a loop, and reduces them once",
    ),
    Known(
        "stages of one layer",
        platforms=("gpu",),
        since="0.10",
        applies=_gathers_once_for_both_products,
        reason="XLA:GPU gathers the residual stream once, where the backward pass of a stage of one "
        "layer needs it twice",
    ),
)
