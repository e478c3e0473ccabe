"""The activations of MLPs."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache, partial

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxdist.config import ModelConfig
from jaxdist.config.activation_numbers import SWIGLU_LIMIT, SWIGLU_SLOPE, XIELU_BETA, XIELU_EPS
from jaxdist.sharding import spread, wide

Activation = Callable[..., jax.Array]
"""A function of each value by itself, and of the numbers that the model learns for it, if it has some."""

Gating = Callable[..., jax.Array]
"""A function of a gate, of what it gates, and of the numbers that the activation learns."""


def activation_of(config: ModelConfig) -> Activation:
    """Return the activation of the MLPs of a model."""
    return ACTIVATIONS[config.traits.activation]


def gating_of(config: ModelConfig) -> Gating:
    """Return what the MLPs of a model make of a gate and of what it gates."""
    return clamped_swiglu if config.traits.activation == "clamped-swiglu" else _gating(config.traits.activation)


# The same object each time, so that what is traced for one layer serves all.
@lru_cache
def _gating(name: str) -> Gating:
    """Return the gating with the activation of this name."""
    return partial(_activated, ACTIVATIONS[name])


def _activated(activation: Activation, gate: jax.Array, up: jax.Array, *numbers: jax.Array) -> jax.Array:
    """Return activation(gate) * up (Shazeer 2020, section 2)."""
    return activation(gate, *numbers) * up


@jax.custom_vjp
def gelu(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Apply GELU (Hendrycks and Gimpel 2016), tanh form."""
    return _gelu_forward(x)[0]


def _gelu_forward(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    # The slope is computed along with the value: one tanh, not three.
    a = math.sqrt(2 / math.pi)
    c = 0.044715
    t = jnp.tanh(a * (x + c * x**3))
    value = 0.5 * x * (1 + t)
    slope = 0.5 * (1 + t) + 0.5 * x * (1 - t**2) * a * (1 + 3 * c * x**2)
    return value, slope


def _gelu_backward(slope: jax.Array, g: jax.Array) -> tuple[jax.Array]:
    return (g * slope,)


gelu.defvjp(_gelu_forward, _gelu_backward)


def xielu(x: Float[Array, "... F"], numbers: Float[Array, "2 1"]) -> Float[Array, "... F"]:
    """Apply xIELU (Huang and Schlag 2024, eq. 6), in f32 at least; its two learned numbers are made positive here."""
    y = x.astype(wide(x.dtype))
    above, below = (jax.nn.softplus(spread(one, y).astype(y.dtype)) for one in jax.lax.split(numbers, (1, 1)))
    bent = (XIELU_BETA + below) * (jnp.expm1(jnp.minimum(y, XIELU_EPS)) - y)
    return (jnp.where(y > 0, above * jnp.square(y), bent) + XIELU_BETA * y).astype(x.dtype)


def clamped_swiglu(gate: Float[Array, "..."], up: Float[Array, "..."]) -> Float[Array, "..."]:
    """Return SwiGLU of values within limits, where 1 is added to what is gated (gpt-oss, OpenAI 2025)."""
    gate = jnp.minimum(gate, SWIGLU_LIMIT)
    up = jnp.clip(up, -SWIGLU_LIMIT, SWIGLU_LIMIT)
    return gate * jax.nn.sigmoid(SWIGLU_SLOPE * gate) * (up + 1)


def learned_of(config: ModelConfig) -> nnx.Param | None:
    """Make what the activation of a model learns, if it learns something: of xIELU two numbers, at first 0.8 and 0.8.

    They are in one array, and as they are before they are made positive.
    """
    if config.traits.activation != "xielu":
        return None
    first = [[math.log(math.expm1(value))] for value in (0.8, 0.8 - XIELU_BETA)]
    return nnx.Param(jnp.asarray(first, jnp.float32), axes=(None, "activation"), forward_only=False, exact=False)


ACTIVATIONS: dict[str, Activation] = {
    "gelu": gelu,
    "gelu-erf": partial(jax.nn.gelu, approximate=False),
    "silu": jax.nn.silu,
    "xielu": xielu,
}
"""The activations of one value by their names in `model.activation`; `gating_of` has the other one."""
