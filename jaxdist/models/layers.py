"""The parts that models are made of: norms, attention, positions, MLPs."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxdist.config import ModelConfig
from jaxdist.config.matmuls import matmuls_of
from jaxdist.models.attention import causal_attention
from jaxdist.models.inputs import NO_INPUTS, BlockInputs
from jaxdist.models.parameters import bias_of, constant
from jaxdist.models.projections import Column, Row, recomputed
from jaxdist.models.scores import Scores
from jaxdist.parallel.tensor import mean_over_heads
from jaxdist.sharding import Layout, spread, wide

Attend = Callable[[Scores, jax.Array, jax.Array, jax.Array], tuple[jax.Array, Any]]
"""(how a layer scores; queries, keys, values of tokens) -> (what the queries have found, whatever else the caller wants
of them)."""


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

    `eps` is added to the mean square, and `offset` to the scale. The scale has the logical axis `logical`: "norm" on
    the residual stream, "head_norm" where each head is normalised.
    """

    def __init__(self, size: int, eps: float, offset: float = 0.0, logical: str = "norm"):
        self.eps = eps
        self.offset = offset
        self.scale = constant(1.0 - offset, (size,), (logical,))

    @classmethod
    def of(cls, config: ModelConfig, size: int, logical: str = "norm") -> RMSNorm:
        """Return a norm over `size` values as the family has it."""
        return cls(size, config.norm_eps, config.traits.norm_offset, logical)

    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        """Return x / root mean square * (offset + scale), in the dtype of `x`."""
        return _rms_norm(self.eps, self.offset, x, self.scale[...])


@partial(recomputed, static_argnums=(0, 1))
def _rms_norm(eps: float, offset: float, x: jax.Array, scale: jax.Array) -> jax.Array:
    y = x.astype(wide(x.dtype))
    y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), -1, keepdims=True) + eps)
    return _times_scale(offset, y, scale).astype(x.dtype)


def _times_scale(offset: float, y: jax.Array, scale: jax.Array) -> jax.Array:
    """Return `y` times (offset + scale), where `y` is in f32 at least."""
    factor = spread(scale, y)
    if offset:
        factor = offset + factor.astype(y.dtype)
    return y * factor


class CausalAttention(nnx.Module):
    """What both kinds of attention do: queries, keys and values of all heads, attention, the residual stream again.

    A subclass sets the attributes and offers `heads`.
    """

    layout: Layout
    scores: Scores
    out: Row

    def __call__(
        self, x: Float[Array, "B s D"], inputs: BlockInputs, attend: Attend | None = None
    ) -> tuple[Float[Array, "B s D"], Any]:
        """Return (the output of all heads on the residual stream, what `attend` returns beside its result).

        Without `attend`, the tokens of `x` attend to each other, and there is nothing beside it.
        """

        def causally(scores: Scores, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, None]:
            return causal_attention(self.layout, scores, q, k, v, inputs.starts), None

        found, further = (attend or causally)(self.scores, *self.heads(x, inputs))
        return self.contract(found, inputs), further

    def heads(
        self, x: Float[Array, "B s D"], inputs: BlockInputs
    ) -> tuple[Float[Array, "B S N H"], Float[Array, "B S K H"], Float[Array, "B S K U"]]:
        """Return queries, keys and values, at their positions."""
        raise NotImplementedError

    def contract(self, out: Float[Array, "B S N U"], inputs: BlockInputs) -> Float[Array, "B s D"]:
        """Contract what the heads have found back onto the residual stream."""
        return self.out(out, inputs)


