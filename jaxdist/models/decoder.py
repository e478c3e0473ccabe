"""What the decoder-only models share: how they are called, and the way from the residual stream to a loss."""

from __future__ import annotations

from flax import nnx
from jaxtyping import Array, Float, Int

from jaxdist.models.loss import cross_entropy
from jaxdist.parallel.tensor import einsum, enter
from jaxdist.sharding import Layout


class Decoder(nnx.Module):
    """Offers `embed`, `blocks` (every layer, stacked on a leading L) and `loss` or `logits`, from one to the next.

    A model sets what is named here, and adds `embed(tokens, keys, starts)`; `output` is None where the table serves as
    output.
    """

    layout: Layout
    table: nnx.Param
    blocks: nnx.Module
    norm: nnx.Module
    output: nnx.Param | None

    def loss(self, x: Float[Array, "k B s D"], labels: Int[Array, "k B S"]) -> Float[Array, ""]:
        """Summed cross-entropy in nats over the labels that are not -1."""
        return cross_entropy(self.layout, self.norm(x), self._output_table(), labels)

    def logits(self, x: Float[Array, "B s D"]) -> Float[Array, "B S V"]:
        return einsum(self.layout, "BSD,VD->BSV", enter(self.layout, self.norm(x), "vocab"), self._output_table())

    def _output_table(self) -> Float[Array, "V D"]:
        return self.table[...] if self.output is None else self.output[...]
