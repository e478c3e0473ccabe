"""What one device of a pipeline knows of itself inside the region, and how it reads and writes its buffers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxdist.mesh import PIPELINE
from jaxdist.parallel import region
from jaxdist.parallel.pipeline.layers import Layers
from jaxdist.parallel.pipeline.stages import BLOCKS, Stages
from jaxdist.sharding import BATCH, Layout

Tree = Any
"""Nested dicts of arrays."""


@dataclass(frozen=True)
class Program:
    """A model as a pipeline needs it, in functions of what one device holds. `part` is a micro-batch."""

    embed: Callable[[Tree, Tree], Float[Array, "..."]]
    """(tops, part) -> the residual stream."""
    layer: Callable[[Tree, Float[Array, "..."], Tree, Array], Float[Array, "..."]]
    """(weights of a layer, residual stream, part, number of the layer) -> residual stream."""
    loss: Callable[[Tree, Float[Array, "..."], Tree], Float[Array, ""]]
    """(tops, residual stream, part) -> summed loss."""


class Device:
    """`places` are those of the folded parameters, `stage` that of ZeRO."""

    def __init__(self, program: Program, stages: Stages, layout: Layout, places: Tree, stage: int):
        self.program, self.stages, self.layout, self.stage = program, stages, layout, stage
        self.stream = (*layout.split(BATCH), PIPELINE, *layout.split("residual"))
        """The axes over which devices have their own residual stream."""
        self.top_places = {name: place for name, place in places.items() if name != BLOCKS}
        self.block_places = places[BLOCKS]
        of_one = jax.tree.map(lambda p: p.layer.layer.layer, self.block_places)
        self.layers = Layers(program.layer, stages, of_one, stage)
        ring = [(i, (i + 1) % stages.ranks) for i in range(stages.ranks)]
        ring = ring if stages.virtual > 1 else ring[:-1]
        self.onward, self.back = ring, [(b, a) for a, b in ring]

    def numbers(self, chunk: jax.Array | int) -> tuple[Int[Array, " depth"], Bool[Array, " depth"]]:
        """Which layers one of this rank's chunks has, and which of them are no padding."""
        rank = lax.axis_index(PIPELINE)
        return jnp.asarray(self.stages.layer)[chunk, rank], jnp.asarray(self.stages.valid)[chunk, rank]

    def awaited(self, *earlier: jax.Array) -> tuple[jax.Array, ...]:
        """What the next unit is to begin after (`region.after`): on CPUs `earlier`, on others nothing."""
        return earlier if self.layout.platform == "cpu" else ()

    def alone(self, on: jax.Array, run: Callable, *state: Tree) -> tuple[Tree, ...]:
        """`run(*state)` on ranks where it is `on`: each goes its own way.

        What runs there may wait only for devices of the same rank, which go the same way: the groups of its collectives
        lie within one, and none is a permutation, for which all devices meet (`planning.branch_check` reads it off the
        compiled program). Only what changes goes through the branch.
        """
        assert region.varying(on) == {PIPELINE}
        return lax.cond(on, run, lambda *state: state, *state)


def own(places: Tree, weights: Tree) -> Tree:
    """Parts in use of weights at rest."""
    return jax.tree.map(lambda p, w: p.own(w), places, weights)


def get(buffers: Tree, slot: jax.Array | int) -> Tree:
    return jax.tree.map(partial(lax.dynamic_index_in_dim, index=slot, axis=0, keepdims=False), buffers)


def put(buffers: Tree, values: Tree, slot: jax.Array) -> Tree:
    return jax.tree.map(partial(lax.dynamic_update_index_in_dim, index=slot, axis=0), buffers, values)
