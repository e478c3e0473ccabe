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
from typing import NamedTuple

from jaxdist.config import Config, ModelConfig
from jaxdist.config.stacks import stacks_of
from jaxdist.mesh import PIPELINE
from jaxdist.mesh.split import Split
from jaxdist.models.loss import chunk_length
from jaxdist.planning.frozen import WHOLE_BLOCK
from jaxdist.planning.pipelines import Pipeline
from jaxdist.planning.predicted_collectives import Count
from jaxdist.planning.sharded_model import ShardedModel
from jaxdist.sharding import Layout


class Again(NamedTuple):
    """What a backward pass runs again of the forward pass: truth values, or where many steps are predicted, arrays."""

    layer: Count
    """Each layer."""
    attention: Count
    """Of each layer, attention alone."""
    stage: Count
    """The layers that a rank of a pipeline runs in a tick, all of them before their backward passes."""

    @classmethod
    def of(cls, remat: str) -> Again:
        """Return what a kind of activation checkpointing runs again."""
        return cls(layer=remat in WHOLE_BLOCK, attention=remat == "dots", stage=remat == "stage")


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
    split: Count = False
    """Whether the schedule splits the backward pass, so that W makes the gradients of weights."""
    stage: Count = False
    """Whether a whole chunk is recomputed, apart from its backward pass."""
    own: Count = 1
    """The part of its loops in which a rank has something to do, where it branches and does nothing in the others."""
    learns: bool = True
    """Whether there is a backward pass."""
    heads_again: Count = 0
    """Micro-batches whose logits the backward pass makes again, because their gradient waits for the whole loss."""

    @cached_property
    def passes(self) -> Passes:
        """How often a device runs a layer for one micro-batch."""
        return self.loops.times(self.layers * self.micro_batches)

    def of_objective(self, config: Config) -> Runs:
        """Return the same for what a configuration trains for."""
        return replace(self, heads_again=self.heads) if config.train.learns_pairs else self

    @property
    def forward_alone(self) -> Runs:
        """The same without a backward pass."""
        loops = Passes(forward=self.loops.forward, backward=0, weights=0)
        return replace(self, loops=loops, unembedded=0, learns=False, heads_again=0)

    def merged(self, learns: bool = True) -> Count:
        """Return how often a layer sends what its recomputation needs, and the gradients of its weights if it `learns`.

        The backward pass of a layer sends it once for both, unless one of them is elsewhere in the program.
        """
        passes = self.passes
        if not learns:
            return passes.recomputed
        return passes.weights + passes.recomputed * (self.split | self.stage)


def in_loops(layers: int, micro_batches: Count, together: Count, again: Again) -> Runs:
    """Return the runs of a step without a pipeline, in loops that take `together` of its micro-batches each."""
    count = micro_batches // together
    return Runs(
        loops=Passes(
            forward=count,
            backward=count,
            weights=count,
            recomputed=count * again.layer,
            attended=count * again.attention,
        ),
        layers=layers,
        heads=micro_batches,
        embedded=micro_batches,
        unembedded=micro_batches,
        micro_batches=together,
        outside=count,
    )


def in_ticks(
    ticks: Mapping[str, Count],
    depth: Count,
    again: Again,
    chunks: Count = 1,
    split: Count = False,
    flush: bool = True,
    own: Count = 1,
) -> Runs:
    """Return the runs of a step of a pipeline, by the ticks of each slot; those of W are those of B unless it `split`s.

    Each rank has `chunks` chunks, of `depth` layers at most.
    """
    forward = ticks["F"]
    backward = ticks["B"]
    # B runs a chunk again, except for its last sum: nothing needs what comes out of a chunk. A chunk of one layer is
    # recomputed with its backward pass; in a loop over several, each gives the next one what it needs.
    rerun = backward * (again.stage & (depth > 1))
    return Runs(
        loops=Passes(
            forward=forward,
            backward=backward,
            weights=ticks["W"],
            rerun=rerun,
            recomputed=backward * again.layer - rerun,
            attended=backward * again.attention,
        ),
        layers=depth,
        heads=ticks["H"],
        # A pipeline that never drains embeds one batch in a round of two ticks.
        embedded=forward if flush else ticks["H"],
        unembedded=backward if flush else ticks["H"],
        chunks=chunks,
        flush=flush,
        split=split,
        stage=again.stage,
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
    anew: Count
    """Whether the backward pass gathers and exchanges anew what the forward pass has: not where that keeps all."""
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
        again = Again.of(split.config.model.remat)
        if pipe is None:
            k = split.micro_batches
            runs = in_loops(split.config.model.layers, k, k if split.inside else 1, again)
        else:
            schedule = pipe.schedule
            weights = "W" if schedule.split else "B"
            ticks = {"F": pipe.ticks("F"), "H": pipe.ticks("H"), "B": pipe.ticks("B"), "W": pipe.ticks(weights)}
            own = 1.0 if schedule.uniform else schedule.micro_batches * schedule.virtual / ticks["F"]
            runs = in_ticks(ticks, pipe.stages.depth, again, pipe.stages.virtual, schedule.split, pipe.flush, own)
        runs = runs.of_objective(split.config)
        exchanged = split.exchanged
        losses = split.length // length
        return cls(split, sharded.layout, runs, split.tokens, losses, exchanged, split.saved != "none", pipe)

    @property
    def config(self) -> Config:
        """The configuration."""
        return self.split.config

    @property
    def stacks(self) -> list[Step]:
        """The step of each stack of layers, as if the model had no others; a loop runs its places in a chunk."""
        stacks = stacks_of(self.config.model)
        if len(stacks) == 1:
            return [self]
        return [self._of_stack(name, stack) for name, stack in stacks.items()]

    def _of_stack(self, name: str, stack: ModelConfig) -> Step:
        config = self.config.model_copy(update={"model": stack})
        layers = self.pipe.stages.stacks[name].depth if self.pipe else stack.layers
        return replace(self, split=replace(self.split, config=config), runs=replace(self.runs, layers=layers))

    @property
    def references(self) -> list[Step]:
        """The forward pass of the base without adapters, to which the loss of pairs refers, where a step has it."""
        return [replace(self, runs=self.runs.forward_alone)] if self.config.refers_in_step else []

    @property
    def staged(self) -> bool:
        """Whether the layers are stages of a pipeline."""
        return PIPELINE in dict(self.layout.axes)
