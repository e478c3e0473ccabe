"""Attention to a key-value cache: keys and values of earlier tokens are kept, and not computed again.

The cache of a layer has C slots for each row: all S positions, or the W of a sliding window. The token at position p is
in slot p mod C, in the place of the one C before it, which no later query sees. What lies in a slot before its first
token is never seen. All of it runs in a manual region, on arrays of one device.

The slots of a head lie one behind another, so that the products with a query read them as they lie.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxdist.config.model import Kind
from jaxdist.models.scores import Scores, effective_window
from jaxdist.parallel.context import Attended
from jaxdist.sharding import wide


class Cache(NamedTuple):
    """Keys and values of a device's layers of one kind, in the order of `Stages`, which has v and depth."""

    k: Float[Array, "v depth B K C H"]
    v: Float[Array, "v depth B K C U"]


def slots_of(kind: Kind, sequence: int, parts: int) -> int:
    """Return C, the slots of rows of `sequence` tokens in a layer of this kind, which `parts` devices share.

    Where they cannot share those of a window evenly, there is one for each token.
    """
    window = effective_window(kind.window, sequence)
    return window if window and window % parts == 0 else sequence


def tokens_in(slots: Int[Array, " C"], count: int, positions: Int[Array, " B"]) -> Int[Array, "B C"]:
    """Return the positions of the tokens in these of `count` slots, where the last token of a row is at `positions`.

    They are negative in slots that have none.
    """
    last = positions[:, None]
    return last - (last - slots[None]) % count


def attend_to_slots(
    scores: Scores,
    q: Float[Array, "B 1 N H"],
    k: Float[Array, "B K C H"],
    v: Float[Array, "B K C U"],
    tokens: Int[Array, "B C"],
    positions: Int[Array, " B"],
) -> Attended:
    """Attend with the query of one token in each row, at `positions`, to the slots that a device holds.

    `tokens` are the positions of what they hold, as `tokens_in` has them. The softmax is in f32 at least (Vaswani et
    al. 2017, eq. 1).
    """
    rows, _, heads, size = q.shape
    grouped = q.reshape(rows, k.shape[1], -1, size) * scores.scale
    products = jnp.einsum("BKGH,BKCH->BKGC", grouped, k, preferred_element_type=wide(q.dtype))
    seen = scores.seen(positions[:, None], tokens) & (tokens >= 0)
    products = jnp.where(seen[:, None, None], scores.capped(products), -jnp.inf)
    highest = jnp.max(products, -1, keepdims=True)
    # A device may hold no slot that the query sees: its scores are all -inf, and their difference would be NaN.
    p = jnp.exp(products - jnp.where(highest == -jnp.inf, 0, highest))
    total = jnp.sum(p, -1, keepdims=True)
    out = jnp.einsum("BKGC,BKCU->BKGU", p.astype(v.dtype), v, preferred_element_type=p.dtype)
    out = out / jnp.where(total == 0, 1, total)
    sums = highest + jnp.log(total)
    return Attended(out.reshape(rows, 1, heads, -1), sums.reshape(rows, 1, heads))
