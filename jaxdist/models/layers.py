"""The parts that models are made of: parameters with logical axes, norms, attention, positions, MLPs, dropout."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, Key

from jaxdist.config import ModelConfig
from jaxdist.models.attention import causal_attention
from jaxdist.parallel.context import Starts
from jaxdist.parallel.tensor import einsum, enter, mean_over_heads
from jaxdist.sharding import RESIDUAL, Layout, spread, wide


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


def weight(
    rngs: nnx.Rngs, shape: Sequence[int], axes: tuple[str | None, ...], scale: float = 0.02, exact: bool = False
) -> nnx.Param:
    """Make a parameter of normal numbers whose dims carry the logical `axes`.

    `exact` marks a parameter that is f32 at least in any compute dtype.
    """
    return nnx.Param(normal(rngs.params(), shape, scale), axes=axes, exact=exact)


def constant(
    value: float,
    shape: Sequence[int],
    axes: tuple[str | None, ...],
    forward_only: bool = False,
    exact: bool = False,
) -> nnx.Param:
    """Make a parameter filled with `value` whose dims carry the logical `axes`.

    `forward_only` marks a parameter whose value no gradient needs; the planner reads it. `exact` marks one that is f32
    at least in any compute dtype.
    """
    return nnx.Param(jnp.full(shape, value, jnp.float32), axes=axes, forward_only=forward_only, exact=exact)


recomputed = partial(jax.checkpoint, prevent_cse=False)
"""Activation checkpointing (remat) of cheap functions: only their inputs are kept, and the backward pass recomputes the
rest. That takes less time than writing it to memory and reading it back, and saves half of the memory."""


class LayerNorm(nnx.Module):
    """Layer normalisation over D (Ba et al. 2016, eq. 4), computed in f32 at least; `eps` is added to the variance."""

    def __init__(self, embed: int, eps: float):
        self.eps = eps
        self.scale = constant(1.0, (embed,), ("norm",))
        self.bias = constant(0.0, (embed,), ("norm",))

    def __call__(self, x: Float[Array, "B s D"]) -> Float[Array, "B s D"]:
        """Return (x - mean) / deviation * scale + bias, in the dtype of `x`."""
        return _layer_norm(self.eps, x, self.scale[...], self.bias[...])


@partial(recomputed, static_argnums=0)
def _layer_norm(eps: float, x: jax.Array, scale: jax.Array, bias: jax.Array) -> jax.Array:
    y = x.astype(wide(x.dtype))
    y = y - jnp.mean(y, -1, keepdims=True)
    y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), -1, keepdims=True) + eps)
    return (y * spread(scale, y) + spread(bias, y)).astype(x.dtype)


class RMSNorm(nnx.Module):
    """Root mean square normalisation over the last dim (Zhang and Sennrich 2019, eq. 4), computed in f32 at least.

    `eps` is added to the mean square. The scale has the logical axis `logical`: "norm" on the residual stream,
    "head_norm" where each head is normalised.
    """

    def __init__(self, size: int, eps: float, logical: str = "norm"):
        self.eps = eps
        self.scale = constant(1.0, (size,), (logical,))

    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        """Return x / root mean square * scale, in the dtype of `x`."""
        return _rms_norm(self.eps, x, self.scale[...])


@partial(recomputed, static_argnums=0)
def _rms_norm(eps: float, x: jax.Array, scale: jax.Array) -> jax.Array:
    y = x.astype(wide(x.dtype))
    y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), -1, keepdims=True) + eps)
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

    def __init__(self, embed: int, heads: int, layout: Layout, rngs: nnx.Rngs, out_scale: float, window: int):
        size = embed // heads
        self.layout = layout
        self.window = window
        self.qkv = weight(rngs, (embed, 3, heads, size), ("embed", None, "heads", None))
        self.qkv_bias = constant(0.0, (3, heads, size), (None, "heads", None))
        self.out = weight(rngs, (heads, size, embed), ("heads", None, "embed"), out_scale)
        self.out_bias = constant(0.0, (embed,), ("norm",))

    def __call__(self, x: Float[Array, "B s D"], starts: Starts) -> Float[Array, "B s D"]:
        """Return the output of all heads, contracted back onto the residual stream."""
        q, k, v = self.heads(x, starts)
        return self.contract(causal_attention(self.layout, q, k, v, starts, self.window))

    def heads(self, x: Float[Array, "B s D"], starts: Starts) -> tuple[Float[Array, "B S N H"], ...]:
        """Return queries, keys and values; positions, which `starts` would shift, do not enter here."""
        qkv = column(self.layout, "heads", "BSD,DCNH->BSCNH", x, self.qkv[...])
        qkv = qkv + spread(self.qkv_bias[...], qkv)
        # [B, S, 3, N, H] -> three times [B, S, N, H]
        q, k, v = (qkv[:, :, i] for i in range(3))
        return q, k, v

    def contract(self, out: Float[Array, "B S N H"]) -> Float[Array, "B s D"]:
        """Return the residual stream's share of what the heads have found."""
        out = einsum(self.layout, "BSNH,NHD->BsD", out, self.out[...])
        return out + spread(self.out_bias[...], out)


