"""List every known key of `config.json`: the knob that it sets, the values that are computed, or that it has no effect.

A key that is not listed here is refused: it may change what a model computes. Names and defaults are those of the
configuration classes of transformers 4.40 to 5.24.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from jaxdist.config import FAMILIES, ModelConfig


@dataclass(frozen=True)
class Setting:
    """A key that sets a knob of `model`."""

    knob: str
    default: Any
    """The value where the key is absent, as in transformers."""
    null: Any = None
    """The value that null stands for; None where null is not valid, but as false where that is the default."""
    other: str = ""
    """Another name of the key, which some versions of transformers write."""
    factor: Callable[[ModelConfig], float] | None = None
    """What their value must be multiplied by, to be ours."""


@dataclass(frozen=True)
class ModelType:
    """A `model_type` of transformers."""

    family: str
    """The value of `model.family`."""
    architectures: tuple[str, ...]
    settings: dict[str, Setting]
    allowed: dict[str, tuple[Any, ...]]
    """Keys of which only these values are computed here; the first is the default."""
    implied: dict[str, Any]
    """Knobs of `model` that the type itself sets."""
    maximum: str
    """The key with the longest sequence."""
    maximum_default: int
    window: Literal["none", "unused", "all", "some"] = "none"
    """Which layers may have the window of `sliding_window`; some: those that `LAYERED_WINDOW` says.

    unused: the keys are there, and no layer has it.
    """
    window_default: int | None = 4096
    """The window where the key is absent and layers may have one."""
    theta: float = 10_000.0
    """The base of rotary positions where none is given."""
    unused: tuple[str, ...] = ()
    """Keys that have no effect in this type."""

    @property
    def rotary(self) -> bool:
        """Whether positions are rotary."""
        return FAMILIES[self.family].rotary


ROPE = ("rope_theta", "rope_scaling", "rope_parameters")
"""Keys of rotary positions, which `rope.py` reads."""

WINDOW = ("sliding_window", "layer_types")
"""Keys of the sliding window, which `model_config.py` reads."""

LAYERED_WINDOW = ("use_sliding_window", "max_window_layers")
"""Further keys of the sliding window, of types in which some layers may have it."""

FIRST_WINDOWED = 28
"""The default of `max_window_layers`: how many layers have no window."""


def _decoder(vocab: int, kv_heads: int, mlp: int, head_dim: int = 0) -> dict[str, Setting]:
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


def _balance_losses(model: ModelConfig) -> float:
    """Return the factor of their coefficient of the load-balancing loss.

    Where the load is even, their loss is k, the mean over layers. Ours is 1 in each layer, and layers are added up.
    """
    return model.experts_per_token / model.layers


ROUTED = {"balance_rate": 0.0, "router": "softmax", "router_scale": 1.0, "shared_experts": 0}
"""Knobs of all types with experts: none has a bias that balances them."""

SILU = {"hidden_act": ("silu", "swish")}
NO_BIAS = {"attention_bias": (False,)}

MODEL_TYPES = {
    "llama": ModelType(
        family="llama",
        architectures=("LlamaForCausalLM", "LlamaModel", "LLaMAForCausalLM"),
        settings=_decoder(vocab=32000, kv_heads=0, mlp=11008),
        allowed={**SILU, **NO_BIAS, "mlp_bias": (False,)},
        implied={},
        maximum="max_position_embeddings",
        maximum_default=2048,
    ),
    "mistral": ModelType(
        family="llama",
        architectures=("MistralForCausalLM", "MistralModel"),
        settings=_decoder(vocab=32000, kv_heads=8, mlp=14336),
        allowed=SILU,
        implied={},
        maximum="max_position_embeddings",
        maximum_default=131072,
        window="all",
    ),
    "qwen2": ModelType(
        family="llama",
        architectures=("Qwen2ForCausalLM", "Qwen2Model"),
        settings=_decoder(vocab=151936, kv_heads=32, mlp=22016),
        allowed=SILU,
        implied={"qkv_bias": True},
        maximum="max_position_embeddings",
        maximum_default=32768,
        window="some",
    ),
    "qwen3": ModelType(
        family="llama",
        architectures=("Qwen3ForCausalLM", "Qwen3Model"),
        settings=_decoder(vocab=151936, kv_heads=32, mlp=22016, head_dim=128),
        allowed={**SILU, **NO_BIAS},
        implied={"qk_norm": "head"},
        maximum="max_position_embeddings",
        maximum_default=32768,
        window="some",
    ),
    "mixtral": ModelType(
        family="moe",
        architectures=("MixtralForCausalLM", "MixtralModel"),
        settings={
            **_decoder(vocab=32000, kv_heads=8, mlp=14336),
            "rms_norm_eps": Setting("norm_eps", 1e-5),
            "num_experts_per_tok": Setting("experts_per_token", 2),
            "num_local_experts": Setting("experts", 8, other="num_experts"),
            "router_aux_loss_coef": Setting("balance_loss", 0.001, factor=_balance_losses),
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
            "router_aux_loss_coef": Setting("balance_loss", 0.01, factor=_balance_losses),
        },
        allowed={**SILU, **NO_BIAS, "clip_qkv": (None,)},
        implied={**ROUTED, "qk_norm": "full"},
        maximum="max_position_embeddings",
        maximum_default=4096,
    ),
    "qwen3_moe": ModelType(
        family="moe",
        architectures=("Qwen3MoeForCausalLM", "Qwen3MoeModel"),
        settings={
            **{key: setting for key, setting in _decoder(151936, 4, 0).items() if key != "intermediate_size"},
            "hidden_size": Setting("embed", 2048),
            "num_hidden_layers": Setting("layers", 24),
            "moe_intermediate_size": Setting("expert_mlp", 768),
            "num_experts": Setting("experts", 128, other="num_local_experts"),
            "num_experts_per_tok": Setting("experts_per_token", 8),
            "norm_topk_prob": Setting("router_renormalize", False),
            "router_aux_loss_coef": Setting("balance_loss", 0.001, factor=_balance_losses),
        },
        allowed={
            **SILU,
            **NO_BIAS,
            "decoder_sparse_step": (1,),
            "mlp_only_layers": ([],),
            # Versions 4 and 5 of transformers give it to other layers.
            "use_sliding_window": (False,),
        },
        implied={**ROUTED, "qk_norm": "head"},
        maximum="max_position_embeddings",
        maximum_default=32768,
        # The width of layers without experts, of which there are none.
        unused=("intermediate_size",),
        window="unused",
    ),
    "gpt2": ModelType(
        family="gpt",
        architectures=("GPT2LMHeadModel", "GPT2Model"),
        settings={
            "vocab_size": Setting("vocab", 50257),
            "n_positions": Setting("positions", 1024),
            "n_embd": Setting("embed", 768),
            "n_layer": Setting("layers", 12),
            "n_head": Setting("heads", 12),
            "n_inner": Setting("mlp", 0, null=0),
            "layer_norm_epsilon": Setting("norm_eps", 1e-5),
            "tie_word_embeddings": Setting("tied", True),
        },
        allowed={
            "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
            "scale_attn_weights": (True,),
            "scale_attn_by_inverse_layer_idx": (False,),
        },
        implied={},
        maximum="n_positions",
        maximum_default=1024,
    ),
}
"""The types that can be read and written, by their names in `model_type`."""

OFF: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "rope_interleaved": (False,),
    "use_mrope": (False,),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "cross_attention_hidden_size": (None,),
    "pruned_heads": ({},),
    "quantization_config": (None,),
    "compression_config": (None,),
    "auto_map": (None,),
    "partial_rotary_factor": (1.0, None),
    "logit_scale": (1.0, None),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "attention_multiplier": (None,),
    "embedding_multiplier": (1.0, None),
    "residual_multiplier": (1.0, None),
    "logits_scaling": (1.0, None),
    "bias": (False,),
    "use_bias": (False,),
    "use_qk_norm": (False,),
    "qk_layernorm": (False,),
    "alibi": (False,),
    "num_nextn_predict_layers": (0, None),
}
"""Keys of all types that must be off: anything else would change what the model computes.

