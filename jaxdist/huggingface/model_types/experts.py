"""Decoders with experts in every layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxdist.config import ModelConfig
from jaxdist.huggingface import families
from jaxdist.huggingface.keys import ModelType, Setting
from jaxdist.huggingface.model_types.shared import NO_BIAS, ROUTED, SILU, balance_losses, decoder

EXPERTS_IN_ALL_LAYERS: dict[str, tuple[Any, ...]] = {
    "decoder_sparse_step": (1,),
    "mlp_only_layers": ([],),
    # Versions 4 and 5 of transformers give it to other layers.
    "use_sliding_window": (False,),
}
"""Values of keys of Qwen. `intermediate_size` is the width of layers without experts, which its models have none of."""

MATRICES = {name: name for name in ("gate_proj", "up_proj", "down_proj")}


def _tensors(model: ModelConfig, mlp: str, matrices: Mapping[str, str]) -> families.Family:
    """Return the tensors of a type of which those of an expert are tensors of their own.

    `mlp` is how the names of an MLP begin, and `matrices` are their names of the parts of an expert.
    """
    leaves = [
        *families.decoder(model),
        *families.experts(model, families.LAYER + mlp, matrices, "shared_expert"),
        families.Leaf("blocks.mlp.balance", "LE", ()),
    ]
    return families.with_output(model, leaves)


def mixtral(model: ModelConfig) -> families.Family:
    """Return the tensors of Mixtral, which numbers the matrices."""
    return _tensors(model, "block_sparse_moe.", {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"})


def tensors(model: ModelConfig) -> families.Family:
    """Return the tensors of OLMoE, Qwen2-MoE and Qwen3-MoE."""
    return _tensors(model, "mlp.", MATRICES)


TYPES = {
    "mixtral": ModelType(
        family="moe",
        architectures=("MixtralForCausalLM", "MixtralModel"),
        tensors=mixtral,
        settings={
            **decoder(vocab=32000, kv_heads=8, mlp=14336),
            "rms_norm_eps": Setting("norm_eps", 1e-5),
            "num_experts_per_tok": Setting("experts_per_token", 2),
            "num_local_experts": Setting("experts", 8, other="num_experts"),
            "router_aux_loss_coef": Setting("balance_loss", 0.001, factor=balance_losses),
        },
        allowed={**SILU, "router_jitter_noise": (0.0,)},
        implied={**ROUTED, "router_renormalize": True},
        maximum="max_position_embeddings",
        maximum_default=131072,
        window="all",
        window_default=None,
        theta=1e6,
    ),
    "olmoe": ModelType(
        family="moe",
        architectures=("OlmoeForCausalLM", "OlmoeModel"),
        tensors=tensors,
        settings={
            "vocab_size": Setting("vocab", 50304),
            "hidden_size": Setting("embed", 2048),
            "intermediate_size": Setting("mlp", 2048),
            "num_hidden_layers": Setting("layers", 16),
            "num_attention_heads": Setting("heads", 16),
            "num_key_value_heads": Setting("kv_heads", 0, null=0),
            "rms_norm_eps": Setting("norm_eps", 1e-5),
            "tie_word_embeddings": Setting("tied", False),
            "num_experts": Setting("experts", 64, other="num_local_experts"),
            "num_experts_per_tok": Setting("experts_per_token", 8),
            "norm_topk_prob": Setting("router_renormalize", False),
            "router_aux_loss_coef": Setting("balance_loss", 0.01, factor=balance_losses),
        },
        allowed={**SILU, **NO_BIAS, "clip_qkv": (None,)},
        implied={**ROUTED, "qk_norm": "full"},
        maximum="max_position_embeddings",
        maximum_default=4096,
    ),
    "qwen2_moe": ModelType(
        family="moe",
        architectures=("Qwen2MoeForCausalLM", "Qwen2MoeModel"),
        tensors=tensors,
        settings={
            **{key: setting for key, setting in decoder(151936, 16, 0).items() if key != "intermediate_size"},
            "hidden_size": Setting("embed", 2048),
            "num_hidden_layers": Setting("layers", 24),
            "num_attention_heads": Setting("heads", 16),
            "qkv_bias": Setting("qkv_bias", True),
            "moe_intermediate_size": Setting("expert_mlp", 1408),
            "shared_expert_intermediate_size": Setting("shared_experts", 5632, unit=lambda model: model.expert_size),
            "num_experts": Setting("experts", 60, other="num_local_experts"),
            "num_experts_per_tok": Setting("experts_per_token", 4),
            "norm_topk_prob": Setting("router_renormalize", False),
            "router_aux_loss_coef": Setting("balance_loss", 0.001, factor=balance_losses),
        },
        allowed={**SILU, **EXPERTS_IN_ALL_LAYERS},
        implied={**{knob: value for knob, value in ROUTED.items() if knob != "shared_experts"}, "shared_gate": True},
        maximum="max_position_embeddings",
        maximum_default=32768,
        unused=("intermediate_size",),
        window="unused",
    ),
    "qwen3_moe": ModelType(
        family="moe",
        architectures=("Qwen3MoeForCausalLM", "Qwen3MoeModel"),
        tensors=tensors,
        settings={
            **{key: setting for key, setting in decoder(151936, 4, 0).items() if key != "intermediate_size"},
            "hidden_size": Setting("embed", 2048),
            "num_hidden_layers": Setting("layers", 24),
            "moe_intermediate_size": Setting("expert_mlp", 768),
            "num_experts": Setting("experts", 128, other="num_local_experts"),
            "num_experts_per_tok": Setting("experts_per_token", 8),
            "norm_topk_prob": Setting("router_renormalize", False),
            "router_aux_loss_coef": Setting("balance_loss", 0.001, factor=balance_losses),
        },
        allowed={**SILU, **NO_BIAS, **EXPERTS_IN_ALL_LAYERS},
        implied={**ROUTED, "qk_norm": "head"},
        maximum="max_position_embeddings",
        maximum_default=32768,
        unused=("intermediate_size",),
        window="unused",
    ),
}
