"""Llama (Touvron et al. 2023, section 2.2; Llama 3: Grattafiori et al. 2024, section 3.2), and what differs from it.

Blocks of RMSNorm, rotary positions, grouped-query attention and SwiGLU; no dropout; tied or untied output. Knobs of
`model` put other norms, activations, positions and biases in the place of these.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flax import nnx
from jaxtyping import Array, Float, Int

from jaxdist.config import ModelConfig
from jaxdist.config.model import Kind
from jaxdist.models.decoder import Block, Decoder
from jaxdist.models.inputs import BlockInputs
from jaxdist.models.latent_attention import LatentAttention
from jaxdist.models.layers import GroupedAttention, mlp_of
from jaxdist.models.norms import norm_of
from jaxdist.models.parameters import weight
from jaxdist.parallel.tensor import lookup
from jaxdist.sharding import Layout


class Llama(Decoder):
    """The decoder of Llama; positions enter through attention alone."""

    block_type = Block
    mlp_type: Callable[[ModelConfig, Layout, nnx.Rngs], Any] = staticmethod(mlp_of)
    """What makes the MLP, or what stands in its place."""

    def __init__(self, config: ModelConfig, layout: Layout, rngs: nnx.Rngs):
        self.layout = layout
        self.vocab = config.vocab
        self.embedding_scale = config.embedding_scale
        self.logit_cap = config.logit_cap
        self.logits_divisor = config.logits_divisor
        self.table = weight(rngs, (config.vocab, config.embed), ("vocab", "embed"))
        self.blocks = self.stacked(config, layout, rngs)
        self.norm = norm_of(config)
        self.output = None if config.tied else weight(rngs, (config.vocab, config.embed), ("vocab", "embed"))

    @classmethod
    def make_block(cls, config: ModelConfig, kind: Kind, layout: Layout, rngs: nnx.Rngs) -> Block:
        """Return one layer with new parameters."""
        attention = (LatentAttention if config.kv_latent else GroupedAttention)(config, layout, rngs, kind)
        return cls.block_type(config, layout, attention, cls.mlp_type(config, layout, rngs))

    def embed(self, tokens: Int[Array, "B S"], inputs: BlockInputs) -> Float[Array, "B s D"]:
        """Return the residual stream before the first block."""
        x = lookup(self.layout, self.table[...], tokens, size=self.vocab)
        return x if self.embedding_scale == 1 else self.embedding_scale * x
