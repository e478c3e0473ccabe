"""Causal attention in blocks of queries, by matmuls: no array of S x S is kept (Dao et al. 2022; Dao 2023).

The letters are those of `models.attention`.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float

from jaxdist.models.scores import Scores, effective_window
from jaxdist.models.sinks import Sinks, with_gradient_of_sinks, with_sinks
from jaxdist.parallel.context import Attended, Starts
from jaxdist.sharding import wide

ATTENTION = "attention"
"""The checkpoint name of attention's results, for activation checkpointing (remat) policies."""

BLOCK = 128
"""Fewest queries that blocked attention works on at a time."""


def blocked_attention(
    scores: Scores,
    q: Float[Array, "B S N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K U"],
    starts: Starts,
    sinks: Sinks,
) -> Float[Array, "B S N U"]:
    """Attend in blocks of queries that skip the keys after them, and those that a window hides from all of them.

    With n blocks the work is (n + 1) / 2n of the full square (Dao 2023, section 3.1.1), and with a window that of S
    rows of at most S / n + W keys. No S x S array is kept: the backward pass recomputes each block's probabilities from
    the log sum exp of its rows (section 3.1). The blocks are unrolled, at most 8, so that the program does not grow
    with S.
    """
    # Remat policies see nothing inside a custom VJP: so the results are made and named before it.
    results = _forward(scores, *jax.lax.stop_gradient((q, k, v)), starts)
    if sinks is None:
        out, sums = (checkpoint_name(a, ATTENTION) for a in results)
        return _with_gradient(scores, q, k, v, starts, out, sums)
    group = q.shape[2] // k.shape[2]
    out, sums = results
    found = with_sinks(Attended(out, _ungroup(sums, group)[..., 0]), jax.lax.stop_gradient(sinks))
    found = jax.tree.map(partial(checkpoint_name, name=ATTENTION), found)
    out = _with_gradient(scores, q, k, v, starts, found.out, _group(found.sums[..., None], group))
    return with_gradient_of_sinks(found._replace(out=out), sinks)


def _forward(scores: Scores, q: jax.Array, k: jax.Array, v: jax.Array, starts: Starts) -> tuple[jax.Array, jax.Array]:
    """Return the output [B, S, N, U], laid out as its matmul with a weight keeps it, and log sum exp [B, K, S', 1].

    S' is G S: see `_group`. The keys' S is called T.
    """
    group = q.shape[2] // k.shape[2]
    sequence = q.shape[1]
    q = _group(q, group)
    k = k.swapaxes(1, 2)
    v = v.swapaxes(1, 2)
    blocks = []
    sums = []
    for block in _blocks(sequence, group, scores.window):
        s = _scores(scores, q[:, :, block.rows], k[:, :, block.past], block, group, starts)
        # The maximum is subtracted so that exp does not overflow (Dao et al. 2022, section 3.1).
        highest = jnp.max(s, -1, keepdims=True)
        p = jnp.exp(s - highest)
        total = jnp.sum(p, -1, keepdims=True)
        out = jnp.einsum("BKST,BKTH->BKSH", p.astype(v.dtype), v[:, :, block.past], preferred_element_type=total.dtype)
        blocks.append((out / total).astype(v.dtype))
        sums.append(highest + jnp.log(total))
    return _ungroup(jnp.concatenate(blocks, axis=2), group), jnp.concatenate(sums, axis=2)


Saved = tuple[jax.Array, jax.Array, jax.Array, Starts, jax.Array, jax.Array]
"""(q, k, v, starts, out, sums) of `_with_gradient`."""


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _with_gradient(
    scores: Scores, q: jax.Array, k: jax.Array, v: jax.Array, starts: Starts, out: jax.Array, sums: jax.Array
) -> jax.Array:
    """Return `out`, whose gradient goes to q, k and v."""
    return out


def _with_gradient_forward(
    scores: Scores, q: jax.Array, k: jax.Array, v: jax.Array, starts: Starts, out: jax.Array, sums: jax.Array
) -> tuple[jax.Array, Saved]:
    return out, (q, k, v, starts, out, sums)


