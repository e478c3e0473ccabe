"""Key/value heads that are fewer than the devices of the model axis (Ainslie et al. 2023, section 2.2).

With grouped-query attention (GQA), one attention weight [..., K, G + 2, H] holds, for each of K key/value heads, the G
query heads that it serves, then its key, then its value. When n K devices split the heads, each of them needs a key
and a value, so the weight in use is [..., n K, G/n + 2, H]: query heads are dealt out, each key and value is repeated
n times. A bias is dealt in the same way, and so are the scales [..., K, G + 1, H] of a norm of queries and keys.
"""

from __future__ import annotations

from collections.abc import Sequence
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


def own_heads(count: int, parts: int) -> int:
    """Return how many of `count` key/value heads a device has in use, where `parts` split the heads."""
    return max(1, count // parts)


def dealt(shape: tuple[int, ...], of: HeadDeal) -> tuple[int, ...]:
    """Return the shape that `deal` makes of a weight of `shape`."""
    heads, shared, *rest = shape[of.dim :]
    queries = shared - of.repeated
    return (*shape[: of.dim], heads * of.parts, queries // of.parts + of.repeated, *rest)


def deal(w: Float[Array, "..."], of: HeadDeal) -> Float[Array, "..."]:
    """Deal the heads of [..., K, G + 2, H] to n K devices: [..., n K, G/n + 2, H]."""
    dim = of.dim
    n = of.parts
    queries, keys_and_values = _split_queries(w, of)
    # Queries are dealt out: [..., K, G, H] -> [..., K, n, G/n, H] -> [..., n K, G/n, H].
    lead = queries.shape[:dim]
    heads = queries.shape[dim]
    rest = queries.shape[dim + 2 :]
    own = queries.shape[dim + 1] // n
    queries = queries.reshape(*lead, heads, n, own, *rest)
    queries = queries.reshape(*lead, heads * n, own, *rest)
    # Keys and values are repeated: [..., K, 2, H] -> [..., n K, 2, H].
    keys_and_values = jnp.repeat(keys_and_values, n, axis=dim)
    return jnp.concatenate([queries, keys_and_values], axis=dim + 1)


def collect(g: Float[Array, "..."], of: HeadDeal) -> Float[Array, "..."]:
    """Transpose `deal`: [..., n K, G/n + 2, H] -> [..., K, G + 2, H], summing the copies of each key and value."""
    dim = of.dim
    n = of.parts
    queries, keys_and_values = _split_queries(g, of)
    lead = g.shape[:dim]
    heads = g.shape[dim] // n
    rest = g.shape[dim + 2 :]
    # [..., n K, G/n, H] -> [..., K, n, G/n, H] -> [..., K, G, H]
    queries = queries.reshape(*lead, heads, n, *queries.shape[dim + 1 :])
    # [..., n K, 2, H] -> [..., K, n, 2, H], of which n are copies.
    keys_and_values = keys_and_values.reshape(*lead, heads, n, *keys_and_values.shape[dim + 1 :])
    queries = queries.reshape(*lead, heads, n * queries.shape[dim + 2], *rest)
    return jnp.concatenate([queries, keys_and_values.sum(dim + 1)], axis=dim + 1)


def _split_queries(w: jax.Array, of: HeadDeal) -> Sequence[jax.Array]:
    """Return [queries, keys and values] of one attention weight."""
    behind = of.dim + 1
    sizes = (w.shape[behind] - of.repeated, of.repeated)
    return jax.lax.split(w, sizes, axis=behind)
