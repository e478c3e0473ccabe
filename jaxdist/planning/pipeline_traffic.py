"""What crosses the mesh in one step of a pipeline, as `communication` tells it of a step without one.

Between neighbours in `pipeline` goes the residual stream, once per tick and way (Narayanan et al. 2021, section 2.2).
The stages share the vocabulary: what the last one has made goes to all, and what each makes of its part of the
embedding and of the loss is added up. Over `data` weights and gradients go as `parallel.pipeline.executor` says.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from jaxdist.config import Config
from jaxdist.mesh import DATA, PIPELINE
from jaxdist.models.loss import chunk_length
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
from jaxdist.sharding import Layout

NOT_NEEDED_BACKWARD = ("blocks.mlp.down_bias",)
"""Parameters that only shift a block's output: no gradient needs their value, so none gathers them again."""


def looks_up_positions(config: Config) -> bool:
    """Whether positions are those of each document, looked up in a table that is split as the residual stream is."""
    return config.model.family == "gpt" and config.model.documents == "apart"


def scattered_with_vectors(layout: Layout) -> bool:
    """Whether positions are added to the tokens' vectors before both are scattered: XLA:GPU makes one of two sums."""
    return layout.platform != "cpu" and layout.split("vocab") == layout.split("residual")


def predict(config: Config, parameters: list[Placed], layout: Layout, pipe: Pipeline) -> Iterator[Transfer]:
    """Every transfer but those of scalars."""
    for p in parameters:
        yield from _gradients(config, p, layout, pipe)
        yield from _weights(config, p, layout, pipe)
    stream = _Stream(config, layout, pipe)
    yield from stream.messages()
    yield from stream.layers()
    yield from stream.tops()
    yield stream.statistics()


def _name(p: Placed) -> str:
    return "layers" if p.stacked else "table and the like"


def _weights(config: Config, p: Placed, layout: Layout, pipe: Pipeline) -> Iterator[Transfer]:
    """Once per step; at stage 3 those of a layer whenever a tick runs it: in F, in B, and to compute it again."""
    arrays, elements = 1, p.use
    if p.stacked and config.parallel.zero < 3 and not pipe.flush:
        again = (pipe.recomputes and pipe.stages.depth > 1) or p.name not in NOT_NEEDED_BACKWARD
        arrays = pipe.ticks("F") + again * pipe.ticks("B")
        elements *= arrays
    elif p.stacked and config.parallel.zero == 3:
        runs = _gathered(p, layout, pipe)
        arrays, elements = runs * pipe.stages.depth, runs * p.use // pipe.stages.virtual
    what, width = f"weights of {_name(p)}", compute_width(config)
    if p.place.exchanged:
        own = elements if p.whole else elements // layout.size(DATA)
        yield transfer(layout, what, ALL_TO_ALL, layout.split("heads"), arrays, own, width)
    if not p.whole:
        yield transfer(layout, what, ALL_GATHER, {DATA}, arrays, elements, width)


def _gathered(p: Placed, layout: Layout, pipe: Pipeline) -> int:
    """How often a layer's weight is gathered at stage 3.

    Where a chunk is one layer, there is no loop over layers, and XLA makes one of all gathers of a weight in a tick:
    of those of B, and of F and B where a rank has no other chunk. Then ticks do not differ either, and XLA:CPU gathers
    once; XLA:GPU in each turn of a loop, and once for all segments of a single tick, which are no loops.
    """
    stages, forward, backward = pipe.stages, pipe.ticks("F"), pipe.ticks("B")
    again = p.name not in NOT_NEEDED_BACKWARD
    if stages.depth > 1:
        return forward + (pipe.recomputes + again) * backward
    if stages.virtual > 1 or not pipe.flush:
        return forward + again * backward
    if layout.platform == "cpu":
        return 1
    needing = [(end - first) for first, end, slots in pipe.table.segments if "F" in slots or again]
    return sum(ticks for ticks in needing if ticks > 1) + (1 in needing)


def _gradients(config: Config, p: Placed, layout: Layout, pipe: Pipeline) -> Iterator[Transfer]:
    """Once per step; from stage 2 on those of a layer in each tick that makes them: of B, or of W."""
    calls, elements, summed = 1, p.use, set(p.place.use.reduced)
    if p.stacked and config.parallel.zero >= 2:
        ticks = pipe.ticks("W" if pipe.schedule.split else "B")
        calls, elements = ticks * pipe.stages.depth, ticks * p.use // pipe.stages.virtual
    elif p.stacked and not pipe.flush:
        calls, elements = pipe.ticks("B"), pipe.ticks("B") * p.use
    what = f"gradients of {_name(p)}"
    if not p.whole:
        yield transfer(layout, what, REDUCE_SCATTER, {DATA}, calls, elements, F32)
        summed, elements = summed - {DATA}, elements // layout.size(DATA)
    if summed:
        yield transfer(layout, what, ALL_REDUCE, summed, calls, elements, F32)
    if p.place.exchanged:
        yield transfer(layout, what, ALL_TO_ALL, layout.split("heads"), calls, elements, F32)
    elif p.place.dealt:  # each device puts its heads' gradients where they belong, and all are added up
        whole = elements * p.elements * layout.parts("heads") // math.prod(p.place.in_use(p.shape))
        yield transfer(layout, what, ALL_REDUCE, layout.split("heads"), calls, whole, F32)


