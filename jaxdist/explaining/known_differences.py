"""List the expected differences between prediction and compiled program: where, since which jax, and why.

The prediction is made for jax 0.10: theory, corrected by `compiler_habits`. It is exact except for what is listed here.
Where a compiler does something else that a rule can only bound, the rule is in `KNOWN`, and `explain` reports the
difference as known. Any other difference is a fault of the prediction or of the program.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from jaxdist.explaining.compared import Row
from jaxdist.mesh.split import Split
from jaxdist.planning.habit import Habit
from jaxdist.planning.pipelines import pipeline_of
from jaxdist.planning.predicted_collectives import ALL_GATHER, ALL_REDUCE, F32, Transfer
from jaxdist.planning.stream_traffic import STREAM_OF_LAYERS
from jaxdist.planning.weight_traffic import GRADIENTS, WEIGHTS
from jaxdist.sharding import Layout

GRADIENTS_OF_LAYERS = f"{GRADIENTS}layers"
"""`Transfer.what` of the reductions of the layers' gradients."""


@dataclass(frozen=True)
class Case:
    """A compiled step and its prediction."""

    split: Split
    layout: Layout
    jax: str
    """The version of jax that compiled it."""
    transfers: Sequence[Transfer]
    """The predicted collectives."""


@dataclass(frozen=True, kw_only=True)
class Known(Habit):
    """A kind of difference that is expected."""

    applies: Callable[[Row, Case], bool]
    """Whether a row differs in this way, to the element."""


def reason(row: Row, case: Case) -> str:
    """Return why `row` is expected to differ from its prediction; empty where that is not expected.

    An unexpected difference makes `explain` exit with 1.
    """
    for known in KNOWN:
        if known.occurs(case.layout.platform, case.jax) and known.applies(row, case):
            return known.reason
    return ""


def _has_no_prediction(row: Row, case: Case) -> bool:
    return not row.has_prediction


def _sends_once_for_all_groups(row: Row, case: Case) -> bool:
    """Return whether gradients of layers are reduced once per step, not once per group of micro-batches."""
    config = case.split.config
    in_groups = config.parallel.zero >= 2 and config.parallel.micro_batches == "outside"
    if pipeline_of(case.split) or not in_groups:
        return False
    groups = config.train.accumulation
    reduced = _predicted(row, case, ALL_REDUCE, GRADIENTS_OF_LAYERS)
    return _sends_less(row, [one.elements - one.elements // groups for one in reduced], F32)


def _sends_once_for_all_ticks(row: Row, case: Case) -> bool:
    """Return whether gradients of layers are reduced once per loop over ticks, not once per tick."""
    pipe = pipeline_of(case.split)
    if not pipe:
        return False
    # The ticks that make gradients of weights, and the loops in which the executor runs these ticks.
    slot = "W" if pipe.schedule.split else "B"
    ticks = pipe.ticks(slot)
    loops = sum(slot in slots for _, _, slots in pipe.table.segments)
    reduced = _predicted(row, case, ALL_REDUCE, GRADIENTS_OF_LAYERS)
    in_ticks = [one for one in reduced if one.calls % ticks == 0]
    return _sends_less(row, [one.elements - one.elements // ticks * loops for one in in_ticks], F32)


def _sends_once_for_all_ticks_of_one_layer(row: Row, case: Case) -> bool:
    """Return whether a stage is one layer, and gradients are reduced once per loop over ticks, not once per tick."""
    pipe = pipeline_of(case.split)
    # No loop over layers stands between the gradients and the loop over ticks.
    return pipe is not None and pipe.stages.depth == 1 and _sends_once_for_all_ticks(row, case)


def _gathers_once_for_both_products(row: Row, case: Case) -> bool:
    """Return whether B gathers the residual stream once, both to recompute a layer and for gradients of its weights.

    Only a stage of one layer may differ in this way.
    """
    pipe = pipeline_of(case.split)
    if not pipe or pipe.stages.depth > 1 or pipe.schedule.split or not pipe.recomputes:
        return False
    gathered = _predicted(row, case, ALL_GATHER, STREAM_OF_LAYERS)
    once_a_tick = [one.elements // one.calls * pipe.ticks("B") for one in gathered]
    return _sends_less(row, once_a_tick, case.split.width)


def _gathers_layers_once(row: Row, case: Case) -> bool:
    """Return whether weights of layers are gathered once, and not in both passes, where no loop runs the layers."""
    if not case.split.unrolled:
        return False
    gathered = _predicted(row, case, ALL_GATHER, f"{WEIGHTS}layers")
    return _sends_less(row, [one.elements // 2 for one in gathered if one.calls % 2 == 0], case.split.width)


def _predicted(row: Row, case: Case, kind: str, what: str) -> list[Transfer]:
    """Return the transfers of this kind and purpose that are predicted in `row`."""
    if row.kind != kind:
        return []
    return [one for one in case.transfers if (one.axes, one.kind, one.what) == (row.axes, kind, what)]


def _sends_less(row: Row, savings: Iterable[int], width: int) -> bool:
    """Return whether the program leaves out exactly some of `savings`, in elements of `width` bytes."""
    # XLA decides for each of them by itself, so any sum of some of them is possible.
    sums = {0}
    for saved in savings:
        sums |= {saved + others for others in sums}
    return any(row.without(saved, width).as_predicted for saved in sums)


KNOWN = (
    Known(
        name="classifier with dropout",
        applies=_has_no_prediction,
        reason="a classifier with dropout runs all rows of a micro-batch at once, so that its masks are those of one "
        "device, and the compiler chooses where gradients and statistics are reduced",
    ),
    Known(
        name="micro-batches outside the layers",
        platforms=("gpu",),
        since="0.11",
        applies=_sends_once_for_all_groups,
        reason="XLA:GPU since jax 0.11 adds up small gradients of the layers, such as those of norms and biases, over "
        "all micro-batches, and reduces them once",
    ),
    Known(
        name="unrolled layers",
        platforms=("cpu",),
        applies=_gathers_layers_once,
        reason="XLA:CPU gathers the weights of a layer that no loop runs once for the forward and the backward pass",
    ),
    Known(
        name="ticks of stages of one layer",
        platforms=("gpu",),
        applies=_sends_once_for_all_ticks_of_one_layer,
        reason="XLA:GPU adds up gradients of a stage's only layer over the ticks of a loop, and reduces them once",
    ),
    Known(
        name="ticks of a pipeline",
        platforms=("gpu",),
        since="0.11",
        applies=_sends_once_for_all_ticks,
        reason="XLA:GPU since jax 0.11 adds up gradients of the layers over the ticks of a loop, and reduces them once",
    ),
    Known(
        name="stages of one layer",
        platforms=("gpu",),
        applies=_gathers_once_for_both_products,
        reason="XLA:GPU gathers the residual stream once, where the backward pass of a stage of one "
        "layer needs it twice",
    ),
)
