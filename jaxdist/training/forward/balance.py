"""What a step does with the counts of a routed model: move the balance of its experts, and report (`models.experts`).

The gradient of a parameter with the logical axis "counted" is no derivative but a number of tokens, summed over the
global batch. It is never divided, clipped or compressed, it is no part of the gradient's norm, and no update rule sees
it: such a parameter has no decay and no moments.

The losses of the router are means over all positions, the cross-entropy is one over the labels that count. So what is
differentiated is positions / labels x cross-entropy + the router's losses, and gradients are divided by the positions.
"""

from __future__ import annotations

from operator import not_
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from jaxdist.models import Params
from jaxdist.models.experts import METERS
from jaxdist.parallel.pipeline.stages import BLOCKS
from jaxdist.sharding import Tree

LOAD_MAX = "load_max"
REPORTED = (*METERS, LOAD_MAX)
"""What the counts tell of a step, by name."""

COLLAPSED = 0.9
"""How far the load may be on its way from even (0) to all tokens at the same k experts (1), before it is a collapse.

A router that is merely uneven is far below: with 64 experts, 8 of them for each token, a fullest expert with twice the
mean load is at 0.14."""


def direction(load: Float[Array, "... E"]) -> Int[Array, "... E"]:
    """Return 1 for an expert whose load is above the mean, -1 for one below it, and 0 for one that has just the mean.

    Loads are whole tokens, up to 2^31 of all experts together. As floats, a sum or a mean would be rounded, and an
    expert at the mean would move one way on one mesh, and the other way on another.
    """
    tokens = load.astype(jnp.int32)
    mean, rest = jnp.divmod(jnp.sum(tokens, -1, keepdims=True), load.shape[-1])
    at_mean = (tokens == mean) & (rest == 0)
    return jnp.where(at_mean, 0, jnp.where(tokens > mean, 1, -1))


def balancing(rule: optax.GradientTransformation, counted: Params, rate: float) -> optax.GradientTransformation:
    """Return `rule` for all parameters that are not `counted`; the balance moves by `rate` against the load.

    This is DeepSeek-V3's b_e <- b_e - u sign(load_e - mean load) (2024, section 2.1.2). Other counted parameters stay.
    """
    inner = optax.masked(rule, jax.tree.map(not_, counted))

    def moved(path: tuple[Any, ...], is_counted: bool, update: jax.Array) -> jax.Array:
        # An update is handed through as it came where `inner` does not see it: as a count.
        if not is_counted:
            return update
        if path[-1].key == "balance":
            return -rate * direction(update).astype(update.dtype)
        return jnp.zeros_like(update)

    def update(updates: Tree, state: Tree, params: Tree = None) -> tuple[Tree, Tree]:
        updates, state = inner.update(updates, state, params)
        return jax.tree.map_with_path(moved, counted, updates), state

    return optax.GradientTransformation(inner.init, update)


def told(counts: Params, layers: int, positions: int) -> dict[str, Float[Array, ""]]:
    """Return what is REPORTED of a step, from the gradients of the counted parameters among `counts`.

    All are means over tokens and layers, but the load: that is how many times the mean the fullest expert of any layer
    has. Places of a stage that are padding have counted nothing.
    """
    experts = counts[BLOCKS]["mlp"]
    meter = experts["meter"]
    load = experts["balance"]
    sums = jnp.sum(meter, tuple(range(meter.ndim - 1))) / (layers * positions)
    mean_load = jnp.sum(load) / (layers * load.shape[-1])
    return dict(zip(METERS, sums, strict=True)) | {LOAD_MAX: jnp.max(load) / mean_load}


def collapsed(load_max: float, experts: int, per_token: int) -> bool:
    """Return whether nearly all tokens choose the same `per_token` experts of some layer."""
    most = experts / per_token
    return most > 1 and load_max - 1 >= COLLAPSED * (most - 1)


@jax.custom_vjp
def weighed(loss: Float[Array, ""], weight: Float[Array, ""]) -> Float[Array, ""]:
    """Return `loss`, whose gradient is multiplied by `weight`."""
    return loss


def _weighed_forward(loss: jax.Array, weight: jax.Array) -> tuple[jax.Array, jax.Array]:
    return loss, weight


def _weighed_backward(weight: jax.Array, g: jax.Array) -> tuple[jax.Array, None]:
    return g * weight.astype(g.dtype), None


weighed.defvjp(_weighed_forward, _weighed_backward)
