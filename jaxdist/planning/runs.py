"""Say how often a device runs each part of a step: the table that every predicted transfer multiplies.

A device passes through its layers in loops. Without a pipeline, a loop runs all layers: for each of k micro-batches, or
where these run inside the layers (ZeRO 2 and 3) once for all of them. In a pipeline, a loop runs a chunk of layers in a
tick of the schedule; all ranks run all ticks, t(X) of which have slot X:

    loops         without a pipeline    in a pipeline
    forward       k or 1                t(F)
    rerun         none                  t(B), where B first runs a chunk of several layers again (remat stage)
    recomputed    k or 1                t(B), where the backward pass of a layer runs it again (remat block)
    attended      k or 1                t(B), where it runs only attention again (remat dots)
    backward      k or 1                t(B)
    weights       k or 1                t(W) where the schedule splits the backward pass, else t(B)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property

from jaxdist.config import Config, ModelConfig
from jaxdist.config.stacks import stacks_of
from jaxdist.mesh import CONTEXT, PIPELINE
from jaxdist.mesh.context import ulysses_elements
from jaxdist.mesh.split import Split
from jaxdist.models.loss import chunk_length
from jaxdist.planning.frozen import WHOLE_BLOCK
from jaxdist.planning.pipelines import Pipeline
from jaxdist.planning.predicted_collectives import Count
from jaxdist.planning.sharded_model import ShardedModel
from jaxdist.sharding import Layout


@dataclass(frozen=True)
class Passes:
    """How often layers run, by what a pass is for."""

    forward: Count
    backward: Count
    weights: Count
    """Passes that make the gradients of weights."""
    rerun: Count = 0
    """Forward passes that are repeated in a loop of their own, before the backward pass."""
    recomputed: Count = 0
    """Forward passes that are repeated beside the backward pass of a layer, and whose result nothing needs."""
    attended: Count = 0
    """Backward passes that repeat attention alone."""

    @property
    def attention(self) -> Count:
        """Passes that run attention forwards: its results are kept only where nothing is repeated."""
        return self.forward + self.rerun + self.recomputed + self.attended

    def times(self, count: Count) -> Passes:
        """Return these passes, each of them `count` times."""
        return Passes(**{field.name: count * getattr(self, field.name) for field in fields(self)})


@dataclass(frozen=True)
class Runs:
    """How often the parts of a step run on a device."""

    loops: Passes
    """Loops over layers, each of which uses one version of their weights."""
    layers: Count
    """The layers that a loop runs."""
    heads: Count
    """Micro-batches that run the head and the loss."""
    embedded: Count
    """Micro-batches whose tokens are looked up."""
    unembedded: Count
    """Micro-batches with a gradient of what is looked up."""
    micro_batches: Count = 1
    """The micro-batches that a loop takes through a layer before the next layer."""
    outside: Count = 1
    """How often what stands outside the layers is gathered and reduced, where it is for each loop (ZeRO 2 and 3)."""
    chunks: Count = 1
    """The parts of a device's layers, one of which a loop runs."""
    flush: bool = True
    """Whether the weights are the same for a whole step. If not, each loop gathers its own, at every ZeRO stage."""
    split: bool = False
    """Whether the schedule splits the backward pass, so that W makes the gradients of weights."""
    inside: bool = False
    """Whether a loop over micro-batches lies inside the one over layers."""
    stage: bool = False
    """Whether a whole chunk is recomputed, apart from its backward pass."""
    own: Count = 1
    """The part of its loops in which a rank has something to do, where it branches and does nothing in the others."""
    keeps_all: bool = False
    """Whether the forward pass keeps all arrays, those that it has gathered or exchanged among them."""

    @cached_property
    def passes(self) -> Passes:
        """How often a device runs a layer for one micro-batch."""
        return self.loops.times(self.layers * self.micro_batches)

    def merged(self, learns: bool = True) -> Count:
        """Return how often a layer sends what its recomputation needs, and the gradients of its weights if it `learns`.

        The backward pass of a layer sends it once for both, unless one of them is elsewhere in the program.
        """
        passes = self.passes
        if self.split or self.stage:
            return passes.recomputed + passes.weights * learns
        return passes.weights if learns else passes.recomputed


