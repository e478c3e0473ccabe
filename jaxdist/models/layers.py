"""The parts that models are made of: parameters with logical axes, layer norm, attention, MLP, dropout."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import reshard
from jaxtyping import Array, Float, Key

from jaxdist.models.attention import causal_attention
from jaxdist.parallel.tensor import einsum, enter
from jaxdist.sharding import Layout, spread, wide


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


recomputed = partial(jax.checkpoint, prevent_cse=False)
"""Marks cheap functions: only their inputs are kept, and the backward pass computes the rest again. That takes less
time than writing it to memory and reading it back, and saves half of the memory."""


class LayerNorm(nnx.Module):
    """Layer normalisation over D (Ba et al. 2016, eq. 4), computed in f32 at least."""

    def __init__(self, embed: int):
        self.scale = constant(1.0, (embed,), ("norm",))
        self.bias = constant(0.0, (embed,), ("norm",))

    def __call__(self, x: Float[Array, "B s D"]) -> Float[Array, "B s D"]:
        return _layer_norm(x, self.scale[...], self.bias[...])


@recomputed
def _layer_norm(x: jax.Array, scale: jax.Array, bias: jax.Array) -> jax.Array:
    y = x.astype(wide(x.dtype))
    y = y - jnp.mean(y, -1, keepdims=True)
    y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), -1, keepdims=True) + 1e-5)
    return (y * spread(scale, y) + spread(bias, y)).astype(x.dtype)


@partial(recomputed, static_argnums=(0, 1, 2))
def column(layout: Layout, logical: str, dims: str, x: Float[Array, "B s D"], *weights: jax.Array):
    """The residual stream times weights whose columns are split along `logical`: a product for each.

    Only `x` is kept, as it lies on the residual stream. Where that is split along the sequence, the backward pass
    gathers it again (Korthikanti et al. 2022, section 4.2.2); nobody needs the products again.
    """
    x = enter(layout, x, logical)
    products = [einsum(layout, dims, x, w) for w in weights]
    return products if len(products) > 1 else products[0]


class Attention(nnx.Module):
    """Causal multi-head self-attention (Vaswani et al. 2017, section 3.2); one product makes query, key and value."""

    def __init__(self, embed: int, heads: int, layout: Layout, rngs: nnx.Rngs, out_scale: float):
        size = embed // heads
        self.layout = layout
        self.qkv = weight(rngs, (embed, 3, heads, size), ("embed", None, "heads", None))
        self.qkv_bias = constant(0.0, (3, heads, size), (None, "heads", None))
        self.out = weight(rngs, (heads, size, embed), ("heads", None, "embed"), out_scale)
        self.out_bias = constant(0.0, (embed,), ("norm",))

    def __call__(self, x: Float[Array, "B s D"]) -> Float[Array, "B s D"]:
        qkv = column(self.layout, "heads", "BSD,DCNH->BSCNH", x, self.qkv[...])
        qkv = qkv + spread(self.qkv_bias[...], qkv)
        q, k, v = (qkv[:, :, i] for i in range(3))
        out = einsum(self.layout, "BSNH,NHD->BsD", causal_attention(q, k, v), self.out[...])
        return out + spread(self.out_bias[...], out)


@jax.custom_vjp
def gelu(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """GELU (Hendrycks and Gimpel 2016), tanh form. Its slope is made along with it: one tanh, not three."""
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
        self.down_bias = constant(0.0, (embed,), ("norm",))

    def __call__(self, x: Float[Array, "B s D"]) -> Float[Array, "B s D"]:
        h = column(self.layout, "mlp", "BSD,DF->BSF", x, self.up[...])
        out = _activate_and_contract(self.layout, h, self.up_bias[...], self.down[...])
        return out + spread(self.down_bias[...], out)


@partial(recomputed, static_argnums=0)
def _activate_and_contract(layout: Layout, h: jax.Array, bias: jax.Array, down: jax.Array) -> jax.Array:
    """Keeps `h` alone of the three arrays of width F. The product itself is not computed again: nobody needs it."""
    return einsum(layout, "BSF,FD->BsD", gelu(h + spread(bias, h)), down)


def dropout(x: Float[Array, "B s D"], rate: float, keys: Key[Array, " B"] | None, site: int) -> Float[Array, "B s D"]:
    """Drop values with probability `rate`; `keys` holds one key per row, so a row's mask depends on no mesh.

    `site` tells the places in a layer apart. No keys, no dropout (evaluation).
    """
    if keys is None or rate == 0.0:
        return x
    keep = jax.vmap(lambda key: jax.random.bernoulli(jax.random.fold_in(key, site), 1 - rate, x.shape[1:]))(keys)
    keep = reshard(keep, jax.typeof(x).sharding.spec)
    return jnp.where(keep, x / (1 - rate), 0).astype(x.dtype)
