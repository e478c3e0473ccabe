"""The kernel of ring attention by matmuls, which runs anywhere (`parallel.context`)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from jaxdist.models.scores import Scores
from jaxdist.parallel import region
from jaxdist.parallel.context import Attended, Gradients, Keys, Queries, halves, join, joined
from jaxdist.sharding import Tree, wide

ROWS = 256
"""Most queries that `QueryBlocks` works on at a time."""


@dataclass(frozen=True)
class QueryBlocks:
    """Attention by matmuls, in blocks of queries: a loop over `rows` of them at a time, each with all keys of a chunk.

    So temporary memory grows as the chunk does, and not as its square. Documents and a window are masked.
    """

    scores: Scores
    rows: int = ROWS

    def own(self, queries: Queries, keys: Keys) -> Attended:
        """See `Blocks`: the three half-blocks that are not all in the future."""
        first, second = halves(queries)
        keys1, keys2 = halves(keys)
        two = join(self._attend(second, keys1, self._hides(queries)), self._attend(second, keys2, True))
        return joined(self._attend(first, keys1, True), two)

    def visit(self, queries: Queries, keys: Keys) -> Attended:
        """See `Blocks`."""
        return self._attend(queries, keys, self._hides(queries))

    def own_gradients(self, queries: Queries, keys: Keys, found: Attended, g: Float[Array, "B S N U"]) -> Gradients:
        """See `Blocks`."""
        (first, found1, g1), (second, found2, g2) = halves((queries, found, g))
        keys1, keys2 = halves(keys)
        a = self._gradients(first, keys1, found1, g1, True)
        b = self._gradients(second, keys1, found2, g2, self._hides(queries))
        c = self._gradients(second, keys2, found2, g2, True)
        return joined(Gradients(a.q, a.k + b.k, a.v + b.v), Gradients(b.q + c.q, c.k, c.v))

    def visit_gradients(self, queries: Queries, keys: Keys, found: Attended, g: Float[Array, "B S N U"]) -> Gradients:
        """See `Blocks`."""
        return self._gradients(queries, keys, found, g, self._hides(queries))

    def _hides(self, queries: Queries) -> bool:
        """Return whether earlier keys may be hidden."""
        return queries.starts is not None or self.scores.window > 0

    def _attend(self, queries: Queries, keys: Keys, masked: bool) -> Attended:
        """Return what the queries find; `masked`: not all keys are visible."""

        def block(queries: Queries) -> Attended:
            scores = self._products(queries, keys, masked)
            highest = jnp.max(scores, -1, keepdims=True)
            # Of a query that sees none of these keys, all scores are -inf.
            p = jnp.exp(scores - jnp.where(highest == -jnp.inf, 0, highest))
            total = jnp.sum(p, -1, keepdims=True)
            out = jnp.einsum("BKGST,BTKH->BKGSH", p.astype(keys.v.dtype), keys.v, preferred_element_type=total.dtype)
            out = out / jnp.where(total == 0, 1, total)
            return Attended(_by_query(out), _by_query(highest + jnp.log(total))[..., 0])

        length = len(queries.at)
        if block_count(length, self.rows) == 1:
            return block(queries)
        return self._together(lax.map(block, self._apart(queries, length)), length)

    def _gradients(
        self, queries: Queries, keys: Keys, found: Attended, g: Float[Array, "B S N U"], masked: bool
    ) -> Gradients:
        """Return the gradients of `_attend` (Dao et al. 2022, appendix B.2)."""
        groups = keys.k.shape[2]

        def block(of: tuple[Queries, Attended, jax.Array]) -> Gradients:
            queries, found, g = of
            sums = found.sums
            correction = jnp.sum(g.astype(sums.dtype) * found.out.astype(sums.dtype), -1)
            correction, sums = (_by_head(a[..., None], groups) for a in (correction, sums))
            scores = self._products(queries, keys, masked)
            p = jnp.exp(scores - sums)
            q = _by_head(queries.q, groups)
            g = _by_head(g, groups)
            dp = jnp.einsum("BKGSH,BTKH->BKGST", g, keys.v, preferred_element_type=p.dtype)
            ds = (p * (dp - correction) * self.scores.slope(scores)).astype(q.dtype)
            dq = jnp.einsum("BKGST,BTKH->BKGSH", ds, keys.k, preferred_element_type=p.dtype)
            dk = jnp.einsum("BKGST,BKGSH->BTKH", ds, q, preferred_element_type=p.dtype)
            dv = jnp.einsum("BKGST,BKGSH->BTKH", p.astype(g.dtype), g, preferred_element_type=p.dtype)
            return Gradients(_by_query(dq), dk, dv)

        length = len(queries.at)
        if block_count(length, self.rows) == 1:
            return block((queries, found, g))
        axes = region.varying(queries.q, keys.k, keys.v, g)
        zeros = [region.zeros(a.shape, wide(a.dtype), axes) for a in (keys.k, keys.v)]

        def add(sums: list[jax.Array], of: tuple[Queries, Attended, jax.Array]) -> tuple[list[jax.Array], jax.Array]:
            dq, dk, dv = block(of)
            return [sums[0] + dk, sums[1] + dv], dq

        (dk, dv), dq = lax.scan(add, zeros, self._apart((queries, found, g), length))
        return Gradients(self._together(dq, length), dk, dv)

    def _products(self, queries: Queries, keys: Keys, masked: bool) -> Float[Array, "B K G S T"]:
        """Return the scores of queries with keys, -inf where a key is hidden."""
        q = _by_head(queries.q, keys.k.shape[2])
        products = jnp.einsum("BKGSH,BTKH->BKGST", q * self.scores.scale, keys.k, preferred_element_type=wide(q.dtype))
        scores = self.scores.capped(products)
        return jnp.where(self._visible(queries, keys), scores, -jnp.inf) if masked else scores

    def _visible(self, queries: Queries, keys: Keys) -> Bool[Array, "... S T"]:
        """Return which keys each query sees: those that are not later, in its window and in its document."""
        at = queries.at[:, None]
        of = keys.at[None]
        seen = self.scores.seen(at, of)
        if queries.starts is None:
            return seen
        return seen[None, None, None] & (queries.starts[..., None] <= of[None])[:, None, None]

    def _apart(self, tree: Tree, length: int) -> Tree:
        """Cut the tokens of every array, its second dim or its only one, into equally long blocks, which come first.

        Zeros fill up the last one: such queries, with gradients of zero, add nothing to any other gradient.
        """
        blocks = block_count(length, self.rows)
        filled = blocks * math.ceil(length / blocks) - length

        def cut(a: jax.Array) -> jax.Array:
            if a.ndim == 1:
                return jnp.pad(a, (0, filled)).reshape(blocks, -1)
            a = jnp.pad(a, [(0, filled if dim == 1 else 0) for dim in range(a.ndim)])
            return jnp.moveaxis(a.reshape(a.shape[0], blocks, -1, *a.shape[2:]), 1, 0)

        return jax.tree.map(cut, tree)

    def _together(self, tree: Tree, length: int) -> Tree:
        """Undo `_apart` for arrays of results."""

        def join(a: jax.Array) -> jax.Array:
            a = jnp.moveaxis(a, 0, 1)
            return a.reshape(a.shape[0], -1, *a.shape[3:])[:, :length]

        return jax.tree.map(join, tree)


def block_count(length: int, rows: int = ROWS) -> int:
    """Return the number of blocks of `length` queries."""
    return math.ceil(length / rows)


def _by_head(a: Float[Array, "B S N X"], groups: int) -> Float[Array, "B K G S X"]:
    """Bring the heads forward, in `groups` that share a key/value head."""
    batch, length, heads, size = a.shape
    return a.reshape(batch, length, groups, heads // groups, size).transpose(0, 2, 3, 1, 4)


def _by_query(a: Float[Array, "B K G S X"]) -> Float[Array, "B S N X"]:
    """Undo `_by_head`."""
    batch, groups, group, length, size = a.shape
    return a.transpose(0, 3, 1, 2, 4).reshape(batch, length, groups * group, size)