def in_loops(split: Split, micro_batches: Count) -> Runs:
    """Return the runs of a step without a pipeline, in k `micro_batches`."""
    remat = split.config.model.remat
    by_layer = split.config.parallel.zero >= 2
    count = 1 if split.inside else micro_batches
    return Runs(
        loops=Passes(
            forward=count,
            backward=count,
            weights=count,
            recomputed=count * (remat in WHOLE_BLOCK),
            attended=count * (remat == "dots"),
        ),
        layers=split.config.model.layers,
        heads=micro_batches,
        embedded=micro_batches,
        unembedded=micro_batches,
        micro_batches=micro_batches if split.inside else 1,
        outside=count if by_layer else 1,
        inside=split.inside,
        keeps_all=remat == "none" and not by_layer,
    )


def in_ticks(
    remat: str,
    ticks: Mapping[str, Count],
    depth: Count,
    chunks: Count = 1,
    flush: bool = True,
    own: Count = 1,
) -> Runs:
    """Return the runs of a step of a pipeline, by the ticks of each slot; of W, if it splits the backward pass.

    Each rank has `chunks` chunks, of `depth` layers at most.
    """
    forward = ticks["F"]
    backward = ticks["B"]
    stage = remat == "stage"
    # B runs a chunk again, except for its last sum: nothing needs what comes out of a chunk. A chunk of one layer is
    # recomputed with its backward pass; in a loop over several, each gives the next one what it needs.
    in_a_loop = stage * (depth > 1)
    beside = (remat == "block") + stage * (depth == 1)
    return Runs(
        loops=Passes(
            forward=forward,
            backward=backward,
            weights=ticks.get("W", backward),
            rerun=backward * in_a_loop,
            recomputed=backward * beside,
            attended=backward * (remat == "dots"),
        ),
        layers=depth,
        heads=ticks["H"],
        # A pipeline that never drains embeds one batch in a round of two ticks.
        embedded=forward if flush else ticks["H"],
        unembedded=backward if flush else ticks["H"],
        chunks=chunks,
        flush=flush,
        split="W" in ticks,
        stage=stage,
        own=own,
    )


@dataclass(frozen=True)
class Step:
    """A step whose transfers are predicted, or many steps that differ in sizes alone: arrays of these."""

    split: Split
    layout: Layout
    runs: Runs
    tokens: Count
    """The tokens of a micro-batch on one device."""
    losses: Count
    """Chunks of these tokens, for each of which the loss is computed apart."""
    exchanged: Count
    """The elements of each token that a device exchanges in a pass of attention for Ulysses."""
    pipe: Pipeline | None = None
    """The pipeline of one step, if it has one; None for many."""

    @classmethod
    def of(cls, sharded: ShardedModel) -> Step:
        """Return the step of a model on its mesh."""
        split = sharded.split
        pipe = sharded.pipe
        length = split.length
        if split.config.model.traits.text:
            length = chunk_length(sharded.layout, split.length, split.rows)
        if pipe is None:
            runs = in_loops(split, split.micro_batches)
        else:
            slots = ("F", "H", "B", "W") if pipe.schedule.split else ("F", "H", "B")
            ticks = {slot: pipe.ticks(slot) for slot in slots}
            schedule = pipe.schedule
            own = 1.0 if schedule.uniform else schedule.micro_batches * schedule.virtual / ticks["F"]
            runs = in_ticks(pipe.remat, ticks, pipe.stages.depth, pipe.stages.virtual, pipe.flush, own)
        exchanged = ulysses_elements(1, split.heads, split.size(CONTEXT))
        return cls(split, sharded.layout, runs, split.tokens, split.length // length, exchanged, pipe)

    @property
    def config(self) -> Config:
        """The configuration."""
        return self.split.config

    @property
    def stacks(self) -> list[Step]:
        """The step of each stack of layers, as if the model had no others; stages of a pipeline have one stack."""
        stacks = stacks_of(self.config.model)
        if len(stacks) == 1:
            return [self]
        return [self._of_stack(stack) for stack in stacks.values()]

    def _of_stack(self, stack: ModelConfig) -> Step:
        config = self.config.model_copy(update={"model": stack})
        return replace(self, split=replace(self.split, config=config), runs=replace(self.runs, layers=stack.layers))

    @property
    def staged(self) -> bool:
        """Whether the layers are stages of a pipeline."""
        return PIPELINE in dict(self.layout.axes)
