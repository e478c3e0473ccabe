"""Llama with a mixture of experts in the place of every MLP.

It is the decoder of Mixtral (Jiang et al. 2024, section 2.1), of OLMoE (Muennighoff et al. 2024, section 2) and of
Qwen3-MoE (Yang et al. 2025, section 2).
"""

from __future__ import annotations

from flax import nnx
from jaxtyping import Array, Float

from jaxdist.config import ModelConfig
from jaxdist.config.model import Kind
from jaxdist.models.decoder import Aux, Block
from jaxdist.models.experts import Experts
from jaxdist.models.inputs import BlockInputs
from jaxdist.models.llama import Llama
from jaxdist.sharding import Layout, Params


class RoutedBlock(Block):
    """x + attention(norm(x)), then x + experts(norm(x))."""

    mlp: Experts

    @property
    def aux_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the aux of one layer."""
        return self.mlp.aux_shapes

    def feed_forward(self, x: Float[Array, "B s D"], inputs: BlockInputs) -> tuple[Float[Array, "B s D"], Aux]:
        """Return (what the experts add to the residual stream, the sums of their router)."""
        return self.mlp(x, inputs)

    def steered(self, aux: Aux) -> Params:
        """Return the balance after a step whose batch has the sums `aux`."""
        return {"mlp": self.mlp.steered(aux)}


class Moe(Llama):
    """The decoder of Llama with routed blocks, or with some of them."""

    block_type = RoutedBlock
    mlp_type = Experts

    @classmethod
    def make_block(cls, config: ModelConfig, kind: Kind, layout: Layout, rngs: nnx.Rngs) -> Block:
        """Return one layer of a stack with new parameters; without experts it is Llama's."""
        if not config.traits.routed:
            return Llama.make_block(config, kind, layout, rngs)
        return super().make_block(config, kind, layout, rngs)
