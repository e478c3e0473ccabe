"""Phi-3 and Phi-4 (Abdin et al. 2024): Llama with fused tensors (`families.FUSED`), and LongRoPE in long versions."""

from __future__ import annotations

from jaxdist.huggingface.keys import ModelType, Setting
from jaxdist.huggingface.model_types.shared import SILU, decoder

TYPES = {
    "phi3": ModelType(
        family="llama",
        architectures=("Phi3ForCausalLM", "Phi3Model"),
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
