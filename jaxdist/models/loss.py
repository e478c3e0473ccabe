"""Cross-entropy of a language model, fused with the output projection and its gradient."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import reshard
from jaxtyping import Array, Float, Int

from jaxdist.sharding import Layout, gradient_spec, scale_partial, wide

CHUNK_ROWS = 256
"""Rows of logits that exist at a time on one device."""


def cross_entropy(
    layout: Layout, x: Float[Array, "B S D"], table: Float[Array, "V D"], labels: Int[Array, "B S"]
) -> Float[Array, ""]:
    """Sum over all labels, but for the negative ones (padding), of log sum exp(x E^T) - (x E^T)[label], in nats, f32.

    Neither pass holds a B*S x V array: the rows are taken in chunks, and each chunk's gradient (softmax minus one-hot)
    is used for dx and dE while it is there, so the backward pass only scales what the forward pass has made: three
    matrix products in place of four. Chunks are cut along S, which leaves B split over the devices as it is.
    """
    return _fused(layout, x, table, labels)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _fused(layout: Layout, x: jax.Array, table: jax.Array, labels: jax.Array) -> jax.Array:
    def chunk(total, part):
        return total + _nll(*_logits(layout, part[0], table), part[1]), None

    return jax.lax.scan(chunk, jnp.zeros((), wide(x.dtype)), (_cut(layout, x), _cut(layout, labels)))[0]


def _fused_forward(layout, x, table, labels):
    def chunk(carry, part):
        loss, d_table = carry
        x, labels = part
        logits, lse = _logits(layout, x, table)
        ids = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 2)
        valid = (labels >= 0)[..., None]
        g = jnp.where(valid, jnp.exp(logits - lse) - (ids == labels[..., None]), 0).astype(x.dtype)
        dx = jnp.einsum("BSV,VD->BSD", g, table, out_sharding=layout.activation("BSD"))
        x = jax.lax.optimization_barrier(jnp.einsum("BSD->DBS", x))  # see sharding._weight_einsum_backward
        part = jnp.einsum("DBS,BSV->DV", x, g, out_sharding=transposed, preferred_element_type=wide(x.dtype))
        return (loss + _nll(logits, lse, labels), d_table + part), dx

    transposed = gradient_spec(table.T)  # so that x is turned around for the product, which is smaller than g
    zeros = reshard(jnp.zeros(table.shape[::-1], wide(table.dtype)), transposed)
    (loss, d_table), dx = jax.lax.scan(
        chunk, (jnp.zeros((), wide(x.dtype)), zeros), (_cut(layout, x), _cut(layout, labels))
    )
    return loss, (jnp.moveaxis(dx, 0, 1).reshape(x.shape), d_table, table)


def _fused_backward(layout, saved, g):
    dx, d_table, table = saved
    return dx * g.astype(dx.dtype), scale_partial(d_table, g).T.astype(table.dtype), None


_fused.defvjp(_fused_forward, _fused_backward)


def _logits(layout: Layout, x: jax.Array, table: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Logits and their log sum exp, both in f32 at least."""
    logits = jnp.einsum(
        "BSD,VD->BSV", x, table, out_sharding=layout.activation("BSV"), preferred_element_type=wide(x.dtype)
    )
    return logits, jax.nn.logsumexp(logits, axis=-1, keepdims=True)


def _nll(logits: jax.Array, lse: jax.Array, labels: jax.Array) -> jax.Array:
    ids = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 2)
    target = jnp.sum(jnp.where(ids == labels[..., None], logits, 0), axis=-1)
    return jnp.sum(jnp.where(labels >= 0, lse[..., 0] - target, 0))


def _cut(layout: Layout, a: jax.Array) -> jax.Array:
    """[B, S, ...] -> [chunks, B, S / chunks, ...] with about `CHUNK_ROWS` rows a device in each chunk."""
    batch, sequence = a.shape[:2]
    length = max(1, min(sequence, CHUNK_ROWS * layout.ranks // batch))
    while sequence % length:
        length -= 1
    return jnp.moveaxis(a.reshape(batch, sequence // length, length, *a.shape[2:]), 1, 0)
