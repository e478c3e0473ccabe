"""What one device of a pipeline knows of itself inside the region, and how it reads and writes its buffers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import jax
from jax import lax
from jaxtyping import Array, Float

from jaxdist.mesh import PIPELINE
from jaxdist.parallel import region, zero
from jaxdist.parallel.pipeline.chunk import Chunk
from jaxdist.parallel.pipeline.layers import Layer, Layers
from jaxdist.parallel.pipeline.stages import BLOCKS, Stages, of_stack
from jaxdist.parallel.placement import Placements
from jaxdist.sharding import BATCH, RESIDUAL, SEQUENCE, Layout, Tree


@dataclass(frozen=True)
class Program:
    """A model as a pipeline needs it, as functions of what one device holds; `part` is a micro-batch.

    The tops are all parameters outside the layers: embedding, final norm, head.
    """

    embed: Callable[[Tree, Tree], Float[Array, "..."]]
    """(tops, part) -> the residual stream."""
    layers: Sequence[Layer]
    """A layer of each kind in a period, of each stack.

    Aux are sums over tokens, which the pipeline adds up over micro-batches, and over devices."""
    loss: Callable[[Tree, Float[Array, "..."], Tree], tuple[Float[Array, ""], Tree]]
    """(tops, residual stream, part) -> (summed loss, further sums)."""


class Device:
    """The model, its stages and its placements, as one device of the pipeline sees them."""

    def __init__(self, program: Program, stages: Stages, layout: Layout, places: Placements, stage: int):
        """Take the `places` of the folded parameters; `stage` is that of ZeRO."""
        self.program = program
        self.stages = stages
        self.layout = layout
        self.stage = stage
        self.stream = (*layout.split(BATCH), PIPELINE, *layout.split(RESIDUAL))
        """The axes over which devices have their own residual stream."""
        self.places = places
        self.top_places = {name: place for name, place in places.items() if name != BLOCKS}
        self.block_places = places[BLOCKS]
        # Parameters of layers are [v, S, depth, ...]: without these three dims they are one layer's.
        places_of_layer = jax.tree.map(lambda p: p.layer.layer.layer, self.block_places)
        kinds = iter(program.layers)
        self.layers = Chunk(
            {
                name: Layers(
                    list(islice(kinds, own.period)), own, of_stack(name, places_of_layer), stage, self.together
                )
                for name, own in stages.stacks.items()
            }
        )
        self.onward = region.to_next(stages.ranks)
        """(source, target) ranks of the messages of the forward pass."""
        if stages.virtual == 1:
            # With one chunk per rank, the last rank sends to none.
            self.onward.pop()
        self.back = [(b, a) for a, b in self.onward]
        """The same for the backward pass."""

    def awaited(self, *earlier: jax.Array) -> tuple[jax.Array, ...]:
        """Return what the next unit has to begin after (`region.after`): `earlier` on CPUs, nothing elsewhere."""
        # XLA:CPU alone starts a loop before the one in front of it has ended.
        return earlier if self.layout.platform == "cpu" else ()

    def together(self, arrays: Tree, earlier: Tree = ()) -> Tree:
        """Return `arrays`, on CPUs none of them before all of them and of `earlier` are there (`region.together`)."""
        return region.together(arrays, earlier) if self.layout.platform == "cpu" else arrays

    def alone(self, on: jax.Array, run: Callable[..., Any], *state: Tree) -> tuple[Tree, ...]:
        """Return `run(*state)` on ranks where it is `on`, else `state`: each rank takes its own branch.

        Inside, a collective may wait only for devices of the same rank, which take the same branch: its groups lie
        within one rank, and it is no permutation, for which all devices meet (`programs.branch_check` checks that on
        the compiled program). Only what changes should go through the branch.
        """
        assert region.varying(on) == {PIPELINE}
        return lax.cond(on, run, lambda *state: state, *state)


def batch_specs(layout: Layout, batch: Tree) -> Tree:
    """Return how the arrays of a `batch` lie: [M, B, ...], and where they have tokens [M, B, S, ...]."""
    return jax.tree.map(lambda a: layout.spec((None, BATCH, SEQUENCE)[: a.ndim]), batch)


def own(places: Tree, weights: Tree) -> Tree:
    """Return this device's parts in use of weights at rest."""
    return jax.tree.map(zero.gather_manual, places, weights)


def get(buffers: Tree, slot: jax.Array | int) -> Tree:
    """Read one slot of every buffer."""
    return jax.tree.map(partial(lax.dynamic_index_in_dim, index=slot, axis=0, keepdims=False), buffers)


def put(buffers: Tree, values: Tree, slot: jax.Array | int) -> Tree:
    """Return the buffers with `values` written to one slot."""
    return jax.tree.map(partial(lax.dynamic_update_index_in_dim, index=slot, axis=0), buffers, values)
