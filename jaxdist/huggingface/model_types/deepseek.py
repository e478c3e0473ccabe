"""DeepSeek-V2 (2024) and V3 (2024; R1 has its form): latent attention, and experts that some groups are limited to."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from jaxdist.config import ModelConfig, matmuls
from jaxdist.config.stacks import first_layers, path_to, stacks_of
from jaxdist.huggingface import families
from jaxdist.huggingface.keys import ModelType, Setting
from jaxdist.huggingface.model_types.shared import NO_BIAS, ROUTED, SILU, decoder

SIZES = {
    **{key: one for key, one in decoder(vocab=102400, kv_heads=0, mlp=11008).items() if key != "head_dim"},
    "kv_lora_rank": Setting("kv_latent", 512),
    "q_lora_rank": Setting("q_latent", 1536, null=0),
    "qk_nope_head_dim": Setting("head_dim", 128),
    "qk_rope_head_dim": Setting("rope_dim", 64),
    "v_head_dim": Setting("value_dim", 128),
    "n_group": Setting("router_groups", 1, null=1),
    "topk_group": Setting("router_groups_kept", 1, null=1),
    "routed_scaling_factor": Setting("router_scale", 1.0),
    # Their loss of a row is ours; its coefficient has no other name, and version 5 of transformers does not compute it.
    "aux_loss_alpha": Setting("balance_loss", 0.0),
}

ALLOWED = {**SILU, **NO_BIAS, "mlp_bias": (False,), "seq_aux": (True,), "moe_layer_freq": (1,)}

DERIVED = ("head_dim", "qk_head_dim", "ep_size", "auto_map")
"""Keys of sizes that follow from others, of how devices share experts, and of code that computes what transformers
does."""

SAME = {key: value for key, value in ROUTED.items() if key not in ("router_scale", "shared_experts", "dense_layers")}


def tensors(model: ModelConfig) -> families.Family:
    """Return the tensors of DeepSeek-V2 and V3: latent attention, layers with an MLP first, experts for all tokens."""
    leaves = [
        families.one("table", "VD", "model.embed_tokens.weight", ("V", "D")),
        families.one("norm.scale", "D", "model.norm.weight", ("D",)),
    ]
    first = first_layers(model)
    for name, stack in stacks_of(model).items():
        own = matmuls.sizes_of(stack)
        for leaf in _of_layer(stack):
            pieces = tuple(replace(piece, first=first[name]) for piece in leaf.pieces)
            path = path_to(name) + leaf.path.removeprefix("blocks.")
            leaves.append(replace(leaf, path=path, pieces=pieces, own={**own, **leaf.own}))
    return families.with_output(model, leaves)


def _of_layer(stack: ModelConfig) -> Iterator[families.Leaf]:
    """Yield the tensors of a layer of a stack of DeepSeek."""
    attention = families.LAYER + "self_attn."
    mlp = families.LAYER + "mlp."
    parts = [part.name for matmul in matmuls.matmuls_of(stack).values() for part in matmul.parts]
    yield from families.norms(stack)
    yield from families.weights(stack, "attention", {name: attention + name for name in parts})
    yield families.one("blocks.attention.kv_norm.scale", "LZ", attention + "kv_a_layernorm.weight", ("Z",))
    if stack.q_latent:
        yield families.one("blocks.attention.q_norm.scale", "LA", attention + "q_a_layernorm.weight", ("A",))
    names = {name: mlp + name for name in ("gate_proj", "up_proj", "down_proj")}
    if not stack.traits.routed:
        yield from families.weights(stack, "mlp", names)
        return
    yield from families.experts(stack, mlp, {name: name for name in names}, "shared_experts")
    balance = families.Piece(mlp + "gate.e_score_correction_bias", ("E",), exact=True)
    yield families.Leaf("blocks.mlp.balance", "LE", (balance,) if stack.router == "sigmoid" else ())


TYPES = {
    "deepseek_v2": ModelType(
        family="moe",
        architectures=("DeepseekV2ForCausalLM", "DeepseekV2Model"),
        tensors=tensors,
        settings={
            **SIZES,
            "first_k_dense_replace": Setting("dense_layers", 0),
            "n_routed_experts": Setting("experts", 64, other="num_experts"),
            "n_shared_experts": Setting("shared_experts", 2),
            "num_experts_per_tok": Setting("experts_per_token", 6),
            "moe_intermediate_size": Setting("expert_mlp", 1407),
            "topk_method": Setting(
                "router_group_score", "greedy", values={"greedy": "none", "group_limited_greedy": "best"}
            ),
        },
        allowed={**ALLOWED, "scoring_func": ("softmax",), "norm_topk_prob": (False,)},
        implied={**SAME, "router_renormalize": False, "rope_pairs": "neighbours"},
        maximum="max_position_embeddings",
        maximum_default=2048,
        unused=DERIVED,
    ),
    "deepseek_v3": ModelType(
        family="moe",
        architectures=("DeepseekV3ForCausalLM", "DeepseekV3Model"),
        tensors=tensors,
        settings={
            **SIZES,
            "vocab_size": Setting("vocab", 129280),
            "hidden_size": Setting("embed", 7168),
            "intermediate_size": Setting("mlp", 18432),
            "num_hidden_layers": Setting("layers", 61),
            "num_attention_heads": Setting("heads", 128),
            "num_key_value_heads": Setting("kv_heads", 128, null=0),
            "first_k_dense_replace": Setting("dense_layers", 3),
            "n_routed_experts": Setting("experts", 256, other="num_local_experts"),
            "n_shared_experts": Setting("shared_experts", 1),
            "num_experts_per_tok": Setting("experts_per_token", 8),
            "moe_intermediate_size": Setting("expert_mlp", 2048),
            "n_group": Setting("router_groups", 8, null=1),
            "topk_group": Setting("router_groups_kept", 4, null=1),
            "routed_scaling_factor": Setting("router_scale", 2.5),
            "norm_topk_prob": Setting("router_renormalize", True),
            "rope_interleave": Setting("rope_pairs", True, values={True: "neighbours", False: "halves"}),
        },
        allowed={**ALLOWED, "scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)},
        implied={
            **{key: value for key, value in SAME.items() if key != "balance_rate"},
            **{"router": "sigmoid", "router_group_score": "best-two"},
        },
        maximum="max_position_embeddings",
        maximum_default=4096,
        # The layers of multi-token prediction, which stand behind the others, are not read.
        unused=(*DERIVED, "num_nextn_predict_layers", "num_mtp_layers"),
    ),
}
