"""Gemma 1 to 3, text alone (Gemma 2, 2024, section 2; Gemma 3, 2025, section 2): norms by 1 + w, GeGLU, soft caps."""

from __future__ import annotations

from jaxdist.huggingface.keys import ModelType, Setting
from jaxdist.huggingface.model_types.shared import BIAS_OF_ATTENTION, decoder

TANH = ("gelu_pytorch_tanh", "gelu_new")
"""Names of GELU's tanh form."""

CAUSAL = {"use_bidirectional_attention": (None, False)}
"""What makes attention causal, as null does too."""

LATER = {
    **decoder(vocab=256000, kv_heads=4, mlp=9216, head_dim=256),
    "hidden_size": Setting("embed", 2304),
    "num_hidden_layers": Setting("layers", 26),
    "num_attention_heads": Setting("heads", 8),
    "tie_word_embeddings": Setting("tied", True),
    "query_pre_attn_scalar": Setting("attention_multiplier", 256, power=-0.5),
    **BIAS_OF_ATTENTION,
}
"""Keys that Gemma 2 and 3 have in common."""


def _caps(scores: float | None, logits: float | None) -> dict[str, Setting]:
    """Return the settings of the soft caps."""
    return {
        "attn_logit_softcapping": Setting("attention_cap", scores, null=0.0),
        "final_logit_softcapping": Setting("logit_cap", logits, null=0.0),
    }


TYPES = {
    "gemma": ModelType(
        family="gemma",
        architectures=("GemmaForCausalLM", "GemmaModel"),
        settings={
            **decoder(vocab=256000, kv_heads=16, mlp=24576, head_dim=256),
            "hidden_size": Setting("embed", 3072),
            "num_hidden_layers": Setting("layers", 28),
            "num_attention_heads": Setting("heads", 16),
            "tie_word_embeddings": Setting("tied", True),
            **BIAS_OF_ATTENTION,
        },
        # All versions take the first files, which say gelu, for the tanh form.
        allowed={"hidden_act": (*TANH, "gelu"), "hidden_activation": (*TANH, None), **CAUSAL},
        implied={},
        maximum="max_position_embeddings",
        maximum_default=8192,
    ),
    "gemma2": ModelType(
        family="gemma",
        architectures=("Gemma2ForCausalLM", "Gemma2Model"),
        settings={**LATER, **_caps(50.0, 30.0)},
        allowed={"hidden_activation": TANH, **CAUSAL},
        implied={"norms": "both"},
        maximum="max_position_embeddings",
        maximum_default=8192,
        window="listed",
        full_every=2,
        # The first stands beside hidden_activation, which counts.
        unused=("hidden_act", "sliding_window_size"),
    ),
    "gemma3_text": ModelType(
        family="gemma",
        architectures=("Gemma3ForCausalLM", "Gemma3TextModel"),
        settings={**LATER, "vocab_size": Setting("vocab", 262208), **_caps(None, None)},
        allowed={"hidden_activation": TANH, "use_bidirectional_attention": (False,)},
        implied={"norms": "both", "qk_norm": "head"},
        maximum="max_position_embeddings",
        maximum_default=131072,
        window="listed",
        full_every=6,
        full_every_names=("sliding_window_pattern", "_sliding_window_pattern"),
        theta=1_000_000.0,
        own_sliding_rope=True,
        sliding_theta=10_000.0,
        sliding_theta_name="rope_local_base_freq",
        unused=("hidden_act",),
    ),
}
