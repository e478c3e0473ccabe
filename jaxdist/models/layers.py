"""The parts that models are made of: parameters with logical axes, norms, attention, positions, MLPs, dropout."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int, Key

from jaxdist.models.attention import Starts, causal_attention
from jaxdist.parallel import region
from jaxdist.parallel.tensor import einsum, enter
from jaxdist.sharding import Layout, spread, wide


def normal(key: Key[Array, ""], shape: Sequence[int], scale: float) -> Float[Array, "..."]:
    """Draw normal numbers (standard deviation `scale`, cut at 4.9 of them): the same bits on every mesh and backend.

    The sum of eight uniform 16-bit integers (Irwin-Hall, excess kurtosis -0.15) is exact, and one multiplication
    follows. The usual inverse error function is not reproducible: its last bit depends on how XLA fuses it, which
    depends on the layout of the result.
    """
    n = 8
    bits = 16

    def add(total: Int[Array, "..."], key: Key[Array, ""]) -> tuple[Int[Array, "..."], None]:
        word = jax.random.bits(key, shape, jnp.uint32)  # two of the integers
        return total + ((word >> bits) + (word & (2**bits - 1))).astype(jnp.int32), None

    # A loop over the keys, because the generator is compiled anew for each parameter.
    total, _ = jax.lax.scan(add, jnp.zeros(shape, jnp.int32), jax.random.split(key, n // 2))
    deviation = 2**bits * math.sqrt(n / 12)
    return (2 * total - n * (2**bits - 1)).astype(jnp.float32) * jnp.float32(scale / deviation / 2)


def weight(rngs: nnx.Rngs, shape: Sequence[int], axes: tuple[str | None, ...], scale: float = 0.02) -> nnx.Param:
    """Make a parameter of normal numbers whose dims carry the logical `axes`."""
    return nnx.Param(normal(rngs.params(), shape, scale), axes=axes)


def constant(value: float, shape: Sequence[int], axes: tuple[str | None, ...], forward_only: bool = False) -> nnx.Param:
    """Make a parameter filled with `value` whose dims carry the logical `axes`.

    `forward_only` marks a parameter whose value no gradient needs; the planner reads it.
    """
    return nnx.Param(jnp.full(shape, value, jnp.float32), axes=axes, forward_only=forward_only)


recomputed = partial(jax.checkpoint, prevent_cse=False)
"""Activation checkpointing (remat) of cheap functions: only their inputs are kept, and the backward pass recomputes the
rest. That takes less time than writing it to memory and reading it back, and saves half of the memory."""


class LayerNorm(nnx.Module):
    """Layer normalisation over D (Ba et al. 2016, eq. 4), computed in f32 at least."""

    def __init__(self, embed: int):
        self.scale = constant(1.0, (embed,), ("norm",))
        self.bias = constant(0.0, (embed,), ("norm",))

    def __call__(self, x: Float[Array, "B s D"]) -> Float[Array, "B s D"]:
        """Return (x - mean) / deviation * scale + bias, in the dtype of `x`."""
        return _layer_norm(x, self.scale[...], self.bias[...])


@recomputed
def _layer_norm(x: jax.Array, scale: jax.Array, bias: jax.Array) -> jax.Array:
    y = x.astype(wide(x.dtype))
    y = y - jnp.mean(y, -1, keepdims=True)
    y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), -1, keepdims=True) + 1e-5)
    return (y * spread(scale, y) + spread(bias, y)).astype(x.dtype)


class RMSNorm(nnx.Module):
    """Root mean square normalisation over D (Zhang and Sennrich 2019, eq. 4), computed in f32 at least."""

    def __init__(self, embed: int):
        self.scale = constant(1.0, (embed,), ("norm",))

    def __call__(self, x: Float[Array, "B s D"]) -> Float[Array, "B s D"]:
        """Return x / root mean square * scale, in the dtype of `x`."""
        return _rms_norm(x, self.scale[...])


@recomputed
def _rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    y = x.astype(wide(x.dtype))
    y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), -1, keepdims=True) + 1e-5)
    return (y * spread(scale, y)).astype(x.dtype)


@partial(recomputed, static_argnums=(0, 1, 2))
def column(
    layout: Layout, logical: str, dims: str, x: Float[Array, "B s D"], w: Float[Array, "D ..."]
) -> Float[Array, "B S ..."]:
    """Multiply the residual stream by a weight whose columns are split along `logical` (column-parallel).

    Only `x` is kept, as it lies on the residual stream. Where that is split along the sequence, the backward pass
    gathers it again (Korthikanti et al. 2022, section 4.2.2); nothing needs the result again.
    """
    return einsum(layout, dims, enter(layout, x, logical), w)


class Attention(nnx.Module):
    """Causal multi-head self-attention (Vaswani et al. 2017, section 3.2); one matmul makes query, key and value."""

    def __init__(self, embed: int, heads: int, layout: Layout, rngs: nnx.Rngs, out_scale: float, window: int = 0):
        size = embed // heads
        self.layout = layout
        self.window = window
        self.qkv = weight(rngs, (embed, 3, heads, size), ("embed", None, "heads", None))
        self.qkv_bias = constant(0.0, (3, heads, size), (None, "heads", None))
        self.out = weight(rngs, (heads, size, embed), ("heads", None, "embed"), out_scale)
        self.out_bias = constant(0.0, (embed,), ("norm",))

    def __call__(self, x: Float[Array, "B s D"], starts: Starts) -> Float[Array, "B s D"]:
        """Return the output of all heads, contracted back onto the residual stream."""
        qkv = column(self.layout, "heads", "BSD,DCNH->BSCNH", x, self.qkv[...])
        qkv = qkv + spread(self.qkv_bias[...], qkv)
        # [B, S, 3, N, H] -> three times [B, S, N, H]
        q, k, v = (qkv[:, :, i] for i in range(3))
        out = causal_attention(self.layout, q, k, v, starts, self.window)
        out = einsum(self.layout, "BSNH,NHD->BsD", out, self.out[...])
        return out + spread(self.out_bias[...], out)


class GroupedAttention(nnx.Module):
    """Grouped-query attention (GQA): `kv_heads` keys and values serve `heads` queries (Ainslie et al. 2023, 2.2).

    One matmul makes them all: C = G + 2 heads for each key/value head, the G queries that it serves, its key and its
    value. The model axis splits K; where it has more devices, each key and value is on several (`parallel.heads`), and
    here K and G are those of the weight in use. The positions are rotary (Su et al. 2021).
    """

    def __init__(
        self,
        embed: int,
        heads: int,
        kv_heads: int,
        theta: float,
        layout: Layout,
        rngs: nnx.Rngs,
        out_scale: float,
        window: int = 0,
    ):
        size = embed // heads
        self.layout = layout
        self.window = window
        self.theta = theta
        self.qkv = weight(rngs, (embed, kv_heads, heads // kv_heads + 2, size), ("embed", "kv_heads", None, None))
        self.out = weight(rngs, (heads, size, embed), ("heads", None, "embed"), out_scale)

    def __call__(self, x: Float[Array, "B s D"], starts: Starts) -> Float[Array, "B s D"]:
        """Return the output of all heads, contracted back onto the residual stream."""
        qkv = column(self.layout, "heads", "BSD,DKCH->BSKCH", x, self.qkv[...])
        # [B, S, K, G + 2, H] -> queries [B, S, K G, H], keys and values [B, S, K, H]
        q, k, v = jax.lax.split(qkv, (qkv.shape[3] - 2, 1, 1), axis=3)
        q, k, v = (a.reshape(*a.shape[:2], -1, a.shape[4]) for a in (q, k, v))
        q = rotary(q, self.theta, starts)
        k = rotary(k, self.theta, starts)
        out = causal_attention(self.layout, q, k, v, starts, self.window)
        return einsum(self.layout, "BSNH,NHD->BsD", out, self.out[...])


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def rotary(x: Float[Array, "B S N H"], theta: float, starts: Starts = None) -> Float[Array, "B S N H"]:
    """Turn dims i and i + H/2 of position s by the angle s theta^(-2i/H) (Su et al. 2021, section 3.2.2).

    So a query times a key depends only on how far apart they are. The paper pairs neighbouring dims; halves are the
    same up to the order of the dims, and cheaper to cut. Nothing is kept for the backward pass, which turns the
    gradient back. Where documents have `starts`, positions are counted from there.
    """
    return _turn(x, theta, starts, 1)


def _turn(x: jax.Array, theta: float, starts: Starts, way: int) -> jax.Array:
    """Turn by the positions' angles (`way` 1), or back (-1)."""
    _, sequence, _, size = x.shape
    speeds = jnp.asarray(theta ** -(np.arange(0, size, 2) / size), wide(x.dtype))
    places = jnp.arange(sequence, dtype=speeds.dtype)
    # Angles are [S, H/2], or with documents [B, S, H/2]: `rows` gives the former a dim for B.
    if starts is None:
        angles = places[:, None] * speeds[None]
        rows = None
    else:
        angles = (places[None] - starts)[..., None] * speeds[None, None]
        rows = slice(None)
    cos = jnp.cos(angles)[rows, :, None]
    sin = way * jnp.sin(angles)[rows, :, None]
    a, b = jnp.split(x.astype(wide(x.dtype)), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def _rotary_forward(x: jax.Array, theta: float, starts: Starts) -> tuple[jax.Array, Starts]:
    return rotary(x, theta, starts), starts


def _rotary_backward(theta: float, starts: Starts, g: jax.Array) -> tuple[jax.Array, None]:
    return _turn(g, theta, starts, -1), None


rotary.defvjp(_rotary_forward, _rotary_backward)


@jax.custom_vjp
def gelu(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Apply GELU (Hendrycks and Gimpel 2016), tanh form."""
    return _gelu_forward(x)[0]


def _gelu_forward(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    # The slope is computed along with the value: one tanh, not three.
    a = math.sqrt(2 / math.pi)
    c = 0.044715
    t = jnp.tanh(a * (x + c * x**3))
    value = 0.5 * x * (1 + t)
    slope = 0.5 * (1 + t) + 0.5 * x * (1 - t**2) * a * (1 + 3 * c * x**2)
    return value, slope


def _gelu_backward(slope: jax.Array, g: jax.Array) -> tuple[jax.Array]:
    return (g * slope,)


gelu.defvjp(_gelu_forward, _gelu_backward)


class MLP(nnx.Module):
    """Two layers around a GELU."""

    def __init__(self, embed: int, mlp: int, layout: Layout, rngs: nnx.Rngs, out_scale: float):
        self.layout = layout
        self.up = weight(rngs, (embed, mlp), ("embed", "mlp"))
        self.up_bias = constant(0.0, (mlp,), ("mlp",))
        self.down = weight(rngs, (mlp, embed), ("mlp", "embed"), out_scale)
        # It only shifts the output of a block, so ZeRO 3 (FSDP) does not gather it again in the backward pass.
        self.down_bias = constant(0.0, (embed,), ("norm",), forward_only=True)

    def __call__(self, x: Float[Array, "B s D"]) -> Float[Array, "B s D"]:
        """Return gelu(x up + up_bias) down + down_bias."""
        h = column(self.layout, "mlp", "BSD,DF->BSF", x, self.up[...])
        out = _activate_and_contract(self.layout, h, self.up_bias[...], self.down[...])
        return out + spread(self.down_bias[...], out)


@partial(recomputed, static_argnums=0)
def _activate_and_contract(layout: Layout, h: jax.Array, bias: jax.Array, down: jax.Array) -> jax.Array:
    """Return gelu(h + bias) down.

    Of the three arrays of width F only `h` is kept. The matmul itself is not recomputed: nothing needs its result.
    """
    return einsum(layout, "BSF,FD->BsD", gelu(h + spread(bias, h)), down)


class SwiGLU(nnx.Module):
    """Two layers around silu(gate) times up (Shazeer 2020, eq. 6); one matmul makes gate and up."""

    def __init__(self, embed: int, mlp: int, layout: Layout, rngs: nnx.Rngs, out_scale: float):
        self.layout = layout
        self.gate_up = weight(rngs, (embed, 2, mlp), ("embed", None, "mlp"))
        self.down = weight(rngs, (mlp, embed), ("mlp", "embed"), out_scale)

    def __call__(self, x: Float[Array, "B s D"]) -> Float[Array, "B s D"]:
        """Return (silu(x gate) * x up) down."""
        h = column(self.layout, "mlp", "BSD,DCF->BSCF", x, self.gate_up[...])
        return _gate_and_contract(self.layout, h, self.down[...])


@partial(recomputed, static_argnums=0)
def _gate_and_contract(layout: Layout, h: jax.Array, down: jax.Array) -> jax.Array:
    """Return (silu(gate) * up) down; of the arrays of width F only `h`, gate and up, is kept."""
    return einsum(layout, "BSF,FD->BsD", jax.nn.silu(h[:, :, 0]) * h[:, :, 1], down)


def dropout(
    layout: Layout, x: Float[Array, "B s D"], rate: float, keys: Key[Array, " B"] | None, site: int
) -> Float[Array, "B s D"]:
    """Drop values with probability `rate`; `keys` holds one key per row, so a row's mask depends on no mesh.

    `site` distinguishes the places in a layer. No keys, no dropout (evaluation).
    """
    if keys is None or rate == 0.0:
        return x
    whole = x.shape[1:]
    if layout.manual:
        # `x` is this device's part of the sequence; the mask is drawn for all of it, and cut, to be the same anywhere.
        whole = (x.shape[1] * layout.parts("residual"), x.shape[2])

    def mask_of_row(key: jax.Array) -> jax.Array:
        return jax.random.bernoulli(jax.random.fold_in(key, site), 1 - rate, whole)

    masks = jax.vmap(mask_of_row)
    if layout.manual:
        keep = region.own(masks(keys), layout.split("residual"), dim=1)
    else:
        # Each device draws its own part of the mask.
        keep = jax.sharding.auto_axes(masks, out_sharding=jax.typeof(x).sharding.spec)(keys)
    return jnp.where(keep, x / (1 - rate), 0).astype(x.dtype)
