"""The parts that models are made of: attention and MLPs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from jaxtyping import Array, Float

from jaxdist.config import ModelConfig, rope_scaling
from jaxdist.config.matmuls import matmuls_of
from jaxdist.config.model import Kind
from jaxdist.models.activations import activation_of, gating_of, learned_of
from jaxdist.models.attention import causal_attention
from jaxdist.models.inputs import NO_INPUTS, BlockInputs
from jaxdist.models.norms import FullNorm, RMSNorm
from jaxdist.models.parameters import bias_of, constant
from jaxdist.models.positions import rotary
from jaxdist.models.projections import Column, Row
from jaxdist.models.scores import Scores
from jaxdist.models.sinks import Sinks
from jaxdist.sharding import Layout, spread

Attend = Callable[..., tuple[jax.Array, Any]]
"""(how a layer scores; queries, keys, values of tokens; their sinks, if heads have some) -> (what the queries have
found, whatever else the caller wants of them)."""


class CausalAttention(nnx.Module):
    """What both kinds of attention do: queries, keys and values of all heads, attention, the residual stream again.

    A subclass sets the attributes and offers `heads`.
    """

    layout: Layout
    scores: Scores
    out: Row
    out_bias: nnx.Param | None

    def __call__(
        self, x: Float[Array, "B s D"], inputs: BlockInputs, attend: Attend | None = None
    ) -> tuple[Float[Array, "B s D"], Any]:
        """Return (the output of all heads on the residual stream, what `attend` returns beside its result).

        Without `attend`, the tokens of `x` attend to each other, and there is nothing beside it.
        """

        def causally(
            scores: Scores, q: jax.Array, k: jax.Array, v: jax.Array, sinks: Sinks = None
        ) -> tuple[jax.Array, None]:
            return causal_attention(self.layout, scores, q, k, v, inputs.starts, sinks), None

        q, k, v = self.heads(x, inputs)
        found, further = (attend or causally)(self.scores, q, k, v, *self.sinks_of(q))
        return self.contract(found, inputs), further

    def heads(
        self, x: Float[Array, "B s D"], inputs: BlockInputs
    ) -> tuple[Float[Array, "B S N H"], Float[Array, "B S K H"], Float[Array, "B S K U"]]:
        """Return queries, keys and values, at their positions."""
        raise NotImplementedError

    def sinks_of(self, q: Float[Array, "B S N H"]) -> list[Float[Array, "B S N"]]:
        """Return the sinks of the heads that have made these queries; none in most models."""
        return []

    def contract(self, out: Float[Array, "B S N U"], inputs: BlockInputs) -> Float[Array, "B s D"]:
        """Contract what the heads have found back onto the residual stream."""
        return shifted(self.out(out, inputs), *values_of(self.out_bias))


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
        qkv = shifted(self.qkv(x, inputs), *values_of(self.qkv_bias))
        # [B, S, 3, N, H] -> three times [B, S, N, H]
        q, k, v = (qkv[:, :, i] for i in range(3))
        return q, k, v


class GroupedAttention(CausalAttention):
    """Grouped-query attention (GQA): K keys and values serve N queries (Ainslie et al. 2023, section 2.2).

    One matmul makes them all: C = G + 2 heads for each key/value head, the G queries that it serves, its key and its
    value. The model axis splits K; where it has more devices, each key and value is on several (`parallel.heads`), and
    here K and G are those of the weight in use. The positions are rotary (Su et al. 2021), with the base and the
    scaling of the layer's kind, or do not enter.
    """

    def __init__(self, config: ModelConfig, layout: Layout, rngs: nnx.Rngs, kind: Kind):
        size = config.head_size
        matmuls = matmuls_of(config)
        scaling = rope_scaling.parse(kind.scaling)
        self.layout = layout
        self.frequencies = (
            tuple(scaling.frequencies(kind.theta, config.turned_size, config.sequence)) if kind.theta else ()
        )
        self.attention_factor = scaling.attention_factor
        self.scores = Scores(config.score_scale, kind.window, config.attention_cap, form=config.attention)
        self.qkv = Column(layout, rngs, matmuls["attention.qkv"])
        self.qkv_bias = bias_of(matmuls["attention.qkv"])
        of_head = config.qk_norm == "head"
        self.q_norm = RMSNorm.of(config, size, "head_norm") if of_head else None
        self.k_norm = RMSNorm.of(config, size, "head_norm") if of_head else None
        self.qk_norm = FullNorm(config, layout) if config.qk_norm == "full" else None
        self.out = Row(layout, rngs, matmuls["attention.out"])
        self.out_bias = bias_of(matmuls["attention.out"])
        # The last dim is where other parameters with these heads have one for H.
        heads = (config.key_value_heads, config.heads // config.key_value_heads, 1)
        self.sinks = constant(0.0, heads, ("kv_heads_of_queries", None, None)) if config.sinks else None

    def heads(
        self, x: Float[Array, "B s D"], inputs: BlockInputs
    ) -> tuple[Float[Array, "B S N H"], Float[Array, "B S K H"], Float[Array, "B S K H"]]:
        """Return queries, keys and values; positions turn queries and keys, if the layer is of such a kind."""
        qkv = shifted(self.qkv(x, inputs), *values_of(self.qkv_bias))
        # [B, S, K, G + 2, H] -> queries [B, S, K, G, H], keys and values [B, S, K, 1, H]
        q, k, v = jax.lax.split(qkv, (qkv.shape[3] - 2, 1, 1), axis=3)
        q, k = self._normalised(q, k)
        # -> queries [B, S, K G, H], keys and values [B, S, K, H]
        q, k, v = (a.reshape(*a.shape[:2], -1, a.shape[4]) for a in (q, k, v))
        if not self.frequencies:
            return q, k, v
        positions = inputs.positions(self.layout, q.shape[1])
        q = rotary(q, self.frequencies, positions, self.attention_factor)
        k = rotary(k, self.frequencies, positions, self.attention_factor)
        return q, k, v

    def sinks_of(self, q: Float[Array, "B S N H"]) -> list[Float[Array, "B S N"]]:
        """Return the sinks of all heads, for each token."""
        (sinks,) = values_of(self.sinks) or (None,)
        if sinks is None:
            return []
        like = q[..., :1]
        # [K, G, 1] -> [B, S, K, G, 1] -> [B, S, K G]
        of_groups = spread(sinks, like.reshape(*like.shape[:2], *sinks.shape))
        return [of_groups.reshape(like.shape[:3])]

    def _normalised(self, q: jax.Array, k: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return queries and keys after the norm that they have, if any."""
        if self.q_norm is not None and self.k_norm is not None:
            return self.q_norm(q), self.k_norm(k)
        if self.qk_norm is not None:
            return self.qk_norm(q, k)
        return q, k


