"""The parts that models are made of: parameters with logical axes, layer norm, causal attention, MLP, dropout."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Key

from jaxdist.sharding import Layout, spread, wide

ATTENTION_BLOCK = 128
"""Fewest query rows that blocked attention works on at a time."""


def normal(key: Key[Array, ""], shape: Sequence[int], scale: float) -> Float[Array, "..."]:
    """Normal numbers (standard deviation `scale`, cut at 4.9 of them) with the same bits on every mesh and backend.

    The sum of eight uniform 16-bit integers (Irwin-Hall, excess kurtosis -0.15) is exact, and one multiplication
    follows. The usual inverse error function is not reproducible: its last bit depends on how XLA fuses it, which
    depends on the layout of the result.
    """
    n, bits = 8, 16
    words = [jax.random.bits(k, shape, jnp.uint32) for k in jax.random.split(key, n // 2)]
    total = sum(((w >> bits) + (w & (2**bits - 1))).astype(jnp.int32) for w in words)
    deviation = 2**bits * math.sqrt(n / 12)
    return (2 * total - n * (2**bits - 1)).astype(jnp.float32) * jnp.float32(scale / deviation / 2)


def weight(rngs: nnx.Rngs, shape: Sequence[int], axes: tuple[str | None, ...], scale: float = 0.02) -> nnx.Param:
    """A normal-initialised parameter whose dims carry the logical `axes`."""
    return nnx.Param(normal(rngs.params(), shape, scale), axes=axes)


def constant(value: float, shape: Sequence[int], axes: tuple[str | None, ...]) -> nnx.Param:
    return nnx.Param(jnp.full(shape, value, jnp.float32), axes=axes)


class LayerNorm(nnx.Module):
    """Layer normalisation over D (Ba et al. 2016, eq. 4), computed in f32 at least."""

    def __init__(self, embed: int):
        self.scale = constant(1.0, (embed,), ("embed",))
        self.bias = constant(0.0, (embed,), ("embed",))

    def __call__(self, x: Float[Array, "B S D"]) -> Float[Array, "B S D"]:
        y = x.astype(wide(x.dtype))
        y = y - jnp.mean(y, -1, keepdims=True)
        y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), -1, keepdims=True) + 1e-5)
        y = y * spread(self.scale[...], y) + spread(self.bias[...], y)
        return y.astype(x.dtype)


class Attention(nnx.Module):
    """Causal multi-head self-attention (Vaswani et al. 2017, section 3.2); one product makes query, key and value."""

    def __init__(self, embed: int, heads: int, layout: Layout, rngs: nnx.Rngs, out_scale: float):
        size = embed // heads
        self.layout = layout
        self.qkv = weight(rngs, (embed, 3, heads, size), ("embed", None, "heads", None))
        self.qkv_bias = constant(0.0, (3, heads, size), (None, "heads", None))
        self.out = weight(rngs, (heads, size, embed), ("heads", None, "embed"), out_scale)
        self.out_bias = constant(0.0, (embed,), ("embed",))

    def __call__(self, x: Float[Array, "B S D"]) -> Float[Array, "B S D"]:
        qkv = self.layout.einsum("BSD,DCNH->BSCNH", x, self.qkv[...])
        qkv = qkv + spread(self.qkv_bias[...], qkv)
        q, k, v = (qkv[:, :, i] for i in range(3))
        out = self.layout.einsum("BSNH,NHD->BSD", causal_attention(q, k, v), self.out[...])
        return out + spread(self.out_bias[...], out)


def causal_attention(
    q: Float[Array, "B S N H"], k: Float[Array, "B S N H"], v: Float[Array, "B S N H"]
) -> Float[Array, "B S N H"]:
    """Softmax attention over the past, in blocks of queries that skip the keys after them; softmax in f32.

    With n blocks the work is (n + 1) / 2n of the full square, as in FlashAttention (Dao 2023, section 3.1.1); the
    blocks are unrolled, at most 8, so that the program does not grow with S.
    """
    rows = _block_rows(q.shape[1])
    q, k, v = (a.swapaxes(1, 2) for a in (q, k, v))  # BNSH
    starts = range(0, q.shape[2], rows)
    out = [_attend(q[:, :, start : start + rows], k[:, :, : start + rows], v[:, :, : start + rows]) for start in starts]
    return jnp.concatenate(out, axis=2).swapaxes(1, 2)


@jax.custom_vjp
def _attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """The last queries of a sequence against all keys up to the last one of them: BNSH with S at the end of T."""
    return _attend_forward(q, k, v)[0]


def _attend_forward(q, k, v):
    scores = jnp.einsum("BNSH,BNTH->BNST", q * q.shape[-1] ** -0.5, k, preferred_element_type=wide(q.dtype))
    visible = jnp.tril(jnp.ones(scores.shape[2:], bool), k.shape[2] - q.shape[2])
    p = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf), axis=-1).astype(v.dtype)
    out = jnp.einsum("BNST,BNTH->BNSH", p, v)
    return out, (q, k, v, p, out)


def _attend_backward(saved, g):
    """Dao et al. 2022, appendix B.2. dK and dV are formed transposed, so that P and dS, the large ones, are not."""
    q, k, v, p, out = saved
    dv = jnp.einsum("BNSH,BNST->BNHT", g, p)
    dp = jnp.einsum("BNSH,BNTH->BNST", g, v, preferred_element_type=wide(q.dtype))
    correction = jnp.sum((g * out).astype(dp.dtype), -1, keepdims=True)
    ds = (p * (dp - correction) * q.shape[-1] ** -0.5).astype(q.dtype)
    dk = jnp.einsum("BNSH,BNST->BNHT", q, ds)
    return jnp.einsum("BNST,BNTH->BNSH", ds, k), dk.swapaxes(2, 3), dv.swapaxes(2, 3)


_attend.defvjp(_attend_forward, _attend_backward)


def attention_kernel(sequence: int) -> str:
    """Which attention runs, and why: for the summary of a run."""
    blocks = sequence // _block_rows(sequence)
    return f"causal attention in {blocks} block(s) of queries: the one form that this version has, on every device"


def _block_rows(sequence: int) -> int:
    blocks = min(8, sequence // ATTENTION_BLOCK)
    while blocks > 1 and sequence % blocks:
        blocks -= 1
    return sequence // max(blocks, 1)


@jax.custom_vjp
def gelu(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """GELU (Hendrycks and Gimpel 2016), tanh form. Its slope is saved in place of `x`: one tanh, not three."""
    return _gelu_forward(x)[0]


def _gelu_forward(x):
    a, c = math.sqrt(2 / math.pi), 0.044715
    t = jnp.tanh(a * (x + c * x**3))
    return 0.5 * x * (1 + t), 0.5 * (1 + t) + 0.5 * x * (1 - t**2) * a * (1 + 3 * c * x**2)


gelu.defvjp(_gelu_forward, lambda slope, g: (g * slope,))


class MLP(nnx.Module):
    """Two layers around a GELU."""

    def __init__(self, embed: int, mlp: int, layout: Layout, rngs: nnx.Rngs, out_scale: float):
        self.layout = layout
        self.up = weight(rngs, (embed, mlp), ("embed", "mlp"))
        self.up_bias = constant(0.0, (mlp,), ("mlp",))
        self.down = weight(rngs, (mlp, embed), ("mlp", "embed"), out_scale)
        self.down_bias = constant(0.0, (embed,), ("embed",))

    def __call__(self, x: Float[Array, "B S D"]) -> Float[Array, "B S D"]:
        h = self.layout.einsum("BSD,DF->BSF", x, self.up[...])
        h = gelu(h + spread(self.up_bias[...], h))
        out = self.layout.einsum("BSF,FD->BSD", h, self.down[...])
        return out + spread(self.down_bias[...], out)


def dropout(x: Float[Array, "B S D"], rate: float, keys: Key[Array, " B"] | None, site: int) -> Float[Array, "B S D"]:
    """Drop values with probability `rate`; `keys` holds one key per row, so a row's mask depends on no mesh.

    `site` tells the places in a layer apart. No keys, no dropout (evaluation).
    """
    if keys is None or rate == 0.0:
        return x
    keep = jax.vmap(lambda key: jax.random.bernoulli(jax.random.fold_in(key, site), 1 - rate, x.shape[1:]))(keys)
    return jnp.where(keep, x / (1 - rate), 0).astype(x.dtype)