class Attention(CausalAttention):
    """Causal multi-head self-attention (Vaswani et al. 2017, section 3.2); one matmul makes query, key and value."""

    def __init__(self, config: ModelConfig, layout: Layout, rngs: nnx.Rngs, scores: Scores):
        matmuls = matmuls_of(config)
        self.layout = layout
        self.scores = scores
        self.qkv = Column(layout, rngs, matmuls["attention.qkv"])
        self.qkv_bias = bias_of(matmuls["attention.qkv"])
        self.out = Row(layout, rngs, matmuls["attention.out"])
        self.out_bias = bias_of(matmuls["attention.out"])

    def heads(
        self, x: Float[Array, "B s D"], inputs: BlockInputs
    ) -> tuple[Float[Array, "B S N H"], Float[Array, "B S K H"], Float[Array, "B S K H"]]:
        """Return queries, keys and values; positions do not enter here."""
        qkv = self.qkv(x, inputs)
        qkv = qkv + spread(self.qkv_bias[...], qkv)
        # [B, S, 3, N, H] -> three times [B, S, N, H]
        q, k, v = (qkv[:, :, i] for i in range(3))
        return q, k, v

    def contract(self, out: Float[Array, "B S N H"], inputs: BlockInputs) -> Float[Array, "B s D"]:
        """Contract what the heads have found back onto the residual stream."""
        out = super().contract(out, inputs)
        return out + spread(self.out_bias[...], out)