class MLP(nnx.Module):
    """Two layers around an activation, with biases where the model has them."""

    def __init__(self, config: ModelConfig, layout: Layout, rngs: nnx.Rngs):
        matmuls = matmuls_of(config)
        self.layout = layout
        self.activation = activation_of(config)
        self.learned = learned_of(config)
        self.up = Column(layout, rngs, matmuls["mlp.up"])
        self.up_bias = bias_of(matmuls["mlp.up"])
        self.down = Row(layout, rngs, matmuls["mlp.down"])
        self.down_bias = bias_of(matmuls["mlp.down"])

    def __call__(self, x: Float[Array, "B s D"], inputs: BlockInputs = NO_INPUTS) -> Float[Array, "B s D"]:
        """Return activation(x up + up_bias) down + down_bias."""
        h = self.up(x, inputs)

        def activated(h: jax.Array, bias: list[jax.Array], numbers: list[jax.Array]) -> jax.Array:
            return self.activation(shifted(h, *bias), *numbers)

        operands = (h, values_of(self.up_bias), values_of(self.learned))
        return shifted(self.down.after(activated, operands, inputs), *values_of(self.down_bias))


class GatedMLP(nnx.Module):
    """Two layers around activation(gate) times up (Shazeer 2020, section 2); one matmul makes gate and up."""

    def __init__(self, config: ModelConfig, layout: Layout, rngs: nnx.Rngs):
        matmuls = matmuls_of(config)
        self.layout = layout
        self.gating = gating_of(config)
        self.learned = learned_of(config)
        self.gate_up = Column(layout, rngs, matmuls["mlp.gate_up"])
        self.gate_up_bias = bias_of(matmuls["mlp.gate_up"])
        self.down = Row(layout, rngs, matmuls["mlp.down"])
        self.down_bias = bias_of(matmuls["mlp.down"])

    def __call__(self, x: Float[Array, "B s D"], inputs: BlockInputs = NO_INPUTS) -> Float[Array, "B s D"]:
        """Return (activation(x gate) * x up) down, with the biases of each."""
        h = self.gate_up(x, inputs)

        def gated(h: jax.Array, bias: list[jax.Array], numbers: list[jax.Array]) -> jax.Array:
            h = shifted(h, *bias)
            return self.gating(h[:, :, 0], h[:, :, 1], *numbers)

        operands = (h, values_of(self.gate_up_bias), values_of(self.learned))
        return shifted(self.down.after(gated, operands, inputs), *values_of(self.down_bias))


def mlp_of(config: ModelConfig, layout: Layout, rngs: nnx.Rngs) -> MLP | GatedMLP:
    """Return the MLP of a model, with a gate or without."""
    return (GatedMLP if config.traits.gated else MLP)(config, layout, rngs)


def shifted(x: jax.Array, *bias: jax.Array) -> jax.Array:
    """Return `x` plus its bias, if it has one."""
    for values in bias:
        x = x + spread(values, x)
    return x


def values_of(parameter: nnx.Param | None) -> list[jax.Array]:
    """Return the array of a parameter; none of one that the model does not have."""
    return [] if parameter is None else [parameter[...]]
