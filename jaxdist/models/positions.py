"""Rotary positions (RoPE; Su et al. 2021): queries and keys are turned by their positions."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxdist.sharding import wide


@partial(jax.custom_vjp, nondiff_argnums=(1, 3))
def rotary(
    x: Float[Array, "B S N H"], frequencies: tuple[float, ...], positions: Int[Array, "... S"], factor: float = 1.0
) -> Float[Array, "B S N H"]:
    """Turn dims i and i + R/2 of position s by the angle s frequencies[i], i < R/2, and multiply by `factor`.

    So a query times a key depends only on how far apart they are (Su et al. 2021, section 3.2.2). The paper pairs
    neighbouring dims; halves are the same up to the order of the dims, and cheaper to cut. Dims from R on stay as they
    are. Nothing is kept for the backward pass, which turns the gradient back. `positions` are [S], or [B, S] where rows
    differ.
    """
    return _turn(x, frequencies, factor, positions, 1)


def _turn(
    x: jax.Array, frequencies: tuple[float, ...], factor: float, positions: Int[Array, "... S"], way: int
) -> jax.Array:
    """Turn by the positions' angles (`way` 1), or back (-1)."""
    speeds = jnp.asarray(frequencies, wide(x.dtype))
    places = positions.astype(speeds.dtype)[..., None]
    # Angles are [S, H/2] or [B, S, H/2]: `rows` gives the former a dim for B.
    angles = places * speeds.reshape((1,) * positions.ndim + (-1,))
    rows = None if positions.ndim == 1 else slice(None)
    cos = factor * jnp.cos(angles)[rows, :, None]
    sin = factor * way * jnp.sin(angles)[rows, :, None]
    half = len(frequencies)
    a, b, rest = jnp.split(x.astype(wide(x.dtype)), (half, 2 * half), axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=-1).astype(x.dtype)


def _rotary_forward(
    x: jax.Array, frequencies: tuple[float, ...], positions: jax.Array, factor: float
) -> tuple[jax.Array, jax.Array]:
    return rotary(x, frequencies, positions, factor), positions


def _rotary_backward(
    frequencies: tuple[float, ...], factor: float, positions: jax.Array, g: jax.Array
) -> tuple[jax.Array, None]:
    return _turn(g, frequencies, factor, positions, -1), None


rotary.defvjp(_rotary_forward, _rotary_backward)
