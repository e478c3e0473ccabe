"""Predict what moves with the activations of a step: the residual stream [B, S, D], at both ends and between stages.

Over the model axis moves the residual stream of the layers (Shoeybi et al. 2019, section 3; Korthikanti et al. 2022,
section 4.2.2). Neighbours along `pipeline` send each other the residual stream and its gradient, once per tick in each
direction (Narayanan et al. 2021, section 2.2). The stages share the vocabulary: the result of the last stage goes to
all of them, and what each makes of its part of the embedding and of the loss is summed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from jaxdist.config.matmuls import Matmul, attention_enters_mlp, columns_of, entering, normed_after
from jaxdist.config.trained import learns
from jaxdist.mesh import PIPELINE
from jaxdist.mesh.split import compute_width
from jaxdist.models.experts import METERS
from jaxdist.planning import context_traffic, expert_traffic
from jaxdist.planning.frozen import learns_tables, reports_routers
from jaxdist.planning.predicted_collectives import (
    ALL_GATHER,
    ALL_REDUCE,
    F32,
    INT32,
    PERMUTE,
    REDUCE_SCATTER,
    Count,
    Transfer,
    transfer,
)
from jaxdist.planning.runs import Step
from jaxdist.sharding import POSITIONS, RESIDUAL, SEQUENCE

STREAM_OF_LAYERS = "residual stream of the layers"
"""`Transfer.what` of tensor and sequence parallelism."""

LOOKED_UP = "looked-up vectors"
"""`Transfer.what` of the sums of what the parts of a table give."""

LOOKED_UP_POSITIONS = "looked-up positions"
"""`Transfer.what` of learned positions."""

LAST = "last hidden states"
"""`Transfer.what` of what the matmul with the output table takes, and of its gradient."""

STATISTICS = "statistics of the loss"
"""`Transfer.what` of the sums over a vocabulary that is split."""

BETWEEN_STAGES = {"F": "residual stream between stages", "B": "its gradient between stages"}
"""`Transfer.what` of messages, by slot of the schedule."""


def predict(step: Step) -> Iterator[Transfer]:
    """Yield the transfers of the activations of a decoder with one stack, and of their gradients."""
    for one in (step, *step.references):
        yield from of_stack(one)
        yield from beside_stacks(one)


def of_stack(step: Step) -> Iterator[Transfer]:
    """Yield those between the matmuls of the layers, for the step of a stack."""
    yield from _layers(step)
    yield from expert_traffic.predict(step)


def beside_stacks(step: Step) -> Iterator[Transfer]:
    """Yield all others: those of attention, which is the same in all layers, and those at the ends of the layers."""
    yield from context_traffic.predict(step)
    yield from _ends(step)
    yield _statistics(step)
    if step.config.train.learns_pairs:
        yield from _rows(step)
    if step.staged:
        yield from _between_stages(step)


def _moved(
    step: Step, what: str, kind: str, axes: Collection[str], calls: Count, part: bool = False, values: int = 0
) -> Transfer:
    """Move the residual stream of a micro-batch `calls` times, or with `part` only what a device has of it.

    With `values`, it is so many of each token.
    """
    parts = step.layout.size(*step.layout.sequence_parallel) if part else 1
    elements = step.tokens * (values or step.config.model.embed) // parts
    return transfer(step.layout, what, kind, axes, calls, calls * elements, compute_width(step.config))


def _layers(step: Step) -> Iterator[Transfer]:
    """Yield the moves of the residual stream between a layer's matmuls: tensor and sequence parallelism."""
    passes = step.runs.passes
    for logical in columns_of(step.config.model):
        # Where a layer is recomputed, attention's output is computed again for the MLP. A norm needs what goes into it.
        forward = passes.forward + passes.rerun
        again = forward + passes.backward + passes.recomputed
        needed = normed_after(step.config.model) or (logical == "heads" and attention_enters_mlp(step.config.model))
        leaves = forward + passes.recomputed * needed
        width, multiplying = entering(step.config.model, logical)
        multiplied = sum(matmuls[0].into for matmuls in multiplying)

        # (kind, calls, values of each token)
        moves: list[tuple[str, Count, int]] = []
        if step.layout.sequence_parallel:
            moves += [(REDUCE_SCATTER, leaves, 0), (REDUCE_SCATTER, passes.backward, width)]
            moves += [(ALL_GATHER, forward, width), (ALL_GATHER, passes.backward, 0)]
            for matmuls in multiplying:
                moves.append((ALL_GATHER, _gathered_again(step, logical, matmuls), matmuls[0].into))
            if width > multiplied:
                # No weight multiplies the rest, which a layer that does not keep its keys makes again.
                moves += [(ALL_GATHER, passes.backward * step.anew, width - multiplied)]
        else:
            moves += [(ALL_REDUCE, leaves, 0), (ALL_REDUCE, passes.backward, width)]
        for kind, calls, values in moves:
            yield _moved(step, STREAM_OF_LAYERS, kind, step.layout.split(logical), calls, values=values)
        if logical == "heads" and step.config.model.qk_norm == "full":
            # The sum of all heads' squares is made as often as queries are, and its gradient once.
            yield _mean_squares(step, again)


