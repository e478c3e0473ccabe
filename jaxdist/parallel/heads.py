"""Key/value heads that are fewer than the devices of the model axis (Ainslie et al. 2023, section 2.2).

A weight of attention is [..., K, G + 2, H]: each of K key/value heads has the G queries that it serves, then its key,
then its value. Where n K devices are to split the heads, each needs a key and a value: in use the weight is
[..., n K, G/n + 2, H]. The queries are dealt out, every key and value is there n times.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

KEY_AND_VALUE = 2


def dealt(shape: tuple[int, ...], dim: int, n: int) -> tuple[int, ...]:
    """The shape of `deal`'s result, of a weight of `shape` whose K is at `dim`."""
    heads, shared, *rest = shape[dim:]
    return (*shape[:dim], heads * n, (shared - KEY_AND_VALUE) // n + KEY_AND_VALUE, *rest)


def deal(w: Float[Array, "..."], dim: int, n: int) -> Float[Array, "..."]:
    """[..., K, G + 2, H], with K at `dim`, as n K devices use it: [..., n K, G/n + 2, H]."""
    q, kv = _apart(w, dim)
    q = _merge(_cut(q, dim + 1, n), dim)
    return jnp.concatenate([q, jnp.repeat(kv, n, axis=dim)], axis=dim + 1)


def collect(g: Float[Array, "..."], dim: int, n: int) -> Float[Array, "..."]:
    """`deal` backward: [..., n K, G/n + 2, H] -> [..., K, G + 2, H], the copies of a key or a value added up."""
    q, kv = (_cut(a, dim, g.shape[dim] // n) for a in _apart(g, dim))
    return jnp.concatenate([_merge(q, dim + 1), kv.sum(dim + 1)], axis=dim + 1)


def _apart(w: jax.Array, dim: int) -> list[jax.Array]:
    """Queries; keys and values."""
    return jax.lax.split(w, (w.shape[dim + 1] - KEY_AND_VALUE, KEY_AND_VALUE), axis=dim + 1)


def _cut(a: jax.Array, dim: int, parts: int) -> jax.Array:
    """Two dims in place of one."""
    return a.reshape(*a.shape[:dim], parts, -1, *a.shape[dim + 1 :])


def _merge(a: jax.Array, dim: int) -> jax.Array:
    """One dim in place of two."""
    return a.reshape(*a.shape[:dim], -1, *a.shape[dim + 2 :])
