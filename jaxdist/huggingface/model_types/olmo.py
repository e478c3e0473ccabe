"""OLMo 2 and 3 (OLMo 2, 2025, section 2.1): norms after attention and MLP, and of all queries and keys together."""

from __future__ import annotations

from jaxdist.huggingface.keys import ModelType, Setting
from jaxdist.huggingface.model_types.shared import BIAS_OF_ATTENTION, SILU, decoder

SETTINGS = {
    **{key: setting for key, setting in decoder(vocab=50304, kv_heads=0, mlp=11008).items() if key != "head_dim"},
    "rms_norm_eps": Setting("norm_eps", 1e-5),
    **BIAS_OF_ATTENTION,
}

TYPES = {
    "olmo2": ModelType(
        family="llama",
        architectures=("Olmo2ForCausalLM", "Olmo2Model"),
        settings=SETTINGS,
        allowed=SILU,
        implied={"norms": "after", "qk_norm": "full"},
        maximum="max_position_embeddings",
        maximum_default=2048,
    ),
    "olmo3": ModelType(
        family="llama",
        architectures=("Olmo3ForCausalLM", "Olmo3Model"),
        settings=SETTINGS,
        allowed=SILU,
        implied={"norms": "after", "qk_norm": "full"},
        maximum="max_position_embeddings",
        maximum_default=2048,
        window="listed",
        full_every=4,
        theta=500_000.0,
        own_sliding_rope=True,
    ),
}
