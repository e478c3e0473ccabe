"""Attention sinks: a learned logit of each head takes a share of the softmax, and adds nothing (gpt-oss, OpenAI 2025).

So a query may find less than a whole value (Xiao et al. 2023 say why it should). The sink is one more key, whose value
is zero: any form of attention that gives the log sum exp of its scores can have it.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxdist.parallel.context import Attended

Sinks = Float[Array, "B S N"] | None
"""The sink of each head, alike at all positions; None: no head has one."""


def with_sinks(found: Attended, sinks: Sinks) -> Attended:
    """Return what queries have found where the sinks have their share; the sums count the sinks."""
    if sinks is None:
        return found
    sums = jnp.logaddexp(found.sums, sinks.astype(found.sums.dtype))
    share = jnp.exp(found.sums - sums)[..., None]
    return Attended((found.out.astype(share.dtype) * share).astype(found.out.dtype), sums)


@jax.custom_vjp
def with_gradient_of_sinks(found: Attended, sinks: Float[Array, "B S N"]) -> Float[Array, "B S N U"]:
    """Return the output of `with_sinks`, whose gradient goes to the sinks too."""
    return found.out


def _forward(found: Attended, sinks: jax.Array) -> tuple[jax.Array, tuple[Attended, jax.Array]]:
    return found.out, (found, sinks)


def _backward(saved: tuple[Attended, jax.Array], g: jax.Array) -> tuple[Attended, jax.Array]:
    """Return the gradients of the output and of the sinks: p (dp - rowsum(dO * O)), where dp of a value of 0 is 0."""
    found, sinks = saved
    dtype = found.sums.dtype
    p = jnp.exp(sinks.astype(dtype) - found.sums)
    d_sinks = -p * jnp.sum(g.astype(dtype) * found.out.astype(dtype), -1)
    return Attended(g, jnp.zeros_like(found.sums)), d_sinks.astype(sinks.dtype)


with_gradient_of_sinks.defvjp(_forward, _backward)
