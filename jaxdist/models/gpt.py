"""A GPT-2 style decoder (Radford et al. 2019): learned positions, pre-norm blocks, GELU, tied or untied output."""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxdist.config import ModelConfig
from jaxdist.config.model import Kind
from jaxdist.models.decoder import Block, Decoder
from jaxdist.models.dropout import dropout
from jaxdist.models.inputs import BlockInputs
from jaxdist.models.layers import MLP, Attention
from jaxdist.models.norms import norm_of
from jaxdist.models.parameters import weight
from jaxdist.models.scores import Scores
from jaxdist.parallel.tensor import lookup
from jaxdist.sharding import POSITIONS, RESIDUAL, Layout, spread


class GPT(Decoder):
    """The decoder of GPT-2; learned positions are added to the vectors of the tokens."""

    def __init__(self, config: ModelConfig, layout: Layout, rngs: nnx.Rngs):
        self.layout = layout
        self.vocab = config.vocab
        self.rate = config.dropout
        self.table = weight(rngs, (config.vocab, config.embed), ("vocab", "embed"))
        self.positions = weight(rngs, (config.position_rows, config.embed), (POSITIONS, "embed"), 0.01)
        self.blocks = self.stacked(config, layout, rngs)
        self.norm = norm_of(config)
        self.output = None if config.tied else weight(rngs, (config.vocab, config.embed), ("vocab", "embed"))

    @classmethod
    def make_block(cls, config: ModelConfig, kind: Kind, layout: Layout, rngs: nnx.Rngs) -> Block:
        """Return one layer with new parameters."""
        attention = Attention(config, layout, rngs, Scores(config.score_scale, kind.window, form=config.attention))
        return Block(config, layout, attention, MLP(config, layout, rngs))

    def embed(self, tokens: Int[Array, "B S"], inputs: BlockInputs) -> Float[Array, "B s D"]:
        """Return the residual stream before the first block; positions are counted from the start of each document."""
        x = lookup(self.layout, self.table[...], tokens, size=self.vocab)
        table = self.positions[...]
        if inputs.starts is None and self.layout.split(POSITIONS) == self.layout.split(RESIDUAL):
            x = x + spread(table[: tokens.shape[1]], x)
        else:
            # A lookup, because each row has its own positions, or each device its own part of the sequence.
            starts = jnp.zeros_like(tokens) if inputs.starts is None else inputs.starts
            places = inputs._replace(starts=starts).positions(self.layout, tokens.shape[1])
            x = x + lookup(self.layout, table, places, POSITIONS)
        return dropout(self.layout, x, self.rate, inputs.keys, site=0)
