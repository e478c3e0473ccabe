"""The norms of a decoder: LayerNorm, RMS norm, and the RMS norm of all heads together."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxdist.config import ModelConfig
from jaxdist.models.parameters import constant
from jaxdist.models.projections import recomputed
from jaxdist.parallel.tensor import mean_over_heads
from jaxdist.sharding import Layout, spread, wide


def norm_of(config: ModelConfig) -> LayerNorm | RMSNorm:
    """Return a norm over the residual stream as the model has it."""
    if config.norm_form == "layer":
        return LayerNorm(config.embed, config.norm_eps)
    return RMSNorm.of(config, config.embed)


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
