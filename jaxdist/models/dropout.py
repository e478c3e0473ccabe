"""Dropout (Srivastava et al. 2014) with masks that depend on no mesh: one for each row, layer, place and position."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from jaxdist.sharding import RESIDUAL, Layout


def masks(
    keys: Key[Array, " B"], positions: Int[Array, " S"], shape: tuple[int, ...], rate: float, site: int
) -> Bool[Array, "B S ..."]:
    """Return which values of `shape` to keep of each token; `site` distinguishes the places in a layer."""

    def mask_of_token(key: jax.Array, position: jax.Array) -> jax.Array:
        return jax.random.bernoulli(jax.random.fold_in(key, position), 1 - rate, shape)

    def mask_of_row(key: jax.Array) -> jax.Array:
        return jax.vmap(mask_of_token, in_axes=(None, 0))(jax.random.fold_in(key, site), positions)

    return jax.vmap(mask_of_row)(keys)


def dropped(x: Float[Array, "..."], keep: Bool[Array, "..."], rate: float) -> Float[Array, "..."]:
    """Return the values to `keep`, scaled up so that their mean stays the same, and zeros."""
    return jnp.where(keep, x / (1 - rate), 0).astype(x.dtype)


def dropout(
    layout: Layout, x: Float[Array, "B s D"], rate: float, keys: Key[Array, " B"] | None, site: int
) -> Float[Array, "B s D"]:
    """Drop values with probability `rate`; `keys` holds one key per row, so a row's mask depends on no mesh.

    `site` distinguishes the places in a layer. No keys, no dropout (evaluation).
    """
    if keys is None or rate == 0.0:
        return x
    draw = partial(masks, shape=x.shape[2:], rate=rate, site=site)
    if not layout.manual:
        # Each device draws its own part of the mask.
        draw = jax.sharding.auto_axes(draw, out_sharding=jax.typeof(x).sharding.spec)
    return dropped(x, draw(keys, layout.positions(x.shape[1], RESIDUAL)), rate)