def _gathered_again(step: Step, logical: str, multiplying: Sequence[Matmul]) -> Count:
    """Return how often the backward pass gathers what enters these matmuls along `logical`."""
    runs = step.runs
    passes = runs.passes
    if logical == "mlp" and step.config.model.traits.routed:
        # The backward pass sends experts their rows again, from what it gathers anew. Where a layer keeps all, it keeps
        # what they have gathered; where it is recomputed in that pass, it gathers no more.
        anew = passes.backward * step.anew
        return anew + passes.recomputed * runs.stage
    # The gradient of a weight gathers its operand.
    return runs.merged(any(learns(step.config.model, matmul) for matmul in multiplying))


def _mean_squares(step: Step, calls: Count) -> Transfer:
    """Return the sums over the heads' squares of two numbers for each token, because one norm has all heads.

    They are summed over all queries and all keys.
    """
    axes = step.layout.split("heads")
    what = "mean squares of queries and keys"
    return transfer(step.layout, what, ALL_REDUCE, axes, calls, 2 * step.tokens * calls, F32)


def _ends(step: Step) -> Iterator[Transfer]:
    """Yield the moves of what is looked up, of the last hidden states, and of their gradients."""
    runs = step.runs
    split = step.layout.sequence_parallel
    vocab = step.layout.split("vocab")
    shared = [axis for axis in vocab if axis not in split]
    # Only the gradient of a table needs that of all looked-up vectors.
    unembedded = runs.unembedded * learns_tables(step.config)
    for what, summed, gathered in (
        (LOOKED_UP, runs.embedded, unembedded),
        (LAST, runs.heads * runs.learns, runs.heads + runs.heads_again),
    ):
        if split and set(split) <= set(vocab):
            yield _moved(step, what, REDUCE_SCATTER, split, summed)
        yield _moved(step, what, ALL_REDUCE, shared, summed, part=True)
        yield _moved(step, what, ALL_GATHER, split, gathered)
    yield from _positions(step, unembedded)
    if step.staged:
        yield _moved(step, LAST, ALL_REDUCE, {PIPELINE}, runs.heads, part=True)
        yield _moved(step, "gradient of the looked-up vectors", ALL_REDUCE, {PIPELINE}, unembedded, part=True)


def _positions(step: Step, unembedded: Count) -> Iterator[Transfer]:
    """Yield the moves of positions that are looked up in a table, and of their gradients."""
    traits = step.config.model.traits
    if not traits.text or traits.rotary:
        return
    split = step.layout.sequence_parallel
    vocab = step.layout.split("vocab")
    if step.layout.split(POSITIONS) != step.layout.split(RESIDUAL):
        # The table is not split as the residual stream is, so each device takes its part of what it has looked up.
        if step.staged:
            # The gradients of the parts are summed.
            yield _moved(step, LOOKED_UP_POSITIONS, ALL_REDUCE, split, unembedded)
        elif vocab:
            # Where tokens are looked up in a whole table too, one gather of the gradient serves both.
            yield _moved(step, LOOKED_UP_POSITIONS, ALL_GATHER, split, unembedded)
    elif step.config.model.documents_apart:
        # Each document has its own positions, so that they are looked up as tokens are.
        yield _moved(step, LOOKED_UP_POSITIONS, REDUCE_SCATTER, split, step.runs.embedded)
        if not step.staged and not vocab:
            # Otherwise the gradient of the looked-up vectors is gathered already.
            yield _moved(step, LOOKED_UP_POSITIONS, ALL_GATHER, split, unembedded)


def _statistics(step: Step) -> Transfer:
    """Return a maximum, a sum and the label's logit for each token, where the vocabulary is split.

    The gradient of a logit needs the first two.
    """
    heads = 3 * step.runs.heads + 2 * step.runs.heads_again
    axes = step.layout.split("vocab")
    return transfer(step.layout, STATISTICS, ALL_REDUCE, axes, heads * step.losses, heads * step.tokens, F32)


def _rows(step: Step) -> Iterator[Transfer]:
    """Yield the sums of the losses of rows, and of their labels, over the devices that share a row."""
    runs = step.runs
    axes = step.layout.split(SEQUENCE)
    rows = runs.heads * (step.tokens * step.layout.parts(SEQUENCE) // step.config.model.sequence)
    yield transfer(step.layout, "losses of rows", ALL_REDUCE, axes, runs.heads, rows, F32)
    # They count the pairs of a batch, and say which of them count.
    yield transfer(step.layout, "labels of rows", ALL_REDUCE, axes, 2 * runs.learns, 2 * runs.learns * rows, INT32)


def _between_stages(step: Step) -> Iterator[Transfer]:
    """Yield what stages send each other: messages of neighbours, and what each has counted of its own layers."""
    loops = step.runs.loops
    for slot, calls in (("F", loops.forward), ("B", loops.backward)):
        yield _moved(step, BETWEEN_STAGES[slot], PERMUTE, {PIPELINE}, calls, part=True)
    if reports_routers(step.config) and step.runs.flush:
        yield transfer(step.layout, "numbers to report", ALL_REDUCE, {PIPELINE}, 1, len(METERS), F32)
