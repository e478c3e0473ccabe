"""Causal attention, and which form of it runs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxdist.sharding import wide

ATTENTION = "attention"
"""The name of attention's results, for policies of recomputation."""

BLOCK = 128
"""Fewest queries that blocked attention works on at a time."""


def causal_attention(
    q: Float[Array, "B S N H"], k: Float[Array, "B S N H"], v: Float[Array, "B S N H"]
) -> Float[Array, "B S N H"]:
    """Softmax attention over the past, in blocks of queries that skip the keys after them; softmax in f32.

    With n blocks the work is (n + 1) / 2n of the full square (Dao 2023, section 3.1.1). No S x S array is kept: the
    backward pass makes each block's probabilities again from the log sum exp of its rows (section 3.1). The blocks are
    unrolled, at most 8, so that the program does not grow with S.
    """
    return _attention(q, k, v)


@jax.custom_vjp
def _attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return _attention_forward(q, k, v)[0]


def _attention_forward(q, k, v):
    """The keys' S is called T. The output is kept as it leaves, which is how its product with a weight keeps it too."""
    q, k, v = (a.swapaxes(1, 2) for a in (q, k, v))
    blocks, sums = [], []
    for rows, past in _blocks(q.shape[2]):
        scores = _scores(q[:, :, rows], k[:, :, past])
        highest = jnp.max(scores, -1, keepdims=True)
        p = jnp.exp(scores - highest)
        total = jnp.sum(p, -1, keepdims=True)
        out = jnp.einsum("BNST,BNTH->BNSH", p.astype(v.dtype), v[:, :, past], preferred_element_type=total.dtype)
        blocks.append((out / total).astype(v.dtype))
        sums.append(highest + jnp.log(total))
    out = jnp.concatenate(blocks, axis=2).swapaxes(1, 2)
    return out, (q, k, v, out, jnp.concatenate(sums, axis=2))


def _attention_backward(saved, g):
    """Dao et al. 2022, appendix B.2. dK and dV are formed transposed, so that P and dS, the large ones, are not.

    Q and dO are turned around behind a barrier for the CPU's sake: see `sharding._weight_einsum_backward`. The blocks'
    shares of dK and dV are added in f32.
    """
    q, k, v, out, sums = saved
    correction = jnp.sum((g * out).astype(sums.dtype), -1, keepdims=True).swapaxes(1, 2)
    g = g.swapaxes(1, 2)
    q_columns, g_columns = jax.lax.optimization_barrier((q.swapaxes(2, 3), g.swapaxes(2, 3)))
    turned = lambda a, b: jnp.einsum("BNHS,BNST->BNHT", a, b).astype(sums.dtype)
    dq, dk, dv = [], 0, 0
    for rows, past in _blocks(q.shape[2]):
        after = [(0, 0)] * 3 + [(0, q.shape[2] - past.stop)]
        p = jnp.exp(_scores(q[:, :, rows], k[:, :, past]) - sums[:, :, rows])
        dp = jnp.einsum("BNSH,BNTH->BNST", g[:, :, rows], v[:, :, past], preferred_element_type=p.dtype)
        ds = (p * (dp - correction[:, :, rows]) * q.shape[-1] ** -0.5).astype(q.dtype)
        dq.append(jnp.einsum("BNST,BNTH->BNSH", ds, k[:, :, past]))
        dk += jnp.pad(turned(q_columns[..., rows], ds), after)
        dv += jnp.pad(turned(g_columns[..., rows], p.astype(g.dtype)), after)
    dq = jnp.concatenate(dq, axis=2).swapaxes(1, 2)
    return dq, *(jnp.moveaxis(d, 3, 1).astype(k.dtype) for d in (dk, dv))


_attention.defvjp(_attention_forward, _attention_backward)


def _scores(q: jax.Array, k: jax.Array) -> jax.Array:
    """The last queries of a sequence against all keys up to the last one of them, -inf where a key comes later."""
    scores = jnp.einsum("BNSH,BNTH->BNST", q * q.shape[-1] ** -0.5, k, preferred_element_type=wide(q.dtype))
    visible = jnp.tril(jnp.ones(scores.shape[2:], bool), k.shape[2] - q.shape[2])
    return jnp.where(visible, scores, -jnp.inf)


def _blocks(sequence: int) -> list[tuple[slice, slice]]:
    """(the queries of a block, the keys that some of them see) for every block."""
    rows = block_rows(sequence)
    return [(slice(start, start + rows), slice(0, start + rows)) for start in range(0, sequence, rows)]


def attention_kernel(sequence: int) -> str:
    """Which attention runs, and why: for the summary of a run."""
    blocks = sequence // block_rows(sequence)
    return f"causal attention in {blocks} block(s) of queries: the one form that this version has, on every device"


def block_rows(sequence: int) -> int:
    """How many queries blocked attention works on at a time."""
    blocks = min(8, sequence // BLOCK)
    while blocks > 1 and sequence % blocks:
        blocks -= 1
    return sequence // max(blocks, 1)
