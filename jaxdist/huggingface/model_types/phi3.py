"""Phi-3 and Phi-4 (Abdin et al. 2024): Llama with fused tensors, and LongRoPE in long versions."""

from __future__ import annotations

from dataclasses import replace

from jaxdist.config import ModelConfig
from jaxdist.huggingface import families
from jaxdist.huggingface.keys import ModelType, Setting
from jaxdist.huggingface.model_types.shared import SILU, decoder

FUSED = {
    **{
        f"{families.LAYER}self_attn.{name}.weight": f"{families.LAYER}self_attn.qkv_proj.weight"
        for name in ("q_proj", "k_proj", "v_proj")
    },
    **{
        f"{families.LAYER}mlp.{name}.weight": f"{families.LAYER}mlp.gate_up_proj.weight"
        for name in ("gate_proj", "up_proj")
    },
}


def tensors(model: ModelConfig) -> families.Family:
    """Return the tensors of Llama, some of which are one here."""
    return replace(families.llama(model), fused=FUSED)


TYPES = {
    "phi3": ModelType(
        family="llama",
        architectures=("Phi3ForCausalLM", "Phi3Model"),
        tensors=tensors,
        settings={
            **decoder(vocab=32064, kv_heads=0, mlp=8192),
            "hidden_size": Setting("embed", 3072),
            "rms_norm_eps": Setting("norm_eps", 1e-5),
        },
        allowed=SILU,
        implied={},
        maximum="max_position_embeddings",
        maximum_default=4096,
        window="all",
        window_default=None,
        rotary_fraction=1.0,
        # The code beside the first weights computes what transformers does, and rope.py reads the second.
        unused=("auto_map", "original_max_position_embeddings"),
    )
}
