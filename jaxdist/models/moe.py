"""Llama with a mixture of experts in the place of every MLP.

It is the decoder of Mixtral (Jiang et al. 2024, section 2.1), of OLMoE (Muennighoff et al. 2024, section 2) and of
Qwen3-MoE (Yang et al. 2025, section 2).
"""

from __future__ import annotations

from flax import nnx

from jaxdist.config import ModelConfig
from jaxdist.models.experts import Experts
from jaxdist.models.llama import Block, Llama
from jaxdist.sharding import Layout


class RoutedBlock(Block):
    """x + attention(norm(x)), then x + experts(norm(x))."""

    @staticmethod
    def make_mlp(config: ModelConfig, layout: Layout, rngs: nnx.Rngs) -> nnx.Module:
        """Return the experts."""
        return Experts(config, layout, rngs)


class Moe(Llama):
    """The decoder of Llama with routed blocks."""

    block_type = RoutedBlock
