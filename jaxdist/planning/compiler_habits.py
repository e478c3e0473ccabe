"""List where XLA sends something otherwise than theory says: by platform, since which jax, and how often instead.

Theory (`weight_traffic`, `stream_traffic`, `context_traffic`, `expert_traffic`) counts what the papers and the layout
ask for. XLA merges two transfers of the same array, lifts one that is the same in all turns out of a loop, and drops
one that nothing reads. `corrected` applies what is known of that to the calls of each transfer. What XLA holds
otherwise is in `memory_habits`; what no rule predicts, but only bounds, is in `explaining.known_differences`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

from jaxdist.config.stacks import path_to
from jaxdist.parallel.pipeline.stages import Stages
from jaxdist.planning.context_traffic import KEYS, STARTS
from jaxdist.planning.expert_traffic import ROWS
from jaxdist.planning.habit import BOTH, PREDICTED, Habit
from jaxdist.planning.parameter_layout import Placed
from jaxdist.planning.pipelines import Pipeline
from jaxdist.planning.predicted_collectives import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, Count, Transfer
from jaxdist.planning.runs import Step
from jaxdist.planning.stream_traffic import BETWEEN_STAGES, LAST, LOOKED_UP, LOOKED_UP_POSITIONS, STATISTICS
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


CORRECTIONS: list[Correction] = []


def corrects(
    name: str, what: tuple[str, ...], reason: str, on: tuple[str, ...] = BOTH
) -> Callable[[Callable[[Sent], Count]], Callable[[Sent], Count]]:
    """Make a function the `calls` of a correction, and append that to the table."""

    def add(calls: Callable[[Sent], Count]) -> Callable[[Sent], Count]:
        CORRECTIONS.append(Correction(name=name, platforms=on, what=what, calls=calls, reason=reason))
        return calls

    return add


def _is_in_no_loop(sent: Sent) -> bool:
    """Return whether it is a transfer of a parameter that no loop over layers runs."""
    p = sent.parameter
    return p is not None and p.layers == 1 and not sent.step.pipe


@corrects(
    "the only layer",
    what=(WEIGHTS,),
    on=("gpu",),
    reason="a loop of one layer is none, so that XLA:GPU gathers its weights once for the forward and the backward "
    "pass",
)
def _of_an_only_layer(sent: Sent) -> Count:
    if _is_in_no_loop(sent):
        return min(sent.transfer.calls, sent.step.runs.loops.forward)
    return sent.transfer.calls


@corrects(
    "weights of all groups",
    what=(WEIGHTS,),
    on=("cpu",),
    reason="XLA:CPU moves a gather of weights that no loop over layers runs out of the loop over micro-batches; "
    "XLA:GPU leaves it there",
)
def _once_for_all_groups(sent: Sent) -> Count:
    return 1 if _is_in_no_loop(sent) else sent.transfer.calls


@corrects(
    "sums of all groups",
    what=(GRADIENTS,),
    on=("gpu",),
    reason="XLA:GPU moves an all-reduce behind a loop that only adds to a sum",
)
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
    stages = _stages_of(p, step.pipe)
    if stages.virtual > 1 or not step.pipe.flush or step.config.parallel.zero != 3:
        return 0
    return stages.depth if stages.depth < 2 * stages.period else stages.depth % stages.period


def _stages_of(p: Placed, pipe: Pipeline) -> Stages:
    """Return the stages of the stack of layers that a parameter belongs to."""
    (found,) = (stages for name, stages in pipe.stages.stacks.items() if p.name.startswith(path_to(name)))
    return found


def _with_layers_in_no_loop(sent: Sent, calls_of_one: Count) -> Count:
    """Return the calls of all layers, where each one in no loop has `calls_of_one`."""
    layers = _layers_in_no_loop(sent)
    if not layers or not sent.step.pipe or not sent.parameter:
        return sent.transfer.calls
    depth = _stages_of(sent.parameter, sent.step.pipe).depth
    return sent.transfer.calls * (depth - layers) // depth + layers * calls_of_one


@corrects(
    "layers of a chunk in no loop, all ticks",
    what=(WEIGHTS,),
    on=("cpu",),
    reason="nothing of a rank's only layer, or of one that is left over of a period, differs from tick to tick, so "
    "XLA:CPU gathers its weights once",
)
def _once_for_all_ticks(sent: Sent) -> Count:
    return _with_layers_in_no_loop(sent, 1)


@corrects(
    "a chunk of one layer, single ticks",
    what=(WEIGHTS,),
    on=("gpu",),
    reason="XLA:GPU gathers the weights of a rank's only layer once in every turn of a loop over ticks, and once for "
    "all segments of a single tick, which are no loops",
)
def _once_for_segments_of_a_tick(sent: Sent) -> Count:
    pipe = sent.step.pipe
    # Of the rest of a period, no program for GPUs has been looked at.
    if pipe is None or not _layers_in_no_loop(sent) or not sent.parameter:
        return sent.transfer.calls
    if _stages_of(sent.parameter, pipe).depth > 1:
        return sent.transfer.calls
    backward = not (sent.parameter and sent.parameter.forward_only)
    lengths = [end - first for first, end, slots in pipe.table.segments if "F" in slots or backward]
    return _with_layers_in_no_loop(sent, sum(ticks for ticks in lengths if ticks > 1) + int(1 in lengths))


@corrects(
    "the last message",
    what=tuple(BETWEEN_STAGES.values()),
    reason="XLA drops a message that nothing reads where it is no part of a loop: in a segment of a single tick",
)
def _without_the_last_message(sent: Sent) -> Count:
    pipe = sent.step.pipe
    if pipe is None or not pipe.flush:
        return sent.transfer.calls
    (slot,) = (slot for slot, what in BETWEEN_STAGES.items() if what == sent.transfer.what)
    first, end, _ = [segment for segment in pipe.table.segments if slot in segment[2]][-1]
    return sent.transfer.calls - int(end - first == 1)


@corrects(
    "ticks that embed nothing",
    what=(LOOKED_UP, LOOKED_UP_POSITIONS),
    reason="in a segment of a single tick, which is no loop, XLA knows whether the first chunk reads the embedding",
)
def _without_what_no_stage_looks_up(sent: Sent) -> Count:
    pipe = sent.step.pipe
    transfer = sent.transfer
    looked_up = transfer.kind == REDUCE_SCATTER or (transfer.what == LOOKED_UP and transfer.kind != ALL_GATHER)
    if pipe is None or not pipe.flush or not looked_up:
        return transfer.calls
    needed = pipe.table.rows.embed.on
    alone = [first for first, end, slots in pipe.table.segments if "F" in slots and end - first == 1]
    return transfer.calls - sum(not needed[tick] for tick in alone)


@corrects(
    "positions with tokens",
    what=(LOOKED_UP_POSITIONS,),
    on=("gpu",),
    reason="XLA:GPU adds positions to the vectors of tokens before one reduce-scatter of both",
)
def _with_the_vectors_of_tokens(sent: Sent) -> Count:
    layout = sent.step.layout
    if sent.transfer.kind == REDUCE_SCATTER and layout.split("vocab") == layout.sequence_parallel:
        return 0
    return sent.transfer.calls


@corrects(
    "rows of a recomputed layer",
    what=(ROWS,),
    on=("cpu",),
    reason="XLA:CPU does not merge what a recomputed block sends to its experts with what the gradients of weights "
    "need",
)
def _rows_for_each_purpose(sent: Sent) -> Count:
    if sent.step.pipe:
        return sent.transfer.calls
    return sent.transfer.calls + sent.step.runs.passes.recomputed


@corrects(
    "starts of documents, all loops",
    what=(STARTS,),
    on=("cpu",),
    reason="where documents start is the same for all layers, so XLA:CPU gathers it before the loops over layers, if "
    "no loop over micro-batches is inside them",
)
def _starts_before_all_loops(sent: Sent) -> Count:
    runs = sent.step.runs
    if sent.step.pipe:
        return runs.loops.forward + runs.loops.backward
    # A loop of a single turn is none.
    return sent.transfer.calls if runs.micro_batches > 1 else runs.heads


@corrects(
    "starts of documents, forward loops",
    what=(STARTS,),
    on=("gpu",),
    reason="XLA:GPU gathers where documents start before the loop over layers of the forward pass, if no loop over "
    "micro-batches is inside it, and leaves the gather in that of the backward pass",
)
def _starts_before_forward_loops(sent: Sent) -> Count:
    runs = sent.step.runs
    if sent.step.pipe or sent.step.split.inside:
        return sent.transfer.calls
    return sent.transfer.calls - runs.passes.forward + runs.loops.forward


@corrects(
    "keys of a ring, all steps",
    what=(KEYS,),
    on=("cpu",),
    reason="the backward pass of a ring sends the keys and values that its recomputation sends: XLA:CPU sends them "
    "once",
)
def _keys_of_all_steps(sent: Sent) -> Count:
    """Return the calls where the backward pass sends all keys and values that its recomputation needs."""
    steps = sent.step.layout.parts(SEQUENCE) - 1
    return sent.transfer.calls - 2 * steps * _repeats_of_attention(sent.step)


@corrects(
    "keys of a ring, first step",
    what=(KEYS,),
    on=("gpu",),
    reason="XLA:GPU sends once what the first step of a ring sends in its recomputation and in its backward pass, "
    "because only that is outside the loops over the other steps",
)
def _keys_of_the_first_step(sent: Sent) -> Count:
    return sent.transfer.calls - 2 * _repeats_of_attention(sent.step)


@corrects(
    "logits of pairs",
    what=(STATISTICS, LAST),
    reason="where no loop makes the logits of a micro-batch, XLA makes them once for the loss of pairs and for its "
    "gradient",
)
def _logits_once(sent: Sent) -> Count:
    """Return the calls where the backward pass of the loss has the logits of the forward pass, and makes none again."""
    runs = sent.step.runs
    transfer = sent.transfer
    again = runs.heads_again * (runs.micro_batches == 1) * (sent.step.losses == 1)
    if transfer.what == STATISTICS:
        return transfer.calls - 2 * again
    return transfer.calls - again if transfer.kind == ALL_GATHER else transfer.calls


@corrects(
    "tokens of a reference",
    what=(LOOKED_UP, LOOKED_UP_POSITIONS),
    on=("gpu",),
    reason="where no loop over micro-batches looks tokens up, XLA:GPU looks them up once for the step and for its "
    "reference",
)
def _vectors_of_the_step(sent: Sent) -> Count:
    """Return the calls where the pass of a reference has the looked-up vectors of the step that it is a part of."""
    runs = sent.step.runs
    if sent.step.staged or runs.learns:
        return sent.transfer.calls
    return sent.transfer.calls - runs.heads * (runs.micro_batches == 1)


def _repeats_of_attention(step: Step) -> Count:
    """Return how often attention is repeated in one part of the program with its backward pass."""
    return step.runs.passes.recomputed + step.runs.passes.attended
