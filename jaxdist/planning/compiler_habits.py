"""List where XLA sends something otherwise than theory says: by platform, since which jax, and how often instead.

Theory (`weight_traffic`, `stream_traffic`, `context_traffic`, `expert_traffic`) counts what the papers and the layout
ask for. XLA merges two transfers of the same array, lifts one that is the same in all turns out of a loop, and drops
one that nothing reads. `corrected` applies what is known of that to the calls of each transfer. What XLA holds
otherwise is in `memory_habits`; what no rule predicts, but only bounds, is in `known_differences`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

from jaxdist.planning.context_traffic import KEYS, STARTS
from jaxdist.planning.expert_traffic import ROWS
from jaxdist.planning.habit import PREDICTED, Habit
from jaxdist.planning.parameter_layout import Placed
from jaxdist.planning.predicted_collectives import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, Count, Transfer
from jaxdist.planning.runs import Step
from jaxdist.planning.stream_traffic import BETWEEN_STAGES, LOOKED_UP, LOOKED_UP_POSITIONS
from jaxdist.planning.weight_traffic import GRADIENTS, WEIGHTS
from jaxdist.sharding import SEQUENCE, Layout


class Sent(NamedTuple):
    """A transfer as theory says it, of a parameter or of activations."""

    transfer: Transfer
    step: Step
    parameter: Placed | None = None


@dataclass(frozen=True, kw_only=True)
class Correction(Habit):
    """A habit that changes how often something is sent."""

    what: tuple[str, ...]
    """How `Transfer.what` begins of what it may concern."""
    calls: Callable[[Sent], Count]
    """How often XLA sends such a transfer: as often as theory says where the habit does not concern it."""


def in_force(layout: Layout, jax: str = PREDICTED) -> list[Correction]:
    """Return the corrections of theory on the platform of `layout`, with this version of jax."""
    return [correction for correction in CORRECTIONS if correction.occurs(layout.platform, jax)]


def corrected(sent: Sent, corrections: Iterable[Correction]) -> Transfer:
    """Return a transfer as XLA sends it."""
    for correction in corrections:
        transfer = sent.transfer
        if not transfer.what.startswith(correction.what):
            continue
        calls = correction.calls(sent)
        if calls != transfer.calls:
            elements = transfer.elements * calls // transfer.calls
            sent = sent._replace(transfer=replace(transfer, calls=calls, elements=elements))
    return sent.transfer


def _is_in_no_loop(sent: Sent) -> bool:
    """Return whether it is a transfer of a parameter that no loop over layers runs."""
    p = sent.parameter
    return p is not None and p.layers == 1 and not sent.step.pipe


def _of_an_only_layer(sent: Sent) -> Count:
    if _is_in_no_loop(sent):
        return min(sent.transfer.calls, sent.step.runs.loops.forward)
    return sent.transfer.calls


def _once_for_all_groups(sent: Sent) -> Count:
    return 1 if _is_in_no_loop(sent) else sent.transfer.calls


def _behind_the_sum_of_groups(sent: Sent) -> Count:
    adds_up = sent.transfer.kind == ALL_REDUCE and _is_in_no_loop(sent)
    if adds_up and sent.parameter and sent.parameter.place.deal is None:
        return 1
    return sent.transfer.calls


def _layers_in_no_loop(sent: Sent) -> int:
    """Return how many layers of a rank no loop runs, if it is of a parameter that is gathered there (stage 3).

    A turn of the loop over a chunk's layers runs a period of kinds. A loop of a single turn is none, and what is left
    over of a period is in none.
    """
    step = sent.step
    p = sent.parameter
    if p is None or not p.stacked or not step.pipe:
        return 0
    stages = step.pipe.stages
    if stages.virtual > 1 or not step.pipe.flush or step.config.parallel.zero != 3:
        return 0
    return stages.depth if stages.depth < 2 * stages.period else stages.depth % stages.period


def _with_layers_in_no_loop(sent: Sent, calls_of_one: Count) -> Count:
    """Return the calls of all layers, where each one in no loop has `calls_of_one`."""
    layers = _layers_in_no_loop(sent)
    if not layers or not sent.step.pipe:
        return sent.transfer.calls
    depth = sent.step.pipe.stages.depth
    return sent.transfer.calls * (depth - layers) // depth + layers * calls_of_one


def _once_for_all_ticks(sent: Sent) -> Count:
    return _with_layers_in_no_loop(sent, 1)


def _once_for_segments_of_a_tick(sent: Sent) -> Count:
    pipe = sent.step.pipe
    # Of the rest of a period, no program for GPUs has been looked at.
    if pipe is None or not _layers_in_no_loop(sent) or pipe.stages.depth > 1:
        return sent.transfer.calls
    backward = not (sent.parameter and sent.parameter.forward_only)
    lengths = [end - first for first, end, slots in pipe.table.segments if "F" in slots or backward]
    return _with_layers_in_no_loop(sent, sum(ticks for ticks in lengths if ticks > 1) + int(1 in lengths))


def _without_the_last_message(sent: Sent) -> Count:
    pipe = sent.step.pipe
    if pipe is None or not pipe.flush:
        return sent.transfer.calls
    (slot,) = (slot for slot, what in BETWEEN_STAGES.items() if what == sent.transfer.what)
    first, end, _ = [segment for segment in pipe.table.segments if slot in segment[2]][-1]
    return sent.transfer.calls - int(end - first == 1)


def _without_what_no_stage_looks_up(sent: Sent) -> Count:
    pipe = sent.step.pipe
    transfer = sent.transfer
    looked_up = transfer.kind == REDUCE_SCATTER or (transfer.what == LOOKED_UP and transfer.kind != ALL_GATHER)
    if pipe is None or not pipe.flush or not looked_up:
        return transfer.calls
    needed = pipe.table.rows.embed.on
    alone = [first for first, end, slots in pipe.table.segments if "F" in slots and end - first == 1]
    return transfer.calls - sum(not needed[tick] for tick in alone)


def _with_the_vectors_of_tokens(sent: Sent) -> Count:
    layout = sent.step.layout
    if sent.transfer.kind == REDUCE_SCATTER and layout.split("vocab") == layout.sequence_parallel:
        return 0
    return sent.transfer.calls


def _rows_for_each_purpose(sent: Sent) -> Count:
    if sent.step.pipe:
        return sent.transfer.calls
    return sent.transfer.calls + sent.step.runs.passes.recomputed


def _starts_before_all_loops(sent: Sent) -> Count:
    runs = sent.step.runs
    if sent.step.pipe:
        return runs.loops.forward + runs.loops.backward
    # A loop of a single turn is none.
    return sent.transfer.calls if runs.micro_batches > 1 else runs.heads


def _starts_before_forward_loops(sent: Sent) -> Count:
    runs = sent.step.runs
    if sent.step.pipe or sent.step.split.inside:
        return sent.transfer.calls
    return sent.transfer.calls - runs.passes.forward + runs.loops.forward


def _keys_of_all_steps(sent: Sent) -> Count:
    """Return the calls where the backward pass sends all keys and values that its recomputation needs."""
    steps = sent.step.layout.parts(SEQUENCE) - 1
    return sent.transfer.calls - 2 * steps * _repeats_of_attention(sent.step)


def _keys_of_the_first_step(sent: Sent) -> Count:
    return sent.transfer.calls - 2 * _repeats_of_attention(sent.step)


def _repeats_of_attention(step: Step) -> Count:
    """Return how often attention is repeated in one part of the program with its backward pass."""
    return step.runs.passes.recomputed + step.runs.passes.attended


CORRECTIONS = (
    Correction(
        name="the only layer",
        platforms=("gpu",),
        since="0.10",
        what=(WEIGHTS,),
        calls=_of_an_only_layer,
        reason="a loop of one layer is none, so that XLA:GPU gathers its weights once for the forward and the backward "
        "pass",
    ),
    Correction(
        name="weights of all groups",
        platforms=("cpu",),
        since="0.10",
        what=(WEIGHTS,),
        calls=_once_for_all_groups,
        reason="XLA:CPU moves a gather of weights that no loop over layers runs out of the loop over micro-batches; "
        "XLA:GPU leaves it there",
    ),
    Correction(
        name="sums of all groups",
        platforms=("gpu",),
        since="0.10",
        what=(GRADIENTS,),
        calls=_behind_the_sum_of_groups,
        reason="XLA:GPU moves an all-reduce behind a loop that only adds to a sum",
    ),
    Correction(
        name="layers of a chunk in no loop, all ticks",
        platforms=("cpu",),
        since="0.10",
        what=(WEIGHTS,),
        calls=_once_for_all_ticks,
        reason="nothing of a rank's only layer, or of one that is left over of a period, differs from tick to tick, so "
        "XLA:CPU gathers its weights once",
    ),
    Correction(
        name="a chunk of one layer, single ticks",
        platforms=("gpu",),
        since="0.10",
        what=(WEIGHTS,),
        calls=_once_for_segments_of_a_tick,
        reason="XLA:GPU gathers the weights of a rank's only layer once in every turn of a loop over ticks, and once "
        "for all segments of a single tick, which are no loops",
    ),
    Correction(
        name="the last message",
        platforms=("cpu", "gpu"),
        since="0.10",
        what=tuple(BETWEEN_STAGES.values()),
        calls=_without_the_last_message,
        reason="XLA drops a message that nothing reads where it is no part of a loop: in a segment of a single tick",
    ),
    Correction(
        name="ticks that embed nothing",
        platforms=("cpu", "gpu"),
        since="0.10",
        what=(LOOKED_UP, LOOKED_UP_POSITIONS),
        calls=_without_what_no_stage_looks_up,
        reason="in a segment of a single tick, which is no loop, XLA knows whether the first chunk reads the embedding",
    ),
    Correction(
        name="positions with tokens",
        platforms=("gpu",),
        since="0.10",
        what=(LOOKED_UP_POSITIONS,),
        calls=_with_the_vectors_of_tokens,
        reason="XLA:GPU adds positions to the vectors of tokens before one reduce-scatter of both",
    ),
    Correction(
        name="rows of a recomputed layer",
        platforms=("cpu",),
        since="0.10",
        what=(ROWS,),
        calls=_rows_for_each_purpose,
        reason="XLA:CPU does not merge what a recomputed block sends to its experts with what the gradients of weights "
        "need",
    ),
    Correction(
        name="starts of documents, all loops",
        platforms=("cpu",),
        since="0.10",
        what=(STARTS,),
        calls=_starts_before_all_loops,
        reason="where documents start is the same for all layers, so XLA:CPU gathers it before the loops over layers, "
        "if no loop over micro-batches is inside them",
    ),
    Correction(
        name="starts of documents, forward loops",
        platforms=("gpu",),
        since="0.10",
        what=(STARTS,),
        calls=_starts_before_forward_loops,
        reason="XLA:GPU gathers where documents start before the loop over layers of the forward pass, if no loop over "
        "micro-batches is inside it, and leaves the gather in that of the backward pass",
    ),
    Correction(
        name="keys of a ring, all steps",
        platforms=("cpu",),
        since="0.10",
        what=(KEYS,),
        calls=_keys_of_all_steps,
        reason="the backward pass of a ring sends the keys and values that its recomputation sends: XLA:CPU sends them "
        "once",
    ),
    Correction(
        name="keys of a ring, first step",
        platforms=("gpu",),
        since="0.10",
        what=(KEYS,),
        calls=_keys_of_the_first_step,
        reason="XLA:GPU sends once what the first step of a ring sends in its recomputation and in its backward pass, "
        "because only that is outside the loops over the other steps",
    ),
)
