"""Attention to a key-value cache: keys and values of earlier tokens are kept, and not computed again.

In the cache of a row, slot p holds the token at position p. A query at position p sees the slots up to p; what lies in
later ones is never seen before it is overwritten. All of it runs in a manual region, on arrays of one device.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxdist.models.scores import Scores
from jaxdist.parallel.context import Attended
from jaxdist.sharding import wide


class Cache(NamedTuple):
    """Keys and values of the layers that a device holds, in the order of `Stages`, which has v and depth."""

    k: Float[Array, "v depth B S K H"]
    v: Float[Array, "v depth B S K U"]


def attend_to_slots(
    scores: Scores,
    q: Float[Array, "B 1 N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K U"],
    slots: Int[Array, " S"],
    positions: Int[Array, " B"],
) -> Attended:
    """Attend with the query of one token in each row, at `positions`, to the `slots` that a device holds.

    The softmax is in f32 at least (Vaswani et al. 2017, eq. 1).
    """
    rows, _, heads, size = q.shape
    grouped = q.reshape(rows, k.shape[2], -1, size) * scores.scale
    products = jnp.einsum("BKGH,BSKH->BKGS", grouped, k, preferred_element_type=wide(q.dtype))
    seen = scores.seen(positions[:, None], slots[None])
    products = jnp.where(seen[:, None, None], products, -jnp.inf)
    highest = jnp.max(products, -1, keepdims=True)
    # A device may hold no slot that the query sees: its scores are all -inf, and their difference would be NaN.
    p = jnp.exp(products - jnp.where(highest == -jnp.inf, 0, highest))
    total = jnp.sum(p, -1, keepdims=True)
    out = jnp.einsum("BKGS,BSKU->BKGU", p.astype(v.dtype), v, preferred_element_type=p.dtype)
    out = out / jnp.where(total == 0, 1, total)
    sums = highest + jnp.log(total)
    return Attended(out.reshape(rows, 1, heads, -1), sums.reshape(rows, 1, heads))
