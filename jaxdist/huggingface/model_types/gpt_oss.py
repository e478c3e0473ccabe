"""gpt-oss (OpenAI 2025): experts with biases and a clamped SwiGLU, sinks, and a window in every other layer."""

from __future__ import annotations

from jaxdist.config import ModelConfig
from jaxdist.config.activation_numbers import SWIGLU_LIMIT, SWIGLU_SLOPE
from jaxdist.huggingface import families
from jaxdist.huggingface.keys import ModelType, Setting
from jaxdist.huggingface.model_types.shared import ROUTED, SILU, balance_losses, decoder


def tensors(model: ModelConfig) -> families.Family:
    """Return the tensors of gpt-oss: those of all experts are one, where gates and what they gate take turns."""
    mlp = families.LAYER + "mlp."
    experts = mlp + "experts."
    leaves = [
        *families.decoder(model),
        families.one("blocks.attention.sinks", "LKCI", families.LAYER + "self_attn.sinks", ("KGI",)),
        families.one("blocks.mlp.router", "LDE", mlp + "router.weight", ("E", "D")),
        families.one("blocks.mlp.router_bias", "LE", mlp + "router.bias", ("E",)),
        families.one("blocks.mlp.gate_up", "LEDPF", experts + "gate_up_proj", ("E", "D", "FP")),
        families.one("blocks.mlp.gate_up_bias", "LEPF", experts + "gate_up_proj_bias", ("E", "FP")),
        families.one("blocks.mlp.down", "LEFD", experts + "down_proj", ("E", "F", "D")),
        families.one("blocks.mlp.down_bias", "LED", experts + "down_proj_bias", ("E", "D")),
        families.Leaf("blocks.mlp.balance", "LE", ()),
    ]
    return families.with_output(model, leaves)


TYPES = {
    "gpt_oss": ModelType(
        family="moe",
        architectures=("GptOssForCausalLM", "GptOssModel"),
        tensors=tensors,
        settings={
            **decoder(vocab=201088, kv_heads=8, mlp=2880, head_dim=64),
            "hidden_size": Setting("embed", 2880),
            "num_hidden_layers": Setting("layers", 36),
            "num_attention_heads": Setting("heads", 64),
            "rms_norm_eps": Setting("norm_eps", 1e-5),
            "attention_bias": Setting("qkv_bias", True, also=("out_bias",)),
            "num_experts_per_tok": Setting("experts_per_token", 4, other="experts_per_token"),
            "num_local_experts": Setting("experts", 128, other="num_experts"),
            "router_aux_loss_coef": Setting("balance_loss", 0.001, factor=balance_losses),
        },
        allowed={**SILU, "swiglu_limit": (SWIGLU_LIMIT,), "swiglu_alpha": (SWIGLU_SLOPE,)},
        implied={
            **ROUTED,
            "router_renormalize": True,
            "mlp_bias": True,
            "sinks": True,
            "activation": "clamped-swiglu",
        },
        maximum="max_position_embeddings",
        maximum_default=131072,
        window="listed",
        window_default=128,
        full_every=2,
        theta=150_000.0,
        scaling="yarn,factor=32,original=4096,truncate=no",
        quantized=("mxfp4",),
        # The longest sequence of the first part of its training, which its scaling says too.
        unused=("initial_context_length",),
    ),
}
