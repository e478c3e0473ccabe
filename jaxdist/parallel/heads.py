"""Key/value heads that are fewer than the devices of the model axis (Ainslie et al. 2023, section 2.2).

With grouped-query attention (GQA), one attention weight [..., K, G + 2, H] holds, for each of K key/value heads, the G
query heads that it serves, then its key, then its value. When n K devices split the heads, each of them needs a key
and a value, so the weight in use is [..., n K, G/n + 2, H]: query heads are dealt out, each key and value is repeated
n times.
"""

from __future__ import annotations

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
    q, kv = _split_queries(w, dim)
    q = _split_dim(q, dim + 1, n)
    q = _merge_dims(q, dim)
    return jnp.concatenate([q, jnp.repeat(kv, n, axis=dim)], axis=dim + 1)


def collect(g: Float[Array, "..."], dim: int, n: int) -> Float[Array, "..."]:
    """Transpose `deal`: [..., n K, G/n + 2, H] -> [..., K, G + 2, H], summing the copies of each key and value."""
    q, kv = (_split_dim(a, dim, g.shape[dim] // n) for a in _split_queries(g, dim))
    return jnp.concatenate([_merge_dims(q, dim + 1), kv.sum(dim + 1)], axis=dim + 1)


def _split_queries(w: jax.Array, dim: int) -> list[jax.Array]:
    """Return [queries, keys and values]."""
    return jax.lax.split(w, (w.shape[dim + 1] - KEY_AND_VALUE, KEY_AND_VALUE), axis=dim + 1)


def _split_dim(a: jax.Array, dim: int, parts: int) -> jax.Array:
    """Replace one dim by two, the first of size `parts`."""
    return a.reshape(*a.shape[:dim], parts, -1, *a.shape[dim + 1 :])


def _merge_dims(a: jax.Array, dim: int) -> jax.Array:
    """Replace `dim` and the dim after it by one."""
    return a.reshape(*a.shape[:dim], -1, *a.shape[dim + 2 :])
