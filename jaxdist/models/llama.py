"""Llama (Touvron et al. 2023, section 2.2; Llama 3: Grattafiori et al. 2024, section 3.2).

Pre-norm blocks of RMSNorm, rotary positions, grouped-query attention and SwiGLU; no dropout; tied or untied output.
"""

from __future__ import annotations

from flax import nnx
from jaxtyping import Array, Float, Int

from jaxdist.config import ModelConfig
from jaxdist.models.decoder import Block, Decoder
from jaxdist.models.inputs import BlockInputs
from jaxdist.models.layers import GroupedAttention, RMSNorm, SwiGLU
from jaxdist.models.parameters import weight
from jaxdist.parallel.tensor import lookup
from jaxdist.sharding import Layout


class Llama(Decoder):
    """The decoder of Llama; positions enter through attention alone."""

    block_type = Block
    mlp_type: type[nnx.Module] = SwiGLU
    """What stands in the place of the MLP."""

    def __init__(self, config: ModelConfig, layout: Layout, rngs: nnx.Rngs):
        self.layout = layout
        self.vocab = config.vocab
        self.table = weight(rngs, (config.vocab, config.embed), ("vocab", "embed"))
        self.blocks = self.stacked(config, layout, rngs)
        self.norm = RMSNorm(config.embed, config.norm_eps)
        self.output = None if config.tied else weight(rngs, (config.vocab, config.embed), ("vocab", "embed"))

    @classmethod
    def make_block(cls, config: ModelConfig, layout: Layout, rngs: nnx.Rngs) -> Block:
        """Return one layer with new parameters."""
        norm1, norm2 = (RMSNorm(config.embed, config.norm_eps) for _ in range(2))
        attention = GroupedAttention(config, layout, rngs)
        return cls.block_type(layout, config.dropout, norm1, attention, norm2, cls.mlp_type(config, layout, rngs))

    def embed(self, tokens: Int[Array, "B S"], inputs: BlockInputs) -> Float[Array, "B s D"]:
        """Return the residual stream before the first block."""
        return lookup(self.layout, self.table[...], tokens, size=self.vocab)