class GroupedAttention(nnx.Module):
    """Grouped-query attention (GQA): K keys and values serve N queries (Ainslie et al. 2023, section 2.2).

    One matmul makes them all: C = G + 2 heads for each key/value head, the G queries that it serves, its key and its
    value. The model axis splits K; where it has more devices, each key and value is on several (`parallel.heads`), and
    here K and G are those of the weight in use. The positions are rotary (Su et al. 2021).
    """

    def __init__(self, config: ModelConfig, layout: Layout, rngs: nnx.Rngs, out_scale: float):
        size = config.head_size
        heads = (config.key_value_heads, config.heads // config.key_value_heads + 2, size)
        self.layout = layout
        self.frequencies = tuple(config.rope.frequencies(config.rope_theta, size))
        self.attention_factor = config.rope.attention_factor
        self.window = config.window
        self.qkv = weight(rngs, (config.embed, *heads), ("embed", "kv_heads", None, None))
        self.qkv_bias = constant(0.0, heads, ("kv_heads", None, None)) if config.qkv_bias else None
        of_head = config.qk_norm == "head"
        self.q_norm = RMSNorm(size, config.norm_eps, "head_norm") if of_head else None
        self.k_norm = RMSNorm(size, config.norm_eps, "head_norm") if of_head else None
        self.qk_norm = FullNorm(config, layout) if config.qk_norm == "full" else None
        self.out = weight(rngs, (config.heads, size, config.embed), ("heads", None, "embed"), out_scale)

    def __call__(self, x: Float[Array, "B s D"], starts: Starts) -> Float[Array, "B s D"]:
        """Return the output of all heads, contracted back onto the residual stream."""
        q, k, v = self.heads(x, starts)
        return self.contract(causal_attention(self.layout, q, k, v, starts, self.window))

    def heads(
        self, x: Float[Array, "B s D"], starts: Starts
    ) -> tuple[Float[Array, "B S N H"], Float[Array, "B S K H"], Float[Array, "B S K H"]]:
        """Return queries, keys and values; queries and keys are turned by their positions."""
        qkv = column(self.layout, "heads", "BSD,DKCH->BSKCH", x, self.qkv[...])
        if self.qkv_bias is not None:
            qkv = qkv + spread(self.qkv_bias[...], qkv)
        # [B, S, K, G + 2, H] -> queries [B, S, K, G, H], keys and values [B, S, K, 1, H]
        q, k, v = jax.lax.split(qkv, (qkv.shape[3] - 2, 1, 1), axis=3)
        q, k = self._normalised(q, k)
        # -> queries [B, S, K G, H], keys and values [B, S, K, H]
        q, k, v = (a.reshape(*a.shape[:2], -1, a.shape[4]) for a in (q, k, v))
        positions = positions_of(self.layout, q.shape[1], starts)
        q = rotary(q, self.frequencies, positions, self.attention_factor)
        k = rotary(k, self.frequencies, positions, self.attention_factor)
        return q, k, v

    def contract(self, out: Float[Array, "B S N H"]) -> Float[Array, "B s D"]:
        """Return the residual stream's share of what the heads have found."""
        return einsum(self.layout, "BSNH,NHD->BsD", out, self.out[...])

    def _normalised(self, q: jax.Array, k: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return queries and keys after the norm that they have, if any."""
        if self.q_norm is not None and self.k_norm is not None:
            return self.q_norm(q), self.k_norm(k)
        if self.qk_norm is not None:
            return self.qk_norm(q, k)
        return q, k


class FullNorm(nnx.Module):
    """RMS norm of all queries of a token together, and of all its keys together (OLMo 2, 2025, section 2.1).

    One scale [K, G + 1, H] holds, for each key/value head, those of its G queries, then that of its key.
    """

    def __init__(self, config: ModelConfig, layout: Layout):
        group = config.heads // config.key_value_heads
        heads = (config.key_value_heads, group + 1, config.head_size)
        self.layout = layout
        self.eps = config.norm_eps
        self.scale = constant(1.0, heads, ("normed_kv_heads", None, None))

    def __call__(
        self, q: Float[Array, "B S K G H"], k: Float[Array, "B S K 1 H"]
    ) -> tuple[Float[Array, "B S K G H"], Float[Array, "B S K 1 H"]]:
        """Return queries and keys, each over their root mean square, times their scales."""
        # One array [B, S, 1, 2], so that one all-reduce serves both.
        means = mean_over_heads(self.layout, _squares_of_heads(q, k))
        of_queries, of_key = jax.lax.split(self.scale[...], (q.shape[3], 1), axis=1)
        return (
            _scaled(self.eps, q, means[..., :1, None], of_queries),
            _scaled(self.eps, k, means[..., 1:, None], of_key),
        )


@recomputed
def _squares_of_heads(q: jax.Array, k: jax.Array) -> Float[Array, "B S K 2"]:
    """Return the mean squares of the queries that share a key, and of the key."""
    both = [jnp.mean(jnp.square(a.astype(wide(a.dtype))), (3, 4)) for a in (q, k)]
    return jnp.stack(both, axis=3)


@partial(recomputed, static_argnums=0)
def _scaled(eps: float, x: jax.Array, mean_square: jax.Array, scale: jax.Array) -> jax.Array:
    y = x.astype(wide(x.dtype)) * jax.lax.rsqrt(mean_square + eps)
    return (y * spread(scale, y)).astype(x.dtype)


def positions_of(layout: Layout, length: int, starts: Starts) -> Int[Array, "... S"]:
    """Return the positions of the `length` tokens of rows, [S], or from the start of each document, [B, S]."""
    positions = layout.positions(length)
    return positions if starts is None else positions[None] - starts


@partial(jax.custom_vjp, nondiff_argnums=(1, 3))
def rotary(
    x: Float[Array, "B S N H"], frequencies: tuple[float, ...], positions: Int[Array, "... S"], factor: float = 1.0
) -> Float[Array, "B S N H"]:
    """Turn dims i and i + H/2 of position s by the angle s frequencies[i], and multiply by `factor`.

    So a query times a key depends only on how far apart they are (Su et al. 2021, section 3.2.2). The paper pairs
    neighbouring dims; halves are the same up to the order of the dims, and cheaper to cut. Nothing is kept for the
    backward pass, which turns the gradient back. `positions` are [S], or [B, S] where rows differ.
    """
    return _turn(x, frequencies, factor, positions, 1)


def _turn(
    x: jax.Array, frequencies: tuple[float, ...], factor: float, positions: Int[Array, "... S"], way: int
) -> jax.Array:
    """Turn by the positions' angles (`way` 1), or back (-1)."""
    speeds = jnp.asarray(frequencies, wide(x.dtype))
    places = positions.astype(speeds.dtype)[..., None]
    # Angles are [S, H/2] or [B, S, H/2]: `rows` gives the former a dim for B.
    angles = places * speeds.reshape((1,) * positions.ndim + (-1,))
    rows = None if positions.ndim == 1 else slice(None)
    cos = factor * jnp.cos(angles)[rows, :, None]
    sin = factor * way * jnp.sin(angles)[rows, :, None]
    a, b = jnp.split(x.astype(wide(x.dtype)), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def _rotary_forward(
    x: jax.Array, frequencies: tuple[float, ...], positions: jax.Array, factor: float
) -> tuple[jax.Array, jax.Array]:
    return rotary(x, frequencies, positions, factor), positions


def _rotary_backward(
    frequencies: tuple[float, ...], factor: float, positions: jax.Array, g: jax.Array
) -> tuple[jax.Array, None]:
    return _turn(g, frequencies, factor, positions, -1), None


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

    def mask_of_token(key: jax.Array, position: jax.Array) -> jax.Array:
        return jax.random.bernoulli(jax.random.fold_in(key, position), 1 - rate, x.shape[2:])

    def mask_of_row(key: jax.Array, positions: jax.Array) -> jax.Array:
        return jax.vmap(mask_of_token, in_axes=(None, 0))(jax.random.fold_in(key, site), positions)

    masks = jax.vmap(mask_of_row, in_axes=(0, None))
    if not layout.manual:
        # Each device draws its own part of the mask.
        masks = jax.sharding.auto_axes(masks, out_sharding=jax.typeof(x).sharding.spec)
    keep = masks(keys, layout.positions(x.shape[1], RESIDUAL))
    return jnp.where(keep, x / (1 - rate), 0).astype(x.dtype)
