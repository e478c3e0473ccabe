"""Granite 3: Llama whose embedding, scores, branches and logits have factors; dense, or with experts."""

from __future__ import annotations

from jaxdist.config import ModelConfig
from jaxdist.huggingface import families
from jaxdist.huggingface.keys import ModelType, Setting
from jaxdist.huggingface.model_types.shared import BIAS_OF_ATTENTION, BIAS_OF_MLP, ROUTED, SILU, balance_losses, decoder

FACTORS = {
    "embedding_multiplier": Setting("embedding_multiplier", 1.0),
    "residual_multiplier": Setting("residual_multiplier", 1.0),
    "attention_multiplier": Setting("attention_multiplier", 1.0),
    "logits_scaling": Setting("logits_divisor", 1.0),
}

SIZES = {key: one for key, one in decoder(vocab=32000, kv_heads=0, mlp=11008).items() if key != "head_dim"}


def tensors_with_experts(model: ModelConfig) -> families.Family:
    """Return the tensors of Granite with experts, whose matrices are one tensor in each layer."""
    mlp = families.LAYER + "block_sparse_moe."
    gate_up = families.Piece(mlp + "input_linear.weight", ("E", "PF", "D"))
    leaves = [
        *families.decoder(model),
        families.one("blocks.mlp.router", "LDE", mlp + "router.layer.weight", ("E", "D")),
        families.Leaf("blocks.mlp.gate_up", "LEDPF", (gate_up,)),
        families.one("blocks.mlp.down", "LEFD", mlp + "output_linear.weight", ("E", "D", "F")),
        families.Leaf("blocks.mlp.balance", "LE", ()),
    ]
    return families.with_output(model, leaves)


TYPES = {
    "granite": ModelType(
        family="llama",
        architectures=("GraniteForCausalLM", "GraniteModel"),
        settings={
            **SIZES,
            **BIAS_OF_ATTENTION,
            **BIAS_OF_MLP,
            **FACTORS,
        },
        allowed=SILU,
        implied={},
        maximum="max_position_embeddings",
        maximum_default=2048,
    ),
    "granitemoe": ModelType(
        family="moe",
        architectures=("GraniteMoeForCausalLM", "GraniteMoeModel"),
        tensors=tensors_with_experts,
        settings={
            **SIZES,
            **BIAS_OF_ATTENTION,
            **FACTORS,
            "num_local_experts": Setting("experts", 8, other="num_experts"),
            "num_experts_per_tok": Setting("experts_per_token", 2),
            "router_aux_loss_coef": Setting("balance_loss", 0.001, factor=balance_losses),
        },
        allowed=SILU,
        implied={**ROUTED, "router_renormalize": True},
        maximum="max_position_embeddings",
        maximum_default=2048,
    ),
}