Null stands for off too, here and in `ModelType.allowed`, where off is false, 0 or empty: all versions of transformers
that take it compute that.
"""

ADVICE = {
    "quantization_config": "give the weights that are not quantized",
    "compression_config": "give the weights that are not quantized",
    "auto_map": "a model with code of its own cannot be read",
}
"""What to do about a value that is not allowed, where it is not to take another model."""

ALIKE = "only some layers have experts then, and all layers must be alike"
LATENT = "multi-head latent attention (MLA) is not computed"
GROUPS = "routing to some groups of experts alone (node-limited routing) is not computed"
SHARED = "experts that every token goes through are not read"

REASONS = {
    "first_k_dense_replace": ALIKE,
    "moe_layer_freq": ALIKE,
    "decoder_sparse_step": ALIKE,
    "mlp_only_layers": ALIKE,
    "kv_lora_rank": LATENT,
    "q_lora_rank": LATENT,
    "n_group": GROUPS,
    "topk_group": GROUPS,
    "n_shared_experts": SHARED,
    "shared_expert_intermediate_size": SHARED,
}
"""Why keys of other models with experts are refused."""

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "first_k_dense_replace": (0,),
    "moe_layer_freq": (1,),
    "decoder_sparse_step": (1,),
    "mlp_only_layers": ([],),
    "n_group": (1,),
    "topk_group": (1,),
    "n_shared_experts": (0,),
    "shared_expert_intermediate_size": (0,),
}
"""The values of these keys that say what holds here anyway: layers are alike, and experts form one group."""

TRAINING = (
    "attention_dropout",
    "attn_pdrop",
    "embd_pdrop",
    "resid_pdrop",
    "gradient_checkpointing",
    "hidden_dropout",
    "initializer_range",
    "neftune_noise_alpha",
    "pretraining_tp",
    "reorder_and_upcast_attn",
)
"""Keys of how transformers trains or computes a model: a run says this itself (`model.dropout`, `precision`)."""

NAMES = (
    "_name_or_path",
    "_num_labels",
    "architectures",
    "dtype",
    "finetuning_task",
    "id2label",
    "is_llama_config",
    "label2id",
    "max_sequence_length",
    "model_type",
    "n_ctx",
    "name_or_path",
    "prefix",
    "problem_type",
    "task_specific_params",
    "tokenizer_class",
    "torch_dtype",
    "transformers.js_config",
    "transformers_version",
    "unsloth_fixed",
    "unsloth_version",
)
"""Keys that describe a model or its origin."""

TOKENS = (
    "bos_token_id",
    "decoder_start_token_id",
    "eos_token_id",
    "pad_token_id",
    "sep_token_id",
    "unk_token_id",
)
"""Ids of tokens, which the tokenizer's files are asked for."""

