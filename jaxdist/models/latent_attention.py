"""Multi-head latent attention (MLA; DeepSeek-V2, 2024, section 2.1): keys and values of all heads from one vector.

    latents = x down                    what all heads share, on the residual stream as it lies
    q, k, v = norm(latents) up          those of each head, which the model axis splits

A part of each query is turned by its position, and so is a part of each key, which all heads share. A cache keeps one
vector for each token, and that part of its key. Decoding never makes keys and values of them: what makes keys of a
vector multiplies the query, and what makes values multiplies what the query finds (the same section, "absorbed").
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxdist.config import ModelConfig, rope_scaling
from jaxdist.config.matmuls import matmuls_of
from jaxdist.config.model import Kind
from jaxdist.models.inputs import BlockInputs
from jaxdist.models.layers import Attend, CausalAttention
from jaxdist.models.norms import RMSNorm
from jaxdist.models.parameters import bias_of
from jaxdist.models.positions import rotary
from jaxdist.models.projections import Column, Row, Whole, recomputed
from jaxdist.models.scores import Scores
from jaxdist.parallel.tensor import enter
from jaxdist.sharding import Layout, wide

NORM_EPS = 1e-6
"""Added to the mean square in the norms of latents, in every published model."""


class Latents(NamedTuple):
    """What the heads are made of, as it lies on the residual stream."""

    q: Float[Array, "B s A"]
    """Of queries, after its norm; the residual stream itself where these are made of that."""
    kv: Float[Array, "B s Z"]
    """Of keys and values, after its norm."""
    k_turned: Float[Array, "B s O"]
    """The part of each key that positions turn, before they do."""


class LatentAttention(CausalAttention):
    """Attention whose keys and values are made of a latent vector of each token, and mostly its queries of another."""

    def __init__(self, config: ModelConfig, layout: Layout, rngs: nnx.Rngs, kind: Kind):
        matmuls = matmuls_of(config)
        scaling = rope_scaling.parse(kind.scaling)
        self.layout = layout
        self.frequencies = (
            tuple(scaling.frequencies(kind.theta, config.turned_size, config.sequence)) if kind.theta else ()
        )
        self.attention_factor = scaling.attention_factor
        self.neighbours = config.rope_pairs == "neighbours"
        self.scores = Scores(config.score_scale, kind.window, config.attention_cap, form=config.attention)
        self.latent = config.kv_latent
        self.unturned = config.unturned_size
        by_latent = config.q_latent > 0
        self.q_down = Whole(layout, rngs, matmuls["attention.q_down"]) if by_latent else None
        self.q_norm = RMSNorm(config.q_latent, NORM_EPS) if by_latent else None
        self.q_up = Column(layout, rngs, matmuls["attention.q_up"]) if by_latent else None
        self.q = None if by_latent else Column(layout, rngs, matmuls["attention.q"])
        self.kv_down = Whole(layout, rngs, matmuls["attention.kv_down"])
        self.kv_norm = RMSNorm(config.kv_latent, NORM_EPS)
        self.kv_up = Column(layout, rngs, matmuls["attention.kv_up"])
        self.out = Row(layout, rngs, matmuls["attention.out"])
        self.out_bias = bias_of(matmuls["attention.out"])

    def __call__(
        self, x: Float[Array, "B s D"], inputs: BlockInputs, attend: Attend | None = None
    ) -> tuple[Float[Array, "B s D"], Any]:
        """Return (the output of all heads on the residual stream, what `attend` returns beside its result).

        `attend` gets one key for all heads, whose first part is its value too.
        """
        if attend is None:
            return super().__call__(x, inputs)
        latents = self._latents(x, inputs)
        q, q_turned = self._queries(latents, inputs)
        latent = enter(self.layout, latents.kv, "heads")[:, :, None]
        k_turned = self._turned(enter(self.layout, latents.k_turned, "heads")[:, :, None], inputs)
        to_keys, to_values = jnp.split(self.kv_up.entire(x.dtype), [self.unturned], axis=2)
        q = jnp.einsum("BSNY,ZNY->BSNZ", q, to_keys)
        key = jnp.concatenate([latent, k_turned], -1)
        scores = replace(self.scores, values_in_keys=latent.shape[-1])
        found, further = attend(scores, jnp.concatenate([q, q_turned], -1), key, key[..., :0])
        return self.contract(jnp.einsum("BSNZ,ZNU->BSNU", found, to_values), inputs), further

    def heads(
        self, x: Float[Array, "B s D"], inputs: BlockInputs
    ) -> tuple[Float[Array, "B S N H"], Float[Array, "B S N H"], Float[Array, "B S N U"]]:
        """Return queries, keys and values; positions turn the last dims of queries and keys."""
        latents = self._latents(x, inputs)
        q = jnp.concatenate(self._queries(latents, inputs), -1)
        k, v = jnp.split(self.kv_up(latents.kv, inputs), [self.unturned], -1)
        k_turned = self._turned(_of_all_heads(self.layout, latents.k_turned, k), inputs)
        return q, jnp.concatenate([k, k_turned], -1), v

    def _latents(self, x: jax.Array, inputs: BlockInputs) -> Latents:
        """Return what the heads are made of."""
        q = x if self.q_down is None or self.q_norm is None else self.q_norm(self.q_down(x, inputs))
        kv, k_turned = jnp.split(self.kv_down(x, inputs), [self.latent], -1)
        return Latents(q, self.kv_norm(kv), k_turned)

    def _queries(self, latents: Latents, inputs: BlockInputs) -> tuple[jax.Array, jax.Array]:
        """Return the parts of queries that positions do not turn, and that they have turned."""
        project = self.q if self.q_up is None else self.q_up
        assert project is not None
        q, q_turned = jnp.split(project(latents.q, inputs), [self.unturned], -1)
        return q, self._turned(q_turned, inputs)

    def _turned(self, a: Float[Array, "B S N O"], inputs: BlockInputs) -> Float[Array, "B S N O"]:
        """Return `a` turned by positions, its neighbouring dims as halves afterwards if they are turned together."""
        if not self.frequencies:
            return a
        if self.neighbours:
            # Queries and keys have their dims in the same order, and their products are the same in any.
            a = a.reshape(*a.shape[:3], -1, 2).swapaxes(3, 4).reshape(a.shape)
        return rotary(a, self.frequencies, inputs.positions(self.layout, a.shape[1]), self.attention_factor)


@partial(recomputed, static_argnums=0)
def _of_all_heads(
    layout: Layout, k_turned: Float[Array, "B s O"], like: Float[Array, "B S N _"]
) -> Float[Array, "B S N O"]:
    """Return a part of keys for each head of `like`; the gradient is a sum over the heads, in f32 at least."""
    a = enter(layout, k_turned, "heads")
    shape = (*like.shape[:3], a.shape[-1])
    sharding = jax.typeof(like).sharding
    return jax.lax.broadcast_in_dim(a.astype(wide(a.dtype)), shape, (0, 1, 3), out_sharding=sharding).astype(a.dtype)
