"""Llama (Touvron et al. 2023, section 2.2; Llama 3: Grattafiori et al. 2024, section 3.2).

Pre-norm blocks of RMSNorm, rotary positions, grouped-query attention and SwiGLU; no dropout; tied or untied output.
"""

from __future__ import annotations

from flax import nnx
from jaxtyping import Array, Float, Int

from jaxdist.config import ModelConfig
from jaxdist.models.decoder import Aux, Decoder, DecoderBlock, stacked
from jaxdist.models.inputs import BlockInputs
from jaxdist.models.layers import GroupedAttention, RMSNorm, SwiGLU
from jaxdist.models.parameters import weight
from jaxdist.parallel.tensor import lookup
from jaxdist.sharding import Layout


class Block(DecoderBlock):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: ModelConfig, layout: Layout, rngs: nnx.Rngs):
        self.norm1 = RMSNorm(config.embed, config.norm_eps)
        self.attention = GroupedAttention(config, layout, rngs)
        self.norm2 = RMSNorm(config.embed, config.norm_eps)
        self.mlp = self.make_mlp(config, layout, rngs)

    @staticmethod
    def make_mlp(config: ModelConfig, layout: Layout, rngs: nnx.Rngs) -> nnx.Module:
        """Return what stands in the place of the MLP."""
        return SwiGLU(config, layout, rngs)

    def __call__(self, x: Float[Array, "B s D"], inputs: BlockInputs) -> tuple[Float[Array, "B s D"], Aux]:
        """Return (the residual stream after the block, aux)."""
        x = x + self.attention(self.norm1(x), inputs)
        y, aux = self.feed_forward(self.norm2(x), inputs)
        return x + y, aux


class Llama(Decoder):
    """The decoder of Llama; positions enter through attention alone."""

    block_type = Block

    def __init__(self, config: ModelConfig, layout: Layout, rngs: nnx.Rngs):
        self.layout = layout
        self.vocab = config.vocab
        self.table = weight(rngs, (config.vocab, config.embed), ("vocab", "embed"))
        self.blocks = stacked(lambda rngs: self.block_type(config, layout, rngs), config, layout, rngs)
        self.norm = RMSNorm(config.embed, config.norm_eps)
        self.output = None if config.tied else weight(rngs, (config.vocab, config.embed), ("vocab", "embed"))

    def embed(self, tokens: Int[Array, "B S"], inputs: BlockInputs) -> Float[Array, "B s D"]:
        """Return the residual stream before the first block."""
        return lookup(self.layout, self.table[...], tokens, size=self.vocab)
