"""Reduce the gradient of a weight where it is made: as the gradient of zeros that lie as the reduced gradient does."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import P
from jax.sharding import reshard
from jaxtyping import Array, Float

from jaxdist.parallel import zero
from jaxdist.parallel.partial_trees import joined, part_of
from jaxdist.parallel.placement import Placement, Placements
from jaxdist.sharding import Params


def in_use(places: Placements, weights: Params, sinks: Params | None, stage: int) -> Params:
    """Gather weights that are not whole yet (stage 3), and connect them to the sinks of their gradients.

    Without `sinks` (None), gradients are not reduced where they are made.
    """
    # Weights are cast where they are used, inside the loop over micro-batches, so that gradients accumulate in f32.
    if stage == 3:
        weights = jax.tree.map(zero.gather, places, weights)
    if sinks is None:
        return weights
    return joined(weights, jax.tree.map(with_sink, part_of(places, sinks), part_of(weights, sinks), sinks))


def zeros(place: Placement, shape: tuple[int, ...], dtype: jnp.dtype) -> Float[Array, "..."]:
    """Return a sink, zeros in `dtype`: its gradient, as `zero.reduce` returns it, is that of a weight of `shape`."""
    return reshard(jnp.zeros(shape, dtype), P(*place.reduced.partitions, reduced=place.deferred))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def with_sink(place: Placement, w: Float[Array, "..."], sink: Float[Array, "..."]) -> Float[Array, "..."]:
    """Return the weights in use unchanged, in the dtype of `sink`, whose gradient is that of `w`, reduced.

    `sink` is what `zeros` returns; its values are not read. Differentiating with respect to sinks instead of weights
    reduces each gradient at the point where it is made.
    """
    return w.astype(sink.dtype)


def _forward(place: Placement, w: jax.Array, sink: jax.Array) -> tuple[jax.Array, None]:
    return w.astype(sink.dtype), None


def _backward(place: Placement, _: None, g: jax.Array) -> tuple[None, jax.Array]:
    return None, zero.reduce(place, g)


with_sink.defvjp(_forward, _backward)
