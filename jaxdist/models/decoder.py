"""What the decoder-only models share: their interface, and the way from the residual stream to a loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxdist.config import ModelConfig
from jaxdist.config.matmuls import attention_enters_mlp, normed_after, normed_before
from jaxdist.config.model import Kind
from jaxdist.config.stacks import stacks_of
from jaxdist.models.adapters import adapt
from jaxdist.models.dropout import dropout
from jaxdist.models.inputs import BlockInputs
from jaxdist.models.layers import Attend, CausalAttention
from jaxdist.models.loss import cross_entropy, row_losses
from jaxdist.models.norms import norm_of
from jaxdist.models.parameters import ahead
from jaxdist.models.scores import soft_capped
from jaxdist.models.stored_weight import store
from jaxdist.parallel.tensor import einsum, enter
from jaxdist.parallel.vocabulary import without_added
from jaxdist.sharding import Layout, Params

Norm = Callable[[jax.Array], jax.Array]
"""A norm over the residual stream."""

Aux = dict[str, Float[Array, "..."]]
"""What a layer returns beside the residual stream, by name: sums over tokens. A layer without a router has none."""


class Block(nnx.Module):
    """A layer of a decoder: x + attention(norm1(x)), then x + mlp(norm2(x)), with dropout on both branches.

    The norms may stand after attention and MLP instead, or there too; and both branches may read the same x
    (`model.norms`, `model.residual`).
    """

    def __init__(
        self,
        config: ModelConfig,
        layout: Layout,
        attention: CausalAttention,
        mlp: Callable[[jax.Array, BlockInputs], Any],
    ):
        """Take attention and MLP, and put norms around them."""
        before, after = normed_before(config), normed_after(config)
        self.layout = layout
        self.rate = config.dropout if config.traits.dropout else 0.0
        self.before = before
        self.multiplier = config.residual_multiplier
        self.sequential = attention_enters_mlp(config)
        self.norm1 = norm_of(config)
        self.attention = attention
        self.norm2 = norm_of(config)
        self.mlp = mlp
        self.norm1_after = norm_of(config) if before and after else None
        self.norm2_after = norm_of(config) if before and after else None

    def __call__(
        self, x: Float[Array, "B s D"], inputs: BlockInputs, attend: Attend | None = None
    ) -> tuple[Float[Array, "B s D"], Aux, Any]:
        """Return (the residual stream after the block, aux, what `attend` returns beside its result).

        `attend` stands in the place of attention among the tokens of `x`, as `CausalAttention` says.
        """
        y, further = self.attention(self._entering(self.norm1, x), inputs, attend)
        attended = x + self._leaving(self.norm1, self.norm1_after, y, inputs, site=0)
        y, aux = self.feed_forward(self._entering(self.norm2, attended if self.sequential else x), inputs)
        return attended + self._leaving(self.norm2, self.norm2_after, y, inputs, site=1), aux, further

    def _entering(self, norm: Norm, x: jax.Array) -> jax.Array:
        """Return what a branch reads of the residual stream."""
        return norm(x) if self.before else x

    def _leaving(self, norm: Norm, after: Norm | None, y: jax.Array, inputs: BlockInputs, site: int) -> jax.Array:
        """Return what a branch adds to the residual stream; `after` is the second norm of a branch with two."""
        if not self.before:
            y = norm(y)
        elif after is not None:
            y = after(y)
        y = y if self.multiplier == 1 else self.multiplier * y
        return dropout(self.layout, y, self.rate, inputs.keys, site=site)

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
    logit_cap: float = 0.0
    """The soft cap of logits (`models.scores.soft_capped`); 0: none."""
    output: nnx.Param | None
    """The output projection; None where the embedding table serves as one."""
    logits_divisor: float = 1.0
    """What logits are divided by."""

    @classmethod
    def make_block(cls, config: ModelConfig, kind: Kind, layout: Layout, rngs: nnx.Rngs) -> Block:
        """Return one layer of a stack with new parameters, whose shapes are the same for all kinds."""
        raise NotImplementedError

    @classmethod
    def stack(cls, config: ModelConfig, layout: Layout, rngs: nnx.Rngs, kind: int = 0) -> Block:
        """Return the blocks of a stack, with their adapters beside what they hold, stacked on a leading L.

        All are built as those of one kind, by its number in `config.kinds`.
        """

        def make(rngs: nnx.Rngs) -> Block:
            rngs = ahead(rngs)
            block = cls.make_block(config, config.kinds[kind], layout, rngs)
            store(block, config)
            return adapt(block, config, layout, rngs)

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
        return cross_entropy(self.layout, self._last(x), self._output_table(), labels, self.vocab, self.logit_cap)

    def row_losses(self, x: Float[Array, "k B s D"], labels: Int[Array, "k B S"]) -> Float[Array, "k B"]:
        """Return the cross-entropy in nats of each row, summed over its labels that are not -1."""
        return row_losses(self.layout, self._last(x), self._output_table(), labels, self.vocab, self.logit_cap)

    def logits(self, x: Float[Array, "B s D"]) -> Float[Array, "B S V"]:
        """Return the logits of every position; rows that belong to no token have minus infinity."""
        x = enter(self.layout, self._last(x), "vocab")
        logits = einsum(replace(self.layout, float8=False), "BSD,VD->BSV", x, self._output_table())
        return without_added(self.layout, soft_capped(logits, self.logit_cap), self.vocab)

    def _last(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        """Return the last hidden states, whose products with the output table are the logits."""
        x = self.norm(x)
        return x if self.logits_divisor == 1 else x / self.logits_divisor

    def _output_table(self) -> Float[Array, "V D"]:
        if self.output is None:
            return self.table[...]
        return self.output[...]