OUTPUTS = (
    "_attn_implementation",
    "_attn_implementation_autoset",
    "_attn_implementation_internal",
    "attn_implementation",
    "cache_implementation",
    "chunk_size_feed_forward",
    "is_decoder",
    "keys_to_ignore_at_inference",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "output_past",
    "output_scores",
    "return_dict",
    "return_dict_in_generate",
    "summary_activation",
    "summary_first_dropout",
    "summary_proj_to_labels",
    "summary_type",
    "summary_use_proj",
    "tf_legacy_loss",
    "tie_encoder_decoder",
    "torchscript",
    "use_bfloat16",
    "use_cache",
)
"""Keys of what transformers returns or stores beside the logits."""

GENERATION = (
    "bad_words_ids",
    "begin_suppress_tokens",
    "diversity_penalty",
    "do_sample",
    "early_stopping",
    "encoder_no_repeat_ngram_size",
    "exponential_decay_length_penalty",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "length_penalty",
    "max_length",
    "max_new_tokens",
    "min_length",
    "no_repeat_ngram_size",
    "num_beam_groups",
    "num_beams",
    "num_return_sequences",
    "remove_invalid_values",
    "repetition_penalty",
    "suppress_tokens",
    "temperature",
    "top_k",
    "top_p",
    "typical_p",
)
"""Keys of how transformers samples text."""

NO_EFFECT = frozenset([*TRAINING, *NAMES, *TOKENS, *OUTPUTS, *GENERATION])
"""Keys of all types that do not change the logits."""
