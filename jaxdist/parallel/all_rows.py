"""Call a module with all rows of a micro-batch, inside `jax.sharding.auto_axes`, where XLA partitions it.

Whatever it computes from them, batch statistics or a loss over pairs of rows, is what one device computes. XLA adds up
gradients where it likes: once for every use of a weight, in every micro-batch. What this file says is how they have to
come out: from ZeRO 1 on as shards, so that XLA for GPUs reduces and scatters them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import P
from jax.sharding import auto_axes, reshard

from jaxdist.parallel.partial_trees import joined, part_of
from jaxdist.parallel.placement import Placement, Placements
from jaxdist.parallel.reuse import reused
from jaxdist.sharding import Params, Tree

_WHOLE_GRADIENTS: ContextVar[bool | None] = ContextVar("whether gradients of layers are whole", default=None)
"""None where no module is being called on all rows."""


def call_on_all_rows(
    places: Placements,
    call: Callable[[Params, Params, Tree], Tree],
    weights: Params,
    variables: Params,
    batch: Tree,
    out: Tree,
    sinks: Params | None = None,
) -> Any:
    """Call the module as if on one device, and let XLA partition it; the result is laid out as the specs `out` say.

    The gradient of a weight that has one of `sinks` (`parallel.sink`) is that of the sink, and lies as the sink does.
    """

    def connected(weights: Params, sinks: Params, variables: Params, batch: Tree) -> Tree:
        again = reused(call, weights, variables, batch) if sinks else {}
        trees = (part_of(tree, sinks) for tree in (places, again, weights))
        weights = joined(weights, jax.tree.map(_with_sink, *trees, sinks))
        stacks = jax.tree.map(lambda place, again: place.role.stacked and again, part_of(places, again), again)
        token = _WHOLE_GRADIENTS.set(not sinks or any(jax.tree.leaves(stacks)))
        try:
            return call(weights, variables, batch)
        finally:
            _WHOLE_GRADIENTS.reset(token)

    # The automatic partitioner does not know `reduced` weights: no gradient goes through them.
    weights = jax.tree.map(lambda p, w: reshard(w, P(*p.use.partitions)), places, weights)
    return auto_axes(connected, out_sharding=out)(weights, sinks or {}, variables, batch)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _with_sink(place: Placement, reused: bool, w: jax.Array, sink: jax.Array) -> jax.Array:
    """Return the weight unchanged; its gradient is that of `sink`.

    This is `sink.with_sink` where XLA partitions: joined outside, the gradient would have to come out whole, and XLA
    would all-reduce what is then cut into shards. It does so still with a weight that a loop uses again (`reused`):
    each turn would reduce and scatter its part of the gradient, where one all-reduce after the loop does.
    """
    return w


def _sink_forward(place: Placement, reused: bool, w: jax.Array, sink: jax.Array) -> tuple[jax.Array, jax.Array]:
    return w, jnp.zeros((), sink.dtype)


def _sink_backward(place: Placement, reused: bool, like: jax.Array, g: jax.Array) -> tuple[None, jax.Array]:
    if reused:
        g = jax.lax.with_sharding_constraint(g, P(*place.use.partitions))
    return None, g.astype(like.dtype)


_with_sink.defvjp(_sink_forward, _sink_backward)


def gather_layer(w: jax.Array) -> jax.Array:
    """All-gather a layer's weight here and now inside `call_on_all_rows` (ZeRO 3); return it as it is elsewhere."""
    whole_gradient = _WHOLE_GRADIENTS.get()
    if whole_gradient is None:
        return w
    return _whole(w) if whole_gradient else _gathered(w)


def _whole(w: jax.Array) -> jax.Array:
    """Return an array whole on every device; so is its gradient."""
    return jax.lax.with_sharding_constraint(w, P())


@jax.custom_vjp
def _gathered(w: jax.Array) -> jax.Array:
    """Return a weight whole on every device; its gradient lies as that of its stack does."""
    return _whole(w)


_gathered.defvjp(lambda w: (_whole(w), None), lambda _, g: (g,))
