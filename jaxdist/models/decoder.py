"""What the decoder-only models share: their interface, and the way from the residual stream to a loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxdist.config import ModelConfig
from jaxdist.models.adapters import adapt
from jaxdist.models.inputs import BlockInputs
from jaxdist.models.loss import cross_entropy, row_losses
from jaxdist.parallel.tensor import einsum, enter
from jaxdist.parallel.vocabulary import without_added
from jaxdist.sharding import Layout, Params

Aux = dict[str, Float[Array, "..."]]
"""What a layer returns beside the residual stream, by name: sums over tokens. A layer without a router has none."""


class DecoderBlock(nnx.Module):
    """What the blocks of all decoders offer; one with a router returns aux, and moves parameters by them."""

    mlp: Callable[[jax.Array, BlockInputs], Any]

    @property
    def aux_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the aux of one layer."""
        return {}

    def feed_forward(self, x: Float[Array, "B s D"], inputs: BlockInputs) -> tuple[Float[Array, "B s D"], Aux]:
        """Return (what the MLP, or what stands in its place, adds to the residual stream; aux)."""
        return self.mlp(x, inputs), {}

    def steered(self, aux: Aux) -> Params:
        """Return the parameters that no gradient moves, after a step whose batch has the sums `aux`."""
        return {}


def stacked(
    make: Callable[[nnx.Rngs], DecoderBlock], config: ModelConfig, layout: Layout, rngs: nnx.Rngs
) -> DecoderBlock:
    """Return the blocks of all layers, each made by `make` and adapted, stacked on a leading L."""
    return jax.vmap(lambda rngs: adapt(make(rngs), config, layout, rngs))(rngs.split(config.layers))


class Decoder(nnx.Module):
    """A decoder as `embed`, `blocks` (all layers, stacked on a leading L) and `loss` or `logits`, to run in this order.

    A model sets the attributes below and offers `embed`.
    """

    layout: Layout
    vocab: int
    """V: the tokens. On a mesh the tables may have further rows (`parallel.vocabulary`)."""
    table: nnx.Param
    blocks: DecoderBlock
    norm: nnx.Module
    output: nnx.Param | None
    """The output projection; None where the embedding table serves as one."""

    def embed(self, tokens: Int[Array, "B S"], inputs: BlockInputs) -> Float[Array, "B s D"]:
        """Return the residual stream before the first block."""
        raise NotImplementedError

    def loss(self, x: Float[Array, "k B s D"], labels: Int[Array, "k B S"]) -> Float[Array, ""]:
        """Return the summed cross-entropy in nats over the labels that are not -1."""
        return cross_entropy(self.layout, self.norm(x), self._output_table(), labels, self.vocab)

    def row_losses(self, x: Float[Array, "k B s D"], labels: Int[Array, "k B S"]) -> Float[Array, "k B"]:
        """Return the cross-entropy in nats of each row, summed over its labels that are not -1."""
        return row_losses(self.layout, self.norm(x), self._output_table(), labels, self.vocab)

    def logits(self, x: Float[Array, "B s D"]) -> Float[Array, "B S V"]:
        """Return the logits of every position; those of rows that belong to no token are minus infinity."""
        x = enter(self.layout, self.norm(x), "vocab")
        logits = einsum(self.layout, "BSD,VD->BSV", x, self._output_table())
        return without_added(self.layout, logits, self.vocab)

    def _output_table(self) -> Float[Array, "V D"]:
        if self.output is None:
            return self.table[...]
        return self.output[...]
