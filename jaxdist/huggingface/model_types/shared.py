"""Rows that several types have in common."""

from __future__ import annotations

from jaxdist.config import ModelConfig
from jaxdist.huggingface.keys import Setting


def decoder(vocab: int, kv_heads: int, mlp: int, head_dim: int = 0) -> dict[str, Setting]:
    """Return the settings of the types with rotary positions, whose defaults differ in these sizes."""
    return {
        "vocab_size": Setting("vocab", vocab),
        "hidden_size": Setting("embed", 4096),
        "intermediate_size": Setting("mlp", mlp),
        "num_hidden_layers": Setting("layers", 32),
        "num_attention_heads": Setting("heads", 32),
        "num_key_value_heads": Setting("kv_heads", kv_heads, null=0),
        "head_dim": Setting("head_dim", head_dim, null=0),
        "rms_norm_eps": Setting("norm_eps", 1e-6),
        "tie_word_embeddings": Setting("tied", False),
    }


def balance_losses(model: ModelConfig) -> float:
    """Return the factor of their coefficient of the load-balancing loss.

    Where the load is even, their loss is k, the mean over layers. Ours is 1 in each layer, and layers are added up.
    """
    return model.experts_per_token / model.layers


ROUTED = {
    **{"balance_rate": 0.0, "router": "softmax", "router_scale": 1.0, "router_group_score": "none"},
    **{"shared_experts": 0, "shared_gate": False, "dense_layers": 0},
}
"""Knobs of types with experts in all layers, which no bias balances."""

SILU = {"hidden_act": ("silu", "swish")}
NO_BIAS = {"attention_bias": (False,)}
"""Values of keys, the default first."""

BIAS_OF_ATTENTION = {"attention_bias": Setting("qkv_bias", False, also=("out_bias",))}
BIAS_OF_MLP = {"mlp_bias": Setting("mlp_bias", False)}
"""Biases of the weights of a layer."""
