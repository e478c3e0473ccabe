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

from dataclasses import dataclass, fields
from functools import cached_property

from jaxdist.config import Config
from jaxdist.mesh.split import Split
from jaxdist.planning.adapters import WHOLE_BLOCK
from jaxdist.planning.collective_time import Numbers
from jaxdist.planning.pipelines import Pipeline
from jaxdist.planning.sharded_model import ShardedModel
from jaxdist.sharding import Layout


@dataclass(frozen=True)
class Passes:
    """How often layers run, by what a pass is for."""

    forward: Numbers
    backward: Numbers
    weights: Numbers
    """Passes that make the gradients of weights."""
    rerun: Numbers = 0
    """Forward passes that are repeated in a loop of their own, before the backward pass."""
    recomputed: Numbers = 0
    """Forward passes that are repeated beside the backward pass of a layer, and whose result nothing needs."""
    attended: Numbers = 0
    """Backward passes that repeat attention alone."""

    def times(self, count: Numbers) -> Passes:
        """Return these passes, each of them so many times."""
        return Passes(**{field.name: count * getattr(self, field.name) for field in fields(self)})


@dataclass(frozen=True)
class Runs:
    """How often the parts of a step run on a device."""

    loops: Passes
    """Loops over layers, each of which uses one version of their weights."""
    layers: int
    """The layers that a loop runs."""
    heads: Numbers
    """Micro-batches that run the head and the loss."""
    embedded: Numbers
    """Micro-batches whose tokens are looked up."""
    unembedded: Numbers
    """Micro-batches with a gradient of what is looked up."""
    micro_batches: Numbers = 1
    """The micro-batches that a loop takes through a layer before the next layer."""
    outside: Numbers = 1
    """How often what stands outside the layers is gathered and reduced, where it is for each loop (ZeRO 2 and 3)."""
    chunks: int = 1
    """The parts of a device's layers, one of which a loop runs."""
    flush: bool = True
    """Whether the weights are the same for a whole step. If not, each loop gathers its own, at every ZeRO stage."""
    split: bool = False
    """Whether the schedule splits the backward pass, so that W makes the gradients of weights."""
    inside: bool = False
    """Whether a loop over micro-batches lies inside the one over layers."""
    stage: bool = False
    """Whether a whole chunk is recomputed, apart from its backward pass."""
    keeps_all: bool = False
    """Whether the forward pass keeps all arrays, those that it has gathered or exchanged among them."""

    @cached_property
    def passes(self) -> Passes:
        """How often a device runs a layer for one micro-batch."""
        return self.loops.times(self.layers * self.micro_batches)

    def merged(self, learns: bool = True) -> Numbers:
        """Return how often a layer sends what its recomputation needs, and the gradients of its weights if it `learns`.

        The backward pass of a layer sends it once for both, unless one of them is elsewhere in the program.
        """
        passes = self.passes
        if self.split or self.stage:
            return passes.recomputed + passes.weights * learns
        return passes.weights if learns else passes.recomputed


def in_loops(split: Split) -> Runs:
    """Return the runs of a step without a pipeline."""
    sizes = split.config.model
    by_layer = split.config.parallel.zero >= 2
    micro_batches = split.micro_batches
    count = 1 if split.inside else micro_batches
    return Runs(
        loops=Passes(
            forward=count,
            backward=count,
            weights=count,
            recomputed=count * (sizes.remat in WHOLE_BLOCK),
            attended=count * (sizes.remat == "dots"),
        ),
        layers=sizes.layers,
        heads=micro_batches,
        embedded=micro_batches,
        unembedded=micro_batches,
        micro_batches=micro_batches if split.inside else 1,
        outside=count if by_layer else 1,
        inside=split.inside,
        keeps_all=sizes.remat == "none" and not by_layer,
    )


def in_ticks(pipe: Pipeline) -> Runs:
    """Return the runs of a step of a pipeline."""
    forward = pipe.ticks("F")
    backward = pipe.ticks("B")
    stage = pipe.remat == "stage"
    several = pipe.stages.depth > 1
    # B runs a chunk again, except for its last sum: nothing needs what comes out of a chunk. A chunk of one layer is
    # recomputed with its backward pass; in a loop over several, each gives the next one what it needs.
    beside = pipe.remat == "block" or (stage and not several)
    return Runs(
        loops=Passes(
            forward=forward,
            backward=backward,
            weights=pipe.ticks("W") if pipe.schedule.split else backward,
            rerun=backward * (stage and several),
            recomputed=backward * beside,
            attended=backward * (pipe.remat == "dots"),
        ),
        layers=pipe.stages.depth,
        heads=pipe.ticks("H"),
        embedded=pipe.embedded,
        unembedded=pipe.unembedded,
        chunks=pipe.stages.virtual,
        flush=pipe.flush,
        split=pipe.schedule.split,
        stage=stage,
    )


@dataclass(frozen=True)
class Step:
    """A step whose transfers are predicted: one without a pipeline where `pipe` is None."""

    split: Split
    layout: Layout
    pipe: Pipeline | None
    runs: Runs

    @classmethod
    def of(cls, sharded: ShardedModel) -> Step:
        """Return the step of a model on its mesh."""
        pipe = sharded.pipe
        runs = in_ticks(pipe) if pipe else in_loops(sharded.split)
        return cls(sharded.split, sharded.layout, pipe, runs)

    @property
    def config(self) -> Config:
        """The configuration."""
        return self.split.config

    @cached_property
    def tokens(self) -> int:
        """The tokens of a micro-batch on one device."""
        return self.split.tokens
