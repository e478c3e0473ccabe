"""List every known key of `config.json`: the knob that it sets, the values that are computed, or that it has no effect.

A key that is not listed here is refused: it may change what a model computes. Names and defaults are those of the
configuration classes of transformers 4.40 to 5.24.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from jaxdist.config import FAMILIES, ModelConfig
from jaxdist.huggingface.families import Family, llama


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
    unit: Callable[[ModelConfig], int] | None = None
    """How many of theirs one of ours is; their value must be a multiple of it."""
    power: float = 1.0
    """To which power their value, above 0, must be raised to be ours."""
    also: tuple[str, ...] = ()
    """Further knobs that get the same value."""
    values: Mapping[Any, Any] = field(default_factory=dict)
    """Their values, and ours for each; others are refused. Empty: ours are theirs. Of several with the same value, the
    first is written."""

    def theirs(self, value: Any) -> Any:
        """Return their value for one of ours."""
        if self.null is not None and value == self.null:
            return None
        if self.power != 1:
            # Without the last bits, which another power does not give back.
            theirs = float(f"{value ** (1 / self.power):.12g}")
            return int(theirs) if theirs == int(theirs) else theirs
        return next((theirs for theirs, ours in self.values.items() if ours == value), value)


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
    tensors: Callable[[ModelConfig], Family] = llama
    """The tensors of a model of the type; those of Llama, where it names them so."""
    window: Literal["none", "unused", "all", "some", "listed"] = "none"
    """Which layers may have the window of `sliding_window`; some: those that `LAYERED_WINDOW` says, or `layer_types`;
    listed: those that `layer_types` says.

    unused: the keys are there, and no layer has it.
    """
    full_every: int = 0
    """Of listed: each of so many layers has no window, where `layer_types` is absent."""
    nope_every: int = 0
    """Each of so many layers has no rotary positions, where `NOPE` keys are absent; 0: the type has no such keys."""
    own_sliding_rope: bool = False
    """Whether layers with a window have rotary positions of their own, without the scaling of the others."""
    sliding_theta: float = 0.0
    """Their base where none is given; 0: that of the others."""
    sliding_theta_name: str = ""
    """The key of their base beside `rope_parameters`; empty: the type has none."""
    full_every_names: tuple[str, ...] = ()
    """The keys of `full_every`, which have no effect beside `layer_types`."""
    window_default: int | None = 4096
    """The window where the key is absent and layers may have one."""
    theta: float = 10_000.0
    """The base of rotary positions where none is given."""
    scaling: str = "none"
    """The scaling of rotary positions where no key of them is given."""
    rotary_fraction: float | None = None
    """The fraction of a head that is turned where none is given; None: all of it, and no key says another."""
    rotary_names: tuple[str, str] = ("rope_theta", "partial_rotary_factor")
    """The keys of the base, and of the fraction, beside `rope_parameters`."""
    unused: tuple[str, ...] = ()
    """Keys that have no effect in this type."""
    quantized: tuple[str, ...] = ()
    """The values of `quant_method` in `quantization_config` with which its weights are read."""

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

NOPE = ("no_rope_layers", "no_rope_layer_interval")
"""Keys of layers without rotary positions."""

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
    "lm_head_bias": (False,),
    "full_attn_mod": (1, None),
    "interpolate_factor": (1, None),
}
"""Keys of all types that must be off: anything else would change what the model computes.

Null stands for off too, here and in `ModelType.allowed`, where off is false, 0 or empty: all versions of transformers
that take it compute that.
"""

UNQUANTIZED = (
    "name the folder of the model before it was quantized, or load this one with transformers, call its dequantize() "
    "and save_pretrained(), and name that folder"
)

ADVICE = {
    "quantization_config": f"{UNQUANTIZED}; DeepSeek's weights become bfloat16 by its own inference/fp8_cast_bf16.py",
    "compression_config": UNQUANTIZED,
    "auto_map": "a model with code of its own cannot be read",
}
"""What to do about a value that is not allowed, where it is not to take another model."""

ALIKE = "some layers have experts then and others an MLP, which is not read from a folder"
LATENT = "multi-head latent attention (MLA) is read of DeepSeek-V2 and V3 alone"
GROUPS = "routing to some groups of experts (node-limited routing) is read of DeepSeek-V2 and V3 alone"
SHARED = "experts that every token goes through are read of Qwen 2 MoE, DeepSeek-V2 and V3 alone"

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
    "text_config": "the language model inside a model of images and text is not read, only one in a folder of its own",
}
"""Why keys of other models are refused."""

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
    "attention_probs_dropout_prob",
    "attn_pdrop",
    "classifier_dropout",
    "embd_pdrop",
    "resid_pdrop",
    "gradient_checkpointing",
    "hidden_dropout",
    "hidden_dropout_prob",
    "initializer_factor",
    "initializer_range",
    "neftune_noise_alpha",
    "pretraining_tp",
    "reorder_and_upcast_attn",
)
"""Keys of how transformers trains or computes a model: a run says this itself (`model.dropout`, `precision`)."""

NAMES = (
    "_commit_hash",
    "_name_or_path",
    "_num_labels",
    "auto_model_class",
    "base_model_name_or_path",
    "architectures",
    "dtype",
    "finetuning_task",
    "id2label",
    "is_llama_config",
    "label2id",
    "max_sequence_length",
    "model_max_length",
    "model_name",
    "model_type",
    "n_ctx",
    "name_or_path",
    "prefix",
    "problem_type",
    "task_specific_params",
    "tokenizer_class",
    "tokenizer_model_max_length",
    "tokenizer_padding_side",
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
    "_flash_attn_2_enabled",
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
    "use_flash_attention",
    "use_flash_attention_2",
)
"""Keys of what transformers returns or stores beside the logits."""

GENERATION = (
    "bad_words_ids",
    "badwordsids",
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