@dataclass(frozen=True)
class _Stream:
    """The residual stream [B, S, D] of a micro-batch, and what is made of it at both ends."""

    config: Config
    layout: Layout
    pipe: Pipeline

    @property
    def tokens(self) -> int:
        """Of a micro-batch, on one device."""
        config, ranks = self.config, self.layout.ranks
        rows = config.train.global_batch_size // self.pipe.schedule.micro_batches // ranks
        return rows * config.model.sequence

    @property
    def split(self) -> tuple[str, ...]:
        """The mesh axes that split its sequence."""
        return self.layout.split("residual")

    def moved(self, what: str, kind: str, axes, calls: int, part: bool = False) -> Transfer:
        """`calls` times the residual stream, or a device's own part of it."""
        elements = self.tokens * self.config.model.embed // (self.layout.parts("residual") if part else 1)
        return transfer(self.layout, what, kind, axes, calls, calls * elements, compute_width(self.config))

    def messages(self) -> Iterator[Transfer]:
        """What neighbours send each other."""
        for slot, what in (("F", "residual stream between stages"), ("B", "its gradient between stages")):
            yield self.moved(what, PERMUTE, {PIPELINE}, self.pipe.messages(slot), part=True)

    def layers(self) -> Iterator[Transfer]:
        """As of tensor and sequence parallelism (`communication`), in every tick that runs layers."""
        what, depth = "residual stream of the layers", self.pipe.stages.depth
        forward, backward = depth * self.pipe.ticks("F"), depth * self.pipe.ticks("B")
        weights = depth * self.pipe.ticks("W") if self.pipe.schedule.split else backward  # which gather their operand
        for logical in ("heads", "mlp"):
            again, gathered = self._again(logical)
            if self.split:
                moves = {REDUCE_SCATTER: forward + (1 + again) * backward}
                moves |= {ALL_GATHER: forward + (1 + gathered) * backward + weights}
            else:
                moves = {ALL_REDUCE: forward + (1 + again) * backward}
            for kind, calls in moves.items():
                yield self.moved(what, kind, self.layout.split(logical), calls)

    def _again(self, logical: str) -> tuple[int, int]:
        """Whether B computes a layer's product again, back onto the residual stream; and whether it gathers for it."""
        if not self.pipe.recomputes:
            block = self.config.model.remat == "block"
            return int(logical == "heads" and block), int(block and self.pipe.schedule.split)  # W gathers for itself
        last = logical == "mlp" and self.pipe.stages.depth == 1  # nobody needs what comes out of a chunk
        return int(not last), 1

    def tops(self) -> Iterator[Transfer]:
        """Embedding, the hand-over to the head, and their gradients."""
        vocab, pipe = self.layout.split("vocab"), self.pipe
        ends = (
            ("looked-up vectors", pipe.embedded, pipe.unembedded),
            ("last hidden states", pipe.ticks("H"), pipe.ticks("H")),
        )
        shared = [axis for axis in vocab if axis not in self.split]
        for what, added, gathered in ends:
            if self.split and set(self.split) <= set(vocab):
                yield self.moved(what, REDUCE_SCATTER, self.split, added)
            yield self.moved(what, ALL_REDUCE, shared, added, part=True)
            yield self.moved(what, ALL_GATHER, self.split, gathered)
        if looks_up_positions(self.config):
            calls = 0 if scattered_with_vectors(self.layout) else pipe.embedded
            yield self.moved("looked-up positions", REDUCE_SCATTER, self.split, calls)
        yield self.moved("last hidden states", ALL_REDUCE, {PIPELINE}, pipe.ticks("H"), part=True)
        yield self.moved("gradient of the looked-up vectors", ALL_REDUCE, {PIPELINE}, pipe.unembedded, part=True)

    def statistics(self) -> Transfer:
        """A maximum, a sum and the label's logit for each token, where the vocabulary is split."""
        sequence, heads = self.config.model.sequence, self.pipe.ticks("H")
        calls = 3 * heads * (sequence // chunk_length(self.layout, sequence, self.tokens // sequence))
        axes = self.layout.split("vocab")
        return transfer(self.layout, "statistics of the loss", ALL_REDUCE, axes, calls, 3 * heads * self.tokens, F32)
