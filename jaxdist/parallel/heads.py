"""Key/value heads that are fewer than the devices of the model axis (Ainslie et al. 2023, section 2.2).

With grouped-query attention (GQA), one attention weight [..., K, G + 2, H] holds, for each of K key/value heads, the G
query heads that it serves, then its key, then its value. When n K devices split the heads, each of them needs a key
and a value, so the weight in use is [..., n K, G/n + 2, H]: query heads are dealt out, each key and value is repeated
n times. A bias is dealt in the same way, and so are the scales [..., K, G + 1, H] of a norm of queries and keys.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxdist.sharding import Layout, LogicalAxes

REPEATED = dict(kv_heads=2, normed_kv_heads=1, kv_heads_of_queries=0, kv_heads_alone=1)
"""The logical axes of a dim K, and how many heads that the queries share stand last in the dim behind it: key and
value, one of them, or none."""


@dataclass(frozen=True)
class HeadDeal:
    """How the key/value heads of one parameter are dealt to more devices than there are heads."""

    dim: int
    """The dim of K."""
    parts: int
    """How many devices share a key/value head: n."""
    repeated: int = 2
    """How many heads that the queries share stand last in the dim behind K."""

    @property
    def size_dim(self) -> int:
        """The dim of H."""
        return self.dim + 2

    @property
    def layer(self) -> HeadDeal:
        """The deal for one layer of a stack, which has no leading dim of layers."""
        return replace(self, dim=self.dim - 1)


def deal_of(layout: Layout, axes: LogicalAxes, shape: tuple[int, ...]) -> HeadDeal | None:
    """Return how key/value heads are dealt; None for a parameter that has none, or has enough to split.

    Raises `ValueError` where they cannot be dealt evenly.
    """
    dim = next((dim for dim, name in enumerate(axes) if name in REPEATED), None)
    if dim is None:
        return None
    count = shape[dim]
    parts = layout.parts("heads")
    if count % parts == 0:
        return None
    if parts % count:
        raise ValueError(f"{count} key/value heads neither split nor repeat evenly over {parts} parts")
    return HeadDeal(dim, parts // count, REPEATED[str(axes[dim])])


def dealt(shape: tuple[int, ...], of: HeadDeal) -> tuple[int, ...]:
    """Return the shape that `deal` makes of a weight of `shape`."""
    heads, shared, *rest = shape[of.dim :]
    queries = shared - of.repeated
    return (*shape[: of.dim], heads * of.parts, queries // of.parts + of.repeated, *rest)


def deal(w: Float[Array, "..."], of: HeadDeal) -> Float[Array, "..."]:
    """Deal the heads of [..., K, G + 2, H] to n K devices: [..., n K, G/n + 2, H]."""
    return _each_part(w, of, _deal_queries, lambda shared, of: jnp.repeat(shared, of.parts, axis=of.dim))


def collect(g: Float[Array, "..."], of: HeadDeal) -> Float[Array, "..."]:
    """Transpose `deal`: [..., n K, G/n + 2, H] -> [..., K, G + 2, H], summing the copies of each key and value."""
    return _each_part(g, of, _collect_queries, _collect_shared)


def _deal_queries(queries: jax.Array, of: HeadDeal) -> jax.Array:
    """[..., K, G, H] -> [..., K, n, G/n, H] -> [..., n K, G/n, H]."""
    lead = queries.shape[: of.dim]
    heads, group, *rest = queries.shape[of.dim :]
    queries = queries.reshape(*lead, heads, of.parts, group // of.parts, *rest)
    return queries.reshape(*lead, heads * of.parts, group // of.parts, *rest)


def _collect_queries(queries: jax.Array, of: HeadDeal) -> jax.Array:
    """[..., n K, G/n, H] -> [..., K, n, G/n, H] -> [..., K, G, H]."""
    lead = queries.shape[: of.dim]
    heads, group, *rest = queries.shape[of.dim :]
    queries = queries.reshape(*lead, heads // of.parts, of.parts, group, *rest)
    return queries.reshape(*lead, heads // of.parts, of.parts * group, *rest)


def _collect_shared(shared: jax.Array, of: HeadDeal) -> jax.Array:
    """[..., n K, 2, H] -> [..., K, n, 2, H], of which n are copies -> [..., K, 2, H]."""
    lead = shared.shape[: of.dim]
    heads, *rest = shared.shape[of.dim :]
    return shared.reshape(*lead, heads // of.parts, of.parts, *rest).sum(of.dim + 1)


def _each_part(
    w: jax.Array,
    of: HeadDeal,
    of_queries: Callable[[jax.Array, HeadDeal], jax.Array],
    of_shared: Callable[[jax.Array, HeadDeal], jax.Array],
) -> jax.Array:
    """Apply one function to the queries of an attention weight, and another to what they share; it may lack either."""
    behind = of.dim + 1
    count = w.shape[behind] - of.repeated
    if count == 0:
        return of_shared(w, of)
    if of.repeated == 0:
        return of_queries(w, of)
    queries, shared = jax.lax.split(w, (count, of.repeated), axis=behind)
    return jnp.concatenate([of_queries(queries, of), of_shared(shared, of)], axis=behind)
