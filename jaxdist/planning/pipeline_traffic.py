"""Predict the collectives of one step of a pipeline, as `communication` does for a step without one.

Neighbours along `pipeline` send each other the residual stream and its gradient, once per tick in each direction
(Narayanan et al. 2021, section 2.2). The stages share the vocabulary: the result of the last stage goes to all of them,
and what each makes of its part of the embedding and of the loss is summed. Over `data`, weights and gradients move as
`parallel.pipeline.executor` describes.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from jaxdist.config import Config
from jaxdist.mesh import PIPELINE, REPLICA
from jaxdist.models.experts import METERS
from jaxdist.models.loss import chunk_length
from jaxdist.parallel.gradient_compression import (
    BLOCK,
    LARGEST_OF,
    PLACED,
    SCALE,
    Compression,
    compression,
    matrix,
    padded,
)
from jaxdist.planning import context_traffic, expert_traffic
from jaxdist.planning.adapters import learns_columns, learns_tables
from jaxdist.planning.parameter_layout import Placed, compute_width
from jaxdist.planning.pipelines import Pipeline
from jaxdist.planning.predicted_collectives import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    F32,
    PERMUTE,
    REDUCE_SCATTER,
    Transfer,
    transfer,
)
from jaxdist.sharding import POSITIONS, RESIDUAL, SEQUENCE, Layout

BETWEEN_REPLICAS = "gradients between replicas"
"""`Transfer.what` of the sums over the replicas."""

SECOND_FACTORS = "second factors between replicas"
"""`Transfer.what` of the sums that powersgd can begin only when it has those of the first factors."""


def has_whole_positions(config: Config, layout: Layout) -> bool:
    """Return whether there is a table of learned positions that is not split as the residual stream is."""
    traits = config.model.traits
    return traits.text and not traits.rotary and layout.split(POSITIONS) != layout.split(RESIDUAL)


def norms_of_all_heads(config: Config, layout: Layout, calls: int, tokens: int) -> Iterator[Transfer]:
    """Yield the sums over the heads' squares of two numbers for each token, if one norm has all heads (qk_norm full).

    They are those of all queries and of all keys; `tokens` are those of a call.
    """
    if config.model.qk_norm == "full":
        what = "mean squares of queries and keys"
        yield transfer(layout, what, ALL_REDUCE, layout.split("heads"), calls, 2 * tokens * calls, F32)


def looks_up_positions(config: Config) -> bool:
    """Return whether each document has its own positions, from a table that is split as the residual stream is."""
    traits = config.model.traits
    return traits.text and not traits.rotary and config.model.documents == "apart"


def scattered_with_vectors(layout: Layout) -> bool:
    """Return whether positions are added to the tokens' vectors before one reduce-scatter of both.

    XLA:GPU merges the two sums into one.
    """
    return layout.platform != "cpu" and layout.split("vocab") == layout.sequence_parallel


def gathered(config: Config, p: Placed, layout: Layout, name: str, calls: int, elements: int) -> Iterator[Transfer]:
    """Yield the transfers that bring the weights of `name` from how they lie at rest to how they lie in use.

    `elements` are those in use, of all calls.
    """
    what = f"weights of {name}"
    width = p.width(config)
    if p.place.exchanged:
        # The heads are dealt before the all-gather, so each device sends only its own part.
        own = elements
        if not p.whole:
            own = elements // layout.size(*p.place.over)
        yield transfer(layout, what, ALL_TO_ALL, layout.split("heads"), calls, own, width)
    if not p.whole:
        yield transfer(layout, what, ALL_GATHER, p.place.over, calls, elements, width)


def between_replicas(config: Config, p: Placed, layout: Layout) -> Iterator[Transfer]:
    """Yield the transfers that sum a parameter's gradient over the replicas, and give all of them its new value.

    They run once per step, on what a device has of the parameter. A frozen one that the replicas split is gathered.
    """
    place = p.place
    if not place.deferred:
        return
    if place.replica_dim is not None:
        if p.trained:
            yield transfer(layout, BETWEEN_REPLICAS, REDUCE_SCATTER, place.deferred, 1, p.rest, F32)
        yield transfer(layout, "weights between replicas", ALL_GATHER, place.deferred, 1, p.rest, p.width(config))
        return
    if not p.trained:
        return
    yield from _summed(compression(config.parallel), p, layout)
    if place.crossing_dim is not None:
        yield transfer(layout, "summed gradients", ALL_GATHER, place.over, 1, p.rest, F32)


def _summed(rule: Compression | None, p: Placed, layout: Layout) -> Iterator[Transfer]:
    """Yield the transfers that sum a gradient over the replicas, by a rule of `parallel.gradient_compression`."""
    replicas = layout.size(REPLICA)
    stacked = p.place.stacked
    size = math.prod(p.shard)

    def moved(kind: str, elements: int, width: int, what: str = BETWEEN_REPLICAS) -> Transfer:
        return transfer(layout, what, kind, {REPLICA}, 1, elements, width)

    if rule is None or not rule.compresses(p.shard, stacked, replicas):
        yield moved(ALL_REDUCE, size, F32)
        return
    if rule.rule == "powersgd":
        layers = math.prod(p.shard[:stacked])
        rows, columns = matrix(p.shard[stacked:])
        yield moved(ALL_REDUCE, layers * rows * rule.rank, F32)
        yield moved(ALL_REDUCE, layers * columns * rule.rank, F32, SECOND_FACTORS)
        return
    numbers = padded(size, replicas)
    if rule.rule == "bfloat16":
        coded = 2 * numbers
    else:
        coded = numbers // BLOCK * (BLOCK + SCALE)
    # As INT8: one shot between two replicas, two shots among more.
    for kind in (ALL_REDUCE,) if replicas == 2 else (ALL_TO_ALL, ALL_GATHER):
        yield moved(kind, coded, 1)
    if rule.rule == "topk-int8":
        blocks = -(-size // LARGEST_OF)
        yield moved(ALL_GATHER, replicas * blocks * PLACED * rule.largest, 2)


def predict(config: Config, parameters: list[Placed], layout: Layout, pipe: Pipeline) -> Iterator[Transfer]:
    """Yield every transfer of a step, without scalars."""
    for p in parameters:
        if p.trained:
            yield from _gradients(config, p, layout, pipe)
        yield from _weights(config, p, layout, pipe)
        yield from between_replicas(config, p, layout)
    stream = _Stream(config, layout, pipe)
    yield from stream.messages()
    yield from stream.layers()
    yield from stream.experts()
    yield from stream.attention()
    yield from stream.ends()
    yield stream.statistics()


def _name(p: Placed) -> str:
    return "layers" if p.stacked else "table and the like"


def _weights(config: Config, p: Placed, layout: Layout, pipe: Pipeline) -> Iterator[Transfer]:
    """Yield the gathers of a parameter: once per step; at stage 3, in every tick that runs its layer."""
    arrays = 1
    elements = p.use
    if p.stacked and config.parallel.zero == 3:
        gathers = _gathers(p, layout, pipe)
        arrays = gathers * pipe.stages.depth
        elements = gathers * p.use // pipe.stages.virtual
    elif p.stacked and not pipe.flush:
        # Weights change between F and B, so each gathers its own version of the whole stack.
        arrays = pipe.ticks("F")
        if _read_backward(p, pipe):
            arrays += pipe.ticks("B")
        elements *= arrays
    yield from gathered(config, p, layout, _name(p), arrays, elements)


def _read_backward(p: Placed, pipe: Pipeline) -> bool:
    """Return whether B of a stack of layers reads the value of a parameter."""
    # B runs a chunk again, except for its last sum: nobody needs what comes out of a chunk.
    rerun = pipe.recomputes and pipe.stages.depth > 1
    return rerun or not p.forward_only


def _gathers(p: Placed, layout: Layout, pipe: Pipeline) -> int:
    """Return how often each layer's weight is gathered at stage 3: in F, in B, and where B recomputes the layer.

    Where a chunk is one layer, there is no loop over layers, and XLA merges the gathers of a weight within a tick: the
    two of B; and where a rank has no other chunk, also the one of F. In the latter case nothing differs from tick to
    tick, so XLA:CPU gathers once. XLA:GPU gathers in every iteration of a loop over ticks, and once for all segments of
    a single tick, which are no loops.
    """
    stages = pipe.stages
    forward = pipe.ticks("F")
    backward = pipe.ticks("B")
    again = int(not p.forward_only)
    if stages.depth > 1:
        return forward + (pipe.recomputes + again) * backward
    if stages.virtual > 1 or not pipe.flush:
        return forward + again * backward
    if layout.platform == "cpu":
        return 1
    lengths = [end - first for first, end, slots in pipe.table.segments if "F" in slots or again]
    return sum(ticks for ticks in lengths if ticks > 1) + int(1 in lengths)


def _gradients(config: Config, p: Placed, layout: Layout, pipe: Pipeline) -> Iterator[Transfer]:
    """Yield the reductions of a gradient: once per step; from stage 2 on, in every tick that makes that of a layer."""
    calls = 1
    elements = p.use
    summed = set(p.place.use.reduced - p.place.deferred)
    if p.stacked and config.parallel.zero >= 2:
        # W makes the gradients of weights where the schedule splits the backward pass.
        ticks = pipe.ticks("W" if pipe.schedule.split else "B")
        calls = ticks * pipe.stages.depth
        elements = ticks * p.use // pipe.stages.virtual
    elif p.stacked and not pipe.flush:
        calls = pipe.ticks("B")
        elements = calls * p.use
    what = f"gradients of {_name(p)}"
    if p.place.scatter_dim is not None:
        yield transfer(layout, what, REDUCE_SCATTER, p.place.over, calls, elements, F32)
        summed -= set(p.place.over)
        elements //= layout.size(*p.place.over)
    if summed:
        yield transfer(layout, what, ALL_REDUCE, summed, calls, elements, F32)
    if p.place.exchanged:
        yield transfer(layout, what, ALL_TO_ALL, layout.split("heads"), calls, elements, F32)
    elif p.place.dealt:
        # Each device puts its heads' gradients where they belong, and all are summed.
        whole = elements * p.elements * layout.parts("heads") // math.prod(p.place.in_use(p.shape))
        yield transfer(layout, what, ALL_REDUCE, layout.split("heads"), calls, whole, F32)


@dataclass(frozen=True)
class _Stream:
    """Transfers of the residual stream [B, S, D] of a micro-batch: in the layers, and at both ends of the pipeline."""

    config: Config
    layout: Layout
    pipe: Pipeline

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch on one device.

        Sequence parallelism does not change it: it splits the activations of these tokens, not the rows.
        """
        batch = self.config.train.global_batch_size
        rows = batch // self.pipe.schedule.micro_batches // self.layout.ranks
        return rows * self.config.model.sequence // self.layout.parts(SEQUENCE)

    @property
    def split(self) -> tuple[str, ...]:
        """The mesh axes that split its sequence further than that of other activations."""
        return self.layout.sequence_parallel

    def moved(self, what: str, kind: str, axes: Collection[str], calls: int, part: bool = False) -> Transfer:
        """Move the residual stream `calls` times, or with `part` only what a device has of it."""
        parts = self.layout.size(*self.split) if part else 1
        elements = self.tokens * self.config.model.embed // parts
        return transfer(self.layout, what, kind, axes, calls, calls * elements, compute_width(self.config))

    def messages(self) -> Iterator[Transfer]:
        """Yield the messages between neighbours."""
        for slot, what in (("F", "residual stream between stages"), ("B", "its gradient between stages")):
            yield self.moved(what, PERMUTE, {PIPELINE}, self.pipe.messages(slot), part=True)

    def layers(self) -> Iterator[Transfer]:
        """Yield the transfers of tensor and sequence parallelism (`communication`), in every tick that runs layers."""
        depth = self.pipe.stages.depth
        forward = depth * self.pipe.ticks("F")
        backward = depth * self.pipe.ticks("B")
        # The gradient of a weight gathers its operand, in W where the schedule splits the backward pass.
        weights = backward
        if self.pipe.schedule.split:
            weights = depth * self.pipe.ticks("W")
        for logical in ("heads", "mlp"):
            reduced = forward + (1 + self._reduced_again(logical)) * backward
            gathered = forward + (1 + self._gathered_again()) * backward
            if learns_columns(self.config, logical):
                gathered += weights
            if logical == "mlp" and self.config.model.traits.routed:
                # The rows for the gradients of weights are dispatched anew, from what B has gathered.
                gathered = forward + (2 + self.pipe.recomputes) * backward
            if self.split:
                moves = {REDUCE_SCATTER: reduced, ALL_GATHER: gathered}
            else:
                moves = {ALL_REDUCE: reduced}
            for kind, calls in moves.items():
                yield self.moved("residual stream of the layers", kind, self.layout.split(logical), calls)
            if logical == "heads":
                yield from norms_of_all_heads(self.config, self.layout, reduced, self.tokens)

    def experts(self) -> Iterator[Transfer]:
        """Yield the transfers between the routers and the experts of the layers, in every tick that runs layers."""
        depth = self.pipe.stages.depth
        forward = depth * self.pipe.ticks("F")
        backward = depth * self.pipe.ticks("B")
        weights = depth * self.pipe.ticks("W") if self.pipe.schedule.split else 0
        # A chunk that is run again sends its tokens once more, and back. Where it is one layer, XLA merges what goes
        # there with what the gradients of weights need.
        rerun = int(self.pipe.recomputes and depth > 1)
        merged = int(self.pipe.recomputes and depth == 1)
        # B sends the rows again, unless only W needs them: the results of the matmuls with them are kept then.
        again = int(not self.pipe.schedule.split or self.config.model.remat == "block")
        # The loads make the gradient of the loss, and are themselves the gradients of parameters that count.
        sums = backward + 2 * weights if self.pipe.schedule.split else 2 * backward
        calls = expert_traffic.Calls(
            rows=2 * forward + (2 + again + 2 * rerun + merged) * backward + weights,
            weights=forward + (2 + rerun) * backward,
            choices=forward + (1 + rerun) * backward,
            gradients=backward,
            sums=sums,
        )
        yield from expert_traffic.predict(self.config, self.layout, self.tokens, calls)
        if self.config.model.traits.routed and self.pipe.flush:
            # Each stage has counted for its own layers.
            numbers = len(METERS)
            yield transfer(self.layout, "numbers to report", ALL_REDUCE, {PIPELINE}, 1, numbers, F32)

    def attention(self) -> Iterator[Transfer]:
        """Yield the transfers of attention over `context`, in every tick that runs layers; none of them is for W."""
        depth = self.pipe.stages.depth
        forward = depth * self.pipe.ticks("F")
        backward = depth * self.pipe.ticks("B")
        # Where a chunk of several layers is run again, a loop of its own does that.
        again = backward if self.pipe.recomputes and depth > 1 else 0
        # Only with remat none are the results of attention kept.
        recomputed = 0 if self.config.model.remat == "none" else backward - again
        starts = forward + backward + again
        if self.layout.platform == "cpu":
            # Where documents start is the same for all layers, so XLA:CPU gathers it before the loops over layers.
            starts = self.pipe.ticks("F") + self.pipe.ticks("B")
        passes = context_traffic.Passes(forward + again, recomputed, backward, starts)
        yield from context_traffic.predict(self.config, self.layout, self.tokens, passes)

    def _reduced_again(self, logical: str) -> int:
        """Return whether B recomputes a matmul that contracts `logical`, back onto the residual stream."""
        if self.pipe.recomputes:
            # Nobody needs what comes out of a chunk, so not the last matmul of a chunk of one layer.
            last = logical == "mlp" and self.pipe.stages.depth == 1
            return int(not last)
        return int(logical == "heads" and self.config.model.remat == "block")

    def _gathered_again(self) -> int:
        """Return whether B gathers the residual stream once more, to recompute matmuls."""
        if self.pipe.recomputes:
            return 1
        # Without a split, the gather for the gradients of weights serves the recomputation too; W gathers for itself.
        return int(self.config.model.remat == "block" and self.pipe.schedule.split)

    def ends(self) -> Iterator[Transfer]:
        """Yield the transfers of the embedding, of the hand-over to the head, and of their gradients."""
        pipe = self.pipe
        # Frozen tables need no gradient of what was looked up.
        unembedded = pipe.unembedded if learns_tables(self.config) else 0
        vocab = self.layout.split("vocab")
        shared = [axis for axis in vocab if axis not in self.split]
        ends = (
            ("looked-up vectors", pipe.embedded, unembedded),
            ("last hidden states", pipe.ticks("H"), pipe.ticks("H")),
        )
        for what, summed, gathered in ends:
            if self.split and set(self.split) <= set(vocab):
                yield self.moved(what, REDUCE_SCATTER, self.split, summed)
            yield self.moved(what, ALL_REDUCE, shared, summed, part=True)
            yield self.moved(what, ALL_GATHER, self.split, gathered)
        if has_whole_positions(self.config, self.layout):
            # Each device takes its part of what it looked up in a whole table; the gradients of the parts are summed.
            yield self.moved("looked-up positions", ALL_REDUCE, self.split, unembedded)
        elif looks_up_positions(self.config):
            calls = 0 if scattered_with_vectors(self.layout) else pipe.embedded
            yield self.moved("looked-up positions", REDUCE_SCATTER, self.split, calls)
        yield self.moved("last hidden states", ALL_REDUCE, {PIPELINE}, pipe.ticks("H"), part=True)
        yield self.moved("gradient of the looked-up vectors", ALL_REDUCE, {PIPELINE}, unembedded, part=True)

    def statistics(self) -> Transfer:
        """Return a maximum, a sum and the label's logit for each token, where the vocabulary is split."""
        sequence = self.config.model.sequence // self.layout.parts(SEQUENCE)
        heads = self.pipe.ticks("H")
        chunks = sequence // chunk_length(self.layout, sequence, self.tokens // sequence)
        return transfer(
            self.layout,
            "statistics of the loss",
            ALL_REDUCE,
            self.layout.split("vocab"),
            calls=3 * heads * chunks,
            elements=3 * heads * self.tokens,
            width=F32,
        )
