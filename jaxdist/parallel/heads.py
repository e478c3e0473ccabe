"""Key/value heads that are fewer than the devices of the model axis (Ainslie et al. 2023, section 2.2).

With grouped-query attention (GQA), one attention weight [..., K, G + 2, H] holds, for each of K key/value heads, the G
query heads that it serves, then its key, then its value. When n K devices split the heads, each of them needs a key
and a value, so the weight in use is [..., n K, G/n + 2, H]: query heads are dealt out, each key and value is repeated
n times.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

KEY_AND_VALUE = 2


@dataclass(frozen=True)
class HeadDeal:
    """How the key/value heads of one parameter are dealt to more devices than there are heads."""

    dim: int
    """The dim of K."""
    parts: int
    """How many devices share a key/value head: n."""

    @property
    def layer(self) -> HeadDeal:
        """The deal for one layer of a stack, which has no leading dim of layers."""
        return HeadDeal(self.dim - 1, self.parts)


def dealt(shape: tuple[int, ...], dim: int, n: int) -> tuple[int, ...]:
    """Return the shape that `deal` makes of a weight of `shape` whose K is at `dim`."""
    heads, shared, *rest = shape[dim:]
    return (*shape[:dim], heads * n, (shared - KEY_AND_VALUE) // n + KEY_AND_VALUE, *rest)


def deal(w: Float[Array, "..."], dim: int, n: int) -> Float[Array, "..."]:
    """Deal the heads of [..., K, G + 2, H], with K at `dim`, to n K devices: [..., n K, G/n + 2, H]."""
    queries, keys_and_values = _split_queries(w, dim)
    # Queries are dealt out: [..., K, G, H] -> [..., K, n, G/n, H] -> [..., n K, G/n, H].
    lead = queries.shape[:dim]
    heads = queries.shape[dim]
    rest = queries.shape[dim + 2 :]
    queries = queries.reshape(*lead, heads, n, -1, *rest)
    queries = queries.reshape(*lead, heads * n, -1, *rest)
    # Keys and values are repeated: [..., K, 2, H] -> [..., n K, 2, H].
    keys_and_values = jnp.repeat(keys_and_values, n, axis=dim)
    return jnp.concatenate([queries, keys_and_values], axis=dim + 1)


def collect(g: Float[Array, "..."], dim: int, n: int) -> Float[Array, "..."]:
    """Transpose `deal`: [..., n K, G/n + 2, H] -> [..., K, G + 2, H], summing the copies of each key and value."""
    queries, keys_and_values = _split_queries(g, dim)
    lead = g.shape[:dim]
    heads = g.shape[dim] // n
    rest = g.shape[dim + 2 :]
    # [..., n K, G/n, H] -> [..., K, n, G/n, H] -> [..., K, G, H]
    queries = queries.reshape(*lead, heads, n, *queries.shape[dim + 1 :])
    # [..., n K, 2, H] -> [..., K, n, 2, H], of which n are copies.
    keys_and_values = keys_and_values.reshape(*lead, heads, n, *keys_and_values.shape[dim + 1 :])
    queries = queries.reshape(*lead, heads, -1, *rest)
    return jnp.concatenate([queries, keys_and_values.sum(dim + 1)], axis=dim + 1)


def _split_queries(w: jax.Array, dim: int) -> Sequence[jax.Array]:
    """Return [queries, keys and values] of one attention weight with K at `dim`."""
    sizes = (w.shape[dim + 1] - KEY_AND_VALUE, KEY_AND_VALUE)
    return jax.lax.split(w, sizes, axis=dim + 1)
