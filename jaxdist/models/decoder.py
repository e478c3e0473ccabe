"""What the decoder-only models share: their interface, and the way from the residual stream to a loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxdist.config import ModelConfig
from jaxdist.config.model import Kind
from jaxdist.config.stacks import stacks_of
from jaxdist.models.adapters import adapt
from jaxdist.models.dropout import dropout
from jaxdist.models.inputs import BlockInputs
from jaxdist.models.layers import Attend, CausalAttention
from jaxdist.models.loss import cross_entropy, row_losses
from jaxdist.parallel.tensor import einsum, enter
from jaxdist.parallel.vocabulary import without_added
from jaxdist.sharding import Layout, Params

Aux = dict[str, Float[Array, "..."]]
"""What a layer returns beside the residual stream, by name: sums over tokens. A layer without a router has none."""


class Block(nnx.Module):
    """A layer of a decoder: x + attention(norm1(x)), then x + mlp(norm2(x)), with dropout on both branches."""

    def __init__(
        self,
        layout: Layout,
        rate: float,
        norm1: Callable[[jax.Array], jax.Array],
        attention: CausalAttention,
        norm2: Callable[[jax.Array], jax.Array],
        mlp: Callable[[jax.Array, BlockInputs], Any],
    ):
        """Take the parts; `rate` is that of dropout."""
        self.layout = layout
        self.rate = rate
        self.norm1 = norm1
        self.attention = attention
        self.norm2 = norm2
        self.mlp = mlp

    def __call__(
        self, x: Float[Array, "B s D"], inputs: BlockInputs, attend: Attend | None = None
    ) -> tuple[Float[Array, "B s D"], Aux, Any]:
        """Return (the residual stream after the block, aux, what `attend` returns beside its result).

        `attend` stands in the place of attention among the tokens of `x`, as `CausalAttention` says.
        """
        y, further = self.attention(self.norm1(x), inputs, attend)
        x = x + dropout(self.layout, y, self.rate, inputs.keys, site=0)
        y, aux = self.feed_forward(self.norm2(x), inputs)
        return x + dropout(self.layout, y, self.rate, inputs.keys, site=1), aux, further

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


class Decoder(nnx.Module):
    """A decoder as `embed`, `blocks` (all layers, stacked on a leading L) and `loss` or `logits`, to run in this order.

    Where layers have different parameters, `blocks` has a stack of each form (`config.stacks`).

    A model sets the attributes below and offers `make_block` and `embed`.
    """

    layout: Layout
    vocab: int
    """V: the tokens. On a mesh the tables may have further rows (`parallel.vocabulary`)."""
    table: nnx.Param
    blocks: Block | nnx.Dict
    norm: nnx.Module
    output: nnx.Param | None
    """The output projection; None where the embedding table serves as one."""

    @classmethod
    def make_block(cls, config: ModelConfig, kind: Kind, layout: Layout, rngs: nnx.Rngs) -> Block:
        """Return one layer of a stack with new parameters, whose shapes are the same for all kinds."""
        raise NotImplementedError

    @classmethod
    def stack(cls, config: ModelConfig, layout: Layout, rngs: nnx.Rngs, kind: int = 0) -> Block:
        """Return the blocks of a stack, with their adapters, stacked on a leading L.

        All are built as those of one kind, by its number in `config.kinds`.
        """

        def make(rngs: nnx.Rngs) -> Block:
            return adapt(cls.make_block(config, config.kinds[kind], layout, rngs), config, layout, rngs)

        return jax.vmap(make)(rngs.split(config.layers))

    @classmethod
    def stacked(cls, config: ModelConfig, layout: Layout, rngs: nnx.Rngs) -> Block | nnx.Dict:
        """Return the blocks of all layers: of the only stack, or of each stack under its name."""
        stacks = {name: cls.stack(stack, layout, rngs) for name, stack in stacks_of(config).items()}
        return stacks[""] if "" in stacks else nnx.Dict(stacks)

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
        """Return the logits of every position; rows that belong to no token have minus infinity."""
        x = enter(self.layout, self.norm(x), "vocab")
        logits = einsum(self.layout, "BSD,VD->BSV", x, self._output_table())
        return without_added(self.layout, logits, self.vocab)

    def _output_table(self) -> Float[Array, "V D"]:
        if self.output is None:
            return self.table[...]
        return self.output[...]