class GroupedAttention(CausalAttention):
    """Grouped-query attention (GQA): K keys and values serve N queries (Ainslie et al. 2023, section 2.2).

    One matmul makes them all: C = G + 2 heads for each key/value head, the G queries that it serves, its key and its
    value. The model axis splits K; where it has more devices, each key and value is on several (`parallel.heads`), and
    here K and G are those of the weight in use. The positions are rotary (Su et al. 2021); `theta` is their base.
    """

    def __init__(self, config: ModelConfig, layout: Layout, rngs: nnx.Rngs, scores: Scores, theta: float):
        size = config.head_size
        matmuls = matmuls_of(config)
        self.layout = layout
        self.frequencies = tuple(config.rope.frequencies(theta, size))
        self.attention_factor = config.rope.attention_factor
        self.scores = scores
        self.qkv = Column(layout, rngs, matmuls["attention.qkv"])
        self.qkv_bias = bias_of(matmuls["attention.qkv"]) if matmuls["attention.qkv"].bias else None
        of_head = config.qk_norm == "head"
        self.q_norm = RMSNorm.of(config, size, "head_norm") if of_head else None
        self.k_norm = RMSNorm.of(config, size, "head_norm") if of_head else None
        self.qk_norm = FullNorm(config, layout) if config.qk_norm == "full" else None
        self.out = Row(layout, rngs, matmuls["attention.out"])

    def heads(
        self, x: Float[Array, "B s D"], inputs: BlockInputs
    ) -> tuple[Float[Array, "B S N H"], Float[Array, "B S K H"], Float[Array, "B S K H"]]:
        """Return queries, keys and values; queries and keys are turned by their positions."""
        qkv = self.qkv(x, inputs)
        if self.qkv_bias is not None:
            qkv = qkv + spread(self.qkv_bias[...], qkv)
        # [B, S, K, G + 2, H] -> queries [B, S, K, G, H], keys and values [B, S, K, 1, H]
        q, k, v = jax.lax.split(qkv, (qkv.shape[3] - 2, 1, 1), axis=3)
        q, k = self._normalised(q, k)
        # -> queries [B, S, K G, H], keys and values [B, S, K, H]
        q, k, v = (a.reshape(*a.shape[:2], -1, a.shape[4]) for a in (q, k, v))
        positions = inputs.positions(self.layout, q.shape[1])
        q = rotary(q, self.frequencies, positions, self.attention_factor)
        k = rotary(k, self.frequencies, positions, self.attention_factor)
        return q, k, v

    def _normalised(self, q: jax.Array, k: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return queries and keys after the norm that they have, if any."""
        if self.q_norm is not None and self.k_norm is not None:
            return self.q_norm(q), self.k_norm(k)
        if self.qk_norm is not None:
            return self.qk_norm(q, k)
        return q, k


class FullNorm(nnx.Module):
    """RMS norm of all queries of a token together, and of all its keys together (OLMo 2, 2025, section 2.1).

    One scale [K, G + 1, H] holds, for each key/value head, the scales of its G queries, then its key's.
    """

    def __init__(self, config: ModelConfig, layout: Layout):
        group = config.heads // config.key_value_heads
        heads = (config.key_value_heads, group + 1, config.head_size)
        self.layout = layout
        self.eps = config.norm_eps
        self.offset = config.traits.norm_offset
        self.scale = constant(1.0 - self.offset, heads, ("normed_kv_heads", None, None))

    def __call__(
        self, q: Float[Array, "B S K G H"], k: Float[Array, "B S K 1 H"]
    ) -> tuple[Float[Array, "B S K G H"], Float[Array, "B S K 1 H"]]:
        """Return queries and keys, each over their root mean square, times (offset + their scales)."""
        # One array [B, S, 1, 2], so that one all-reduce serves both.
        means = mean_over_heads(self.layout, _squares_of_heads(q, k))
        of_queries, of_key = jax.lax.split(self.scale[...], (q.shape[3], 1), axis=1)
        return (
            _scaled(self.eps, self.offset, q, means[..., :1, None], of_queries),
            _scaled(self.eps, self.offset, k, means[..., 1:, None], of_key),
        )


@recomputed
def _squares_of_heads(q: jax.Array, k: jax.Array) -> Float[Array, "B S K 2"]:
    """Return the mean squares of the queries that share a key, and of the key."""
    both = [jnp.mean(jnp.square(a.astype(wide(a.dtype))), (3, 4)) for a in (q, k)]
    return jnp.stack(both, axis=3)


@partial(recomputed, static_argnums=(0, 1))
def _scaled(eps: float, offset: float, x: jax.Array, mean_square: jax.Array, scale: jax.Array) -> jax.Array:
    y = x.astype(wide(x.dtype)) * jax.lax.rsqrt(mean_square + eps)
    return _times_scale(offset, y, scale).astype(x.dtype)


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


Activation = Callable[[jax.Array], jax.Array]
"""A function of each value by itself."""


def activation_of(config: ModelConfig) -> Activation:
    """Return the activation of the MLPs of a family."""
    known: dict[str, Activation] = {"gelu": gelu, "silu": jax.nn.silu}
    return known[config.traits.activation]


class MLP(nnx.Module):
    """Two layers around an activation, with biases."""

    def __init__(self, config: ModelConfig, layout: Layout, rngs: nnx.Rngs):
        matmuls = matmuls_of(config)
        self.layout = layout
        self.activation = activation_of(config)
        self.up = Column(layout, rngs, matmuls["mlp.up"])
        self.up_bias = bias_of(matmuls["mlp.up"])
        self.down = Row(layout, rngs, matmuls["mlp.down"])
        # It only shifts the output of a block, so ZeRO 3 (FSDP) does not gather it again in the backward pass.
        self.down_bias = bias_of(matmuls["mlp.down"], forward_only=True)

    def __call__(self, x: Float[Array, "B s D"], inputs: BlockInputs = NO_INPUTS) -> Float[Array, "B s D"]:
        """Return activation(x up + up_bias) down + down_bias."""
        h = self.up(x, inputs)

        def activated(h: jax.Array, bias: jax.Array) -> jax.Array:
            return self.activation(h + spread(bias, h))

        out = self.down.after(activated, (h, self.up_bias[...]), inputs)
        return out + spread(self.down_bias[...], out)


class GatedMLP(nnx.Module):
    """Two layers around activation(gate) times up (Shazeer 2020, section 2); one matmul makes gate and up."""

    def __init__(self, config: ModelConfig, layout: Layout, rngs: nnx.Rngs):
        matmuls = matmuls_of(config)
        self.layout = layout
        self.activation = activation_of(config)
        self.gate_up = Column(layout, rngs, matmuls["mlp.gate_up"])
        self.down = Row(layout, rngs, matmuls["mlp.down"])

    def __call__(self, x: Float[Array, "B s D"], inputs: BlockInputs = NO_INPUTS) -> Float[Array, "B s D"]:
        """Return (activation(x gate) * x up) down."""
        h = self.gate_up(x, inputs)

        def gated(h: jax.Array) -> jax.Array:
            return self.activation(h[:, :, 0]) * h[:, :, 1]

        return self.down.after(gated, (h,), inputs)
