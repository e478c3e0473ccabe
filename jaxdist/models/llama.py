"""Llama (Touvron et al. 2023, section 2.2; Llama 3: Grattafiori et al. 2024, section 3.2).

Pre-norm blocks of RMSNorm, rotary positions, grouped-query attention and SwiGLU; no dropout; tied or untied output.
"""

from __future__ import annotations

from typing import Any

from flax import nnx
from jaxtyping import Array, Float, Int

from jaxdist.config import ModelConfig
from jaxdist.config.model import Kind
from jaxdist.models.decoder import Block, Decoder
from jaxdist.models.inputs import BlockInputs
from jaxdist.models.layers import GatedMLP, GroupedAttention, RMSNorm
from jaxdist.models.parameters import weight
from jaxdist.models.scores import Scores
from jaxdist.parallel.tensor import lookup
from jaxdist.sharding import Layout


class Llama(Decoder):
    """The decoder of Llama; positions enter through attention alone."""

    block_type = Block
    mlp_type: type[Any] = GatedMLP
    """What stands in the place of the MLP."""

    def __init__(self, config: ModelConfig, layout: Layout, rngs: nnx.Rngs):
        self.layout = layout
        self.vocab = config.vocab
        self.embedding_scale = config.embedding_scale
        self.table = weight(rngs, (config.vocab, config.embed), ("vocab", "embed"))
        self.blocks = self.stacked(config, layout, rngs)
        self.norm = RMSNorm.of(config, config.embed)
        self.output = None if config.tied else weight(rngs, (config.vocab, config.embed), ("vocab", "embed"))

    @classmethod
    def make_block(cls, config: ModelConfig, kind: Kind, layout: Layout, rngs: nnx.Rngs) -> Block:
        """Return one layer with new parameters."""
        norm1, norm2 = (RMSNorm.of(config, config.embed) for _ in range(2))
        scores = Scores.of(config.head_size, kind.window)
        attention = GroupedAttention(config, layout, rngs, scores, config.rope_theta)
        return cls.block_type(layout, 0.0, norm1, attention, norm2, cls.mlp_type(config, layout, rngs))

    def embed(self, tokens: Int[Array, "B S"], inputs: BlockInputs) -> Float[Array, "B s D"]:
        """Return the residual stream before the first block."""
        x = lookup(self.layout, self.table[...], tokens, size=self.vocab)
        return x if self.embedding_scale == 1 else self.embedding_scale * x
