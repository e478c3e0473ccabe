"""Pass one residual stream through all layers, forward only: what generating a token needs.

In a pipeline there is one micro-batch, and so one rank at a time has work that counts. All ranks run their layers in
every tick on whatever they hold, because a collective must not stand in a branch that ranks take differently; what a
rank writes counts in its own ticks alone. Without a pipeline there is one tick.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxdist.mesh import PIPELINE
from jaxdist.parallel import periods
from jaxdist.parallel.pipeline.device import get
from jaxdist.parallel.pipeline.stages import Stages
from jaxdist.parallel.region import to_next
from jaxdist.sharding import Tree


@dataclass(frozen=True)
class Place:
    """Where a device is in the relay."""

    chunk: Int[Array, ""] | int
    """Which of the rank's chunks runs."""
    layer: Int[Array, ""] | int
    """The place of the layer in the chunk."""
    counts: Bool[Array, ""] | bool
    """Whether it is this rank's turn."""
    kind: int
    """The number of the layer's kind in the period."""
    part: int
    """Which part of the state holds that of the layer: that of its kind, or its own where layers are written out."""
    of_part: Int[Array, ""] | int
    """The place of the layer among those of that part in the chunk."""


Layer = Callable[[Tree, Float[Array, "..."], Tree, Place], tuple[Float[Array, "..."], Tree]]
"""(weights of a layer, residual stream, state, place) -> (residual stream, state)."""


def relay(
    stages: Stages, layer: Layer, blocks: Tree, x: Float[Array, "..."], state: Tree
) -> tuple[Float[Array, "..."], Tree]:
    """Return (`x` after all layers, the state after them), inside a manual region.

    The former is on the first rank alone, to which the last one hands it on; others have something else.
    `blocks` are this rank's weights [v, depth, ...]. `layer` must leave the state as it is in a place that does not
    count.
    """
    if stages.ranks == 1:
        return _chunk(stages, layer, blocks, x, state, 0, True)
    onward = to_next(stages.ranks)

    def tick(carry: tuple[jax.Array, Tree], number: Int[Array, ""]) -> tuple[tuple[jax.Array, Tree], None]:
        counts = lax.axis_index(PIPELINE) == number % stages.ranks
        chunk = 0 if stages.virtual == 1 else number // stages.ranks
        x, state = _chunk(stages, layer, blocks, *carry, chunk, counts)
        return (lax.ppermute(x, PIPELINE, onward), state), None

    return lax.scan(tick, (x, state), jnp.arange(stages.ranks * stages.virtual))[0]


def written_out(
    stages: Stages, layer: Layer, blocks: Sequence[Tree], x: Float[Array, "..."], state: Tree
) -> tuple[Float[Array, "..."], Tree]:
    """Do the work of `relay` where there is one stage, in a program that has all layers one after the other.

    `blocks` are the weights of each layer, and the state has a part for each.
    """
    for number, weights in enumerate(blocks):
        x, state = layer(weights, x, state, Place(0, number, True, number % stages.period, number, 0))
    return x, state


def _chunk(
    stages: Stages,
    layer: Layer,
    blocks: Tree,
    x: jax.Array,
    state: Tree,
    chunk: Int[Array, ""] | int,
    counts: Bool[Array, ""] | bool,
) -> tuple[jax.Array, Tree]:
    """Run the layers of one of this rank's chunks."""
    weights = get(blocks, chunk)
    valid = jnp.asarray(stages.valid)[chunk, lax.axis_index(PIPELINE)]

    def one(
        kind: int, carry: tuple[jax.Array, Tree], numbered: tuple[Tree, Int[Array, ""], Bool[Array, ""]]
    ) -> tuple[tuple[jax.Array, Tree], None]:
        x, state = carry
        w, number, is_layer = numbered
        of_kind = number if stages.period == 1 else number // stages.period
        y, state = layer(w, x, state, Place(chunk, number, counts, kind, kind, of_kind))
        if stages.padded:
            y = jnp.where(is_layer, y, x)
        return (y, state), None

    bodies = [partial(one, kind) for kind in range(stages.period)]
    return periods.scan(bodies, (x, state), (weights, jnp.arange(stages.depth), valid))[0]
