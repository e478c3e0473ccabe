"""SmolLM3: Llama, of which some layers have no rotary positions (NoPE)."""

from __future__ import annotations

from jaxdist.huggingface.keys import ModelType, Setting
from jaxdist.huggingface.model_types.shared import BIAS_OF_ATTENTION, BIAS_OF_MLP, SILU, decoder

TYPES = {
    "smollm3": ModelType(
        family="llama",
        architectures=("SmolLM3ForCausalLM", "SmolLM3Model"),
        settings={
            **{key: one for key, one in decoder(vocab=128256, kv_heads=4, mlp=11008).items() if key != "head_dim"},
            "hidden_size": Setting("embed", 2048),
            "num_hidden_layers": Setting("layers", 36),
            "num_attention_heads": Setting("heads", 16),
            "tie_word_embeddings": Setting("tied", True),
            **BIAS_OF_ATTENTION,
            **BIAS_OF_MLP,
        },
        allowed=SILU,
        implied={},
        maximum="max_position_embeddings",
        maximum_default=32768,
        window="some",
        window_default=None,
        nope_every=4,
        theta=2_000_000.0,
    )
}