def _with_gradient_backward(
    scores: Scores, saved: Saved, g: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, None, None, None]:
    """Return the gradients of q, k and v (Dao et al. 2022, appendix B.2)."""
    q, k, v, starts, out, sums = saved
    group = q.shape[2] // k.shape[2]
    sequence = q.shape[1]
    correction = _group(jnp.sum((g * out).astype(sums.dtype), -1, keepdims=True), group)
    q = _group(q, group)
    g = _group(g, group)
    k = k.swapaxes(1, 2)
    v = v.swapaxes(1, 2)
    # dK and dV are formed transposed, so that P and dS, the large ones, are not. Q and dO are transposed behind a
    # barrier for the CPU's sake: see `parallel.matmul_cpu`.
    q_columns, g_columns = jax.lax.optimization_barrier((q.swapaxes(2, 3), g.swapaxes(2, 3)))

    def transposed(a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.einsum("BKHS,BKST->BKHT", a, b).astype(sums.dtype)

    dq = []
    # The blocks' shares of dK and dV are accumulated in f32.
    dk: jax.Array | int = 0
    dv: jax.Array | int = 0
    for block in _blocks(sequence, group, scores.window):
        rows = block.rows
        past = block.past
        around = [(0, 0), (0, 0), (0, 0), (past.start, sequence - past.stop)]
        s = _scores(scores, q[:, :, rows], k[:, :, past], block, group, starts)
        p = jnp.exp(s - sums[:, :, rows])
        dp = jnp.einsum("BKSH,BKTH->BKST", g[:, :, rows], v[:, :, past], preferred_element_type=p.dtype)
        # dS = P * (dP - rowsum(dO * O)), times the scale of the scores, and the slope of their cap.
        ds = (p * (dp - correction[:, :, rows]) * scores.slope(s)).astype(q.dtype)
        dq.append(jnp.einsum("BKST,BKTH->BKSH", ds, k[:, :, past]))
        dk += jnp.pad(transposed(q_columns[..., rows], ds), around)
        dv += jnp.pad(transposed(g_columns[..., rows], p.astype(g.dtype)), around)
    dk, dv = (jnp.moveaxis(d, 3, 1).astype(k.dtype) for d in (dk, dv))
    return _ungroup(jnp.concatenate(dq, axis=2), group), dk, dv, None, None, None


_with_gradient.defvjp(_with_gradient_forward, _with_gradient_backward)


class _Block(NamedTuple):
    """A block of queries, and the keys that some of them see."""

    rows: slice
    """The queries, as `_group` lays them out."""
    queries: slice
    """Their positions."""
    past: slice
    """The positions of the keys."""


def _scores(
    scores: Scores,
    q: Float[Array, "B K S' H"],
    k: Float[Array, "B K T H"],
    block: _Block,
    group: int,
    starts: Starts,
) -> Float[Array, "B K S' T"]:
    """Return the scores of a block's queries with its keys, -inf where a key is not visible."""
    products = jnp.einsum("BKSH,BKTH->BKST", q * scores.scale, k, preferred_element_type=wide(q.dtype))
    return jnp.where(_visible(scores, block, group, starts), scores.capped(products), -jnp.inf)


def _visible(scores: Scores, block: _Block, group: int, starts: Starts) -> Bool[Array, "... S' T"]:
    """Return which keys each query of a block sees: those that are not later, in its window and in its document."""
    queries = jnp.arange(block.queries.start, block.queries.stop)[:, None]
    keys = jnp.arange(block.past.start, block.past.stop)[None]
    seen = jnp.tile(scores.seen(queries, keys), (group, 1))
    if starts is None:
        return seen
    first = jnp.tile(starts[:, block.queries], (1, group))[:, None, :, None]
    return seen[None, None] & (first <= keys[None, None].astype(starts.dtype))


def _group(a: Float[Array, "B S N H"], group: int) -> Float[Array, "B K S' H"]:
    """Lay out the queries of the `group` heads that share keys as rows of one head: by block, then by head.

    So a block of queries is one slice, and its matmuls with the keys are one each. Where N is split, K is.
    """
    batch, sequence, heads, size = a.shape
    a = a.swapaxes(1, 2)
    if group == 1:
        return a
    # [B, K, G, S, H] -> [B, K, G, blocks, rows, H] -> [B, K, blocks, G, rows, H] -> [B, K, S', H]
    a = a.reshape(batch, heads // group, group, sequence, size)
    a = a.reshape(*a.shape[:3], -1, block_rows(sequence), size)
    return a.swapaxes(2, 3).reshape(batch, heads // group, -1, size)


def _ungroup(a: Float[Array, "B K S' H"], group: int) -> Float[Array, "B S N H"]:
    """Return the inverse of `_group`."""
    batch, kv_heads, queries, size = a.shape
    if group > 1:
        a = a.reshape(batch, kv_heads, -1, group, block_rows(queries // group), size)
        a = a.swapaxes(2, 3).reshape(batch, kv_heads, group, -1, size)
        a = a.reshape(batch, kv_heads * group, -1, size)
    return a.swapaxes(1, 2)


def _blocks(sequence: int, group: int, window: int) -> list[_Block]:
    """Return all blocks of queries."""
    rows = block_rows(sequence)
    blocks = []
    for start in range(0, sequence, rows):
        end = start + rows
        first = 0
        if window:
            # In steps, because matmuls of odd sizes are slow on GPUs.
            first = max(0, start - window + 1) // BLOCK * BLOCK
        blocks.append(_Block(slice(group * start, group * end), slice(start, end), slice(first, end)))
    return blocks


def block_keys(sequence: int, window: int = 0) -> int:
    """Return how many keys a block of queries sees at most in blocked attention."""
    blocks = _blocks(sequence, 1, effective_window(window, sequence))
    return max(block.past.stop - block.past.start for block in blocks)


def block_rows(sequence: int) -> int:
    """Return how many queries blocked attention works on at a time.

    There are at most 8 blocks, since each is traced and compiled by itself, and all are equally long.
    """
    blocks = min(8, sequence // BLOCK)
    while blocks > 1 and sequence % blocks:
        blocks -= 1
    return sequence // max(blocks, 1)
