"""`config.json` becomes values of `model`, or is refused by the names of its keys; and values become `config.json`."""

import json
from pathlib import Path

import pytest

from jaxdist.config import ModelConfig, RequestError
from jaxdist.huggingface.folder import Folder
from jaxdist.huggingface.keys import NEUTRAL, OFF, REASONS
from jaxdist.huggingface.model_config import differing, longest_sequence, model_values, to_json
from jaxdist.huggingface.model_types import MODEL_TYPES
from jaxdist.huggingface.type_choice import family_of, type_for
from tests.huggingface import configs
from tests.huggingface.configs import LLAMA3, refusal, small, values

GOLDEN = Path(__file__).parent / "golden"
ROUTED_TYPES = [name for name, kind in MODEL_TYPES.items() if kind.family == "moe"]


PUBLISHED = {
    "LLAMA_1_7B": dict(norm_eps=1e-6, kv_heads=0, rope_theta=1e4, tied=False, head_dim=0),
    "LLAMA_2_7B": dict(embed=4096, mlp=11008, kv_heads=32, norm_eps=1e-5, rope_theta=1e4, rope_scaling="none"),
    "LLAMA_31_8B": dict(rope_theta=5e5, rope_scaling="llama3,factor=8,original=8192", kv_heads=8, vocab=128256),
    "LLAMA_32_1B": dict(rope_scaling="llama3,factor=32,original=8192", head_dim=64, tied=True, layers=16),
    "MISTRAL_7B": dict(window=4096, kv_heads=8, rope_theta=1e4, norm_eps=1e-5),
    "MISTRAL_NEMO": dict(window=0, head_dim=128, embed=5120, heads=32, rope_theta=1e6),
    "QWEN_25_05B": dict(qkv_bias=True, window=0, norm_eps=1e-6, tied=True, heads=14, kv_heads=2, rope_theta=1e6),
    "QWEN_3_06B": dict(qk_norm="head", head_dim=128, embed=1024, heads=16, window=0, tied=True),
    "MIXTRAL_8X7B": dict(
        family="moe", embed=4096, layers=32, heads=32, kv_heads=8, head_dim=0, mlp=14336, experts=8,
        experts_per_token=2, router_renormalize=True, window=0, norm_eps=1e-5, rope_theta=1e6, tied=False,
        balance_rate=0, balance_loss=0.02 * 2 / 32,
    ),
    "OLMOE_1B_7B": dict(
        family="moe", embed=2048, layers=16, heads=16, kv_heads=16, mlp=1024, experts=64, experts_per_token=8,
        router_renormalize=False, qk_norm="full", norm_eps=1e-5, rope_theta=1e4, balance_loss=0.01 * 8 / 16,
    ),
    "QWEN_3_30B_A3B": dict(
        family="moe", embed=2048, layers=48, heads=32, kv_heads=4, head_dim=128, expert_mlp=768, experts=128,
        experts_per_token=8, router_renormalize=True, qk_norm="head", window=0, norm_eps=1e-6, rope_theta=1e6,
        balance_loss=0.001 * 8 / 48,
    ),
    "QWEN_15_MOE_A27B": dict(
        family="moe", embed=2048, layers=24, heads=16, kv_heads=16, expert_mlp=1408, experts=60, experts_per_token=4,
        shared_experts=4, shared_gate=True, router_renormalize=False, qkv_bias=True, window=0,
        balance_loss=0.001 * (4 / 24),
    ),
    "DEEPSEEK_V2": dict(
        family="moe", embed=5120, layers=60, heads=128, mlp=12288, dense_layers=1, experts=160, experts_per_token=6,
        expert_mlp=1536, shared_experts=2, router="softmax", router_group_score="best", router_groups=8,
        router_groups_kept=3, router_scale=16, router_renormalize=False, balance_loss=0.001, balance_rate=0,
        q_latent=1536, kv_latent=512, head_dim=128, rope_dim=64, value_dim=128, rope_pairs="neighbours",
        rope_scaling="yarn,factor=40,original=4096,mscale=0.70699999999999996,mscale_all=0.70699999999999996",
    ),
    "DEEPSEEK_V2_LITE": dict(q_latent=0, router_group_score="none", experts=64, layers=27, embed=2048, expert_mlp=1408),
    "DEEPSEEK_R1_IN_BFLOAT16": dict(
        family="moe", embed=7168, layers=61, heads=128, mlp=18432, dense_layers=3, experts=256, experts_per_token=8,
        expert_mlp=2048, shared_experts=1, router="sigmoid", router_group_score="best-two", router_groups=8,
        router_groups_kept=4, router_scale=2.5, router_renormalize=True, q_latent=1536, kv_latent=512, head_dim=128,
        rope_scaling="yarn,factor=40,original=4096,mscale=1,mscale_all=1", vocab=129280, tied=False,
    ),
    "GPT_2": dict(family="gpt", positions=1024, embed=768, layers=12, heads=12, mlp=0, tied=True, norm_eps=1e-5),
    "SMOLLM_2_135M": dict(embed=576, heads=9, kv_heads=3, rope_theta=100000, tied=True, vocab=49152),
    "TINYLLAMA": dict(embed=2048, kv_heads=4, layers=22, mlp=5632, tied=False),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_gives_its_model(name):
    found = values(getattr(configs, name))
    assert {knob: found[knob] for knob in PUBLISHED[name]} == PUBLISHED[name]
    assert "sequence" not in found
    ModelConfig(**found)


# fmt: off
DEFAULTS = {
    "llama": dict(vocab=32000, embed=4096, mlp=11008, layers=32, heads=32, kv_heads=0, norm_eps=1e-6, tied=False),
    "mistral": dict(vocab=32000, mlp=14336, kv_heads=8, norm_eps=1e-6, tied=False, window=4096, rope_theta=1e4),
    "qwen2": dict(vocab=151936, mlp=22016, kv_heads=32, norm_eps=1e-6, tied=False, window=0, qkv_bias=True),
    "qwen3": dict(vocab=151936, mlp=22016, head_dim=128, norm_eps=1e-6, tied=False, window=0, qk_norm="head"),
    "olmo2": dict(vocab=50304, mlp=11008, kv_heads=0, norm_eps=1e-5, norms="after", qk_norm="full", rope_theta=1e4),
    "olmo3": dict(
        vocab=50304, norm_eps=1e-5, window=4096, period="sliding,sliding,sliding,full", rope_theta=5e5, sliding_theta=0
    ),
    "smollm3": dict(
        vocab=128256, embed=2048, layers=36, heads=16, kv_heads=4, window=0, period="full,full,full,full-nope",
        rope_theta=2e6, tied=True,
    ),
    "granite": dict(
        vocab=32000, kv_heads=0, norm_eps=1e-6, embedding_multiplier=1, residual_multiplier=1, attention_multiplier=1,
        logits_divisor=1, mlp_bias=False, out_bias=False,
    ),
    "gpt_neox": dict(
        vocab=50432, embed=6144, mlp=24576, layers=44, heads=64, norm="layer", gate="off", activation="gelu-erf",
        residual="parallel", rotary_fraction=0.25, qkv_bias=True, out_bias=True, mlp_bias=True, norm_eps=1e-5,
    ),
    "apertus": dict(
        vocab=131072, mlp=14336, kv_heads=0, norm_eps=1e-5, activation="xielu", gate="off", qk_norm="head",
        rope_theta=1.2e7, rope_scaling="llama3,factor=8,original=8192",
    ),
    "starcoder2": dict(
        vocab=49152, embed=3072, mlp=12288, layers=30, heads=24, kv_heads=2, norm="layer", gate="off", window=0,
        activation="gelu", qkv_bias=True, out_bias=True, mlp_bias=True, norm_eps=1e-5, tied=True, rope_theta=1e4,
    ),
    "gemma": dict(
        family="gemma", vocab=256000, embed=3072, mlp=24576, layers=28, heads=16, kv_heads=16, head_dim=256, tied=True,
        norm_eps=1e-6, rope_theta=1e4,
    ),
    "gemma2": dict(
        embed=2304, layers=26, heads=8, kv_heads=4, head_dim=256, norms="both", attention_multiplier=1 / 16,
        window=4096, period="sliding,full", attention_cap=50, logit_cap=30, rope_theta=1e4,
    ),
    "gemma3_text": dict(
        vocab=262208, norms="both", qk_norm="head", attention_cap=0, logit_cap=0, window=4096, rope_theta=1e6,
        period="sliding,sliding,sliding,sliding,sliding,full", sliding_theta=1e4, rope_scaling="none",
    ),
    "phi3": dict(vocab=32064, embed=3072, mlp=8192, layers=32, heads=32, kv_heads=0, norm_eps=1e-5, window=0),
    "mixtral": dict(vocab=32000, mlp=14336, kv_heads=8, norm_eps=1e-5, window=0, rope_theta=1e6, experts=8, embed=4096),
    "granitemoe": dict(vocab=32000, kv_heads=0, norm_eps=1e-6, experts=8, experts_per_token=2, attention_multiplier=1),
    "gpt_oss": dict(
        vocab=201088, embed=2880, mlp=2880, layers=36, heads=64, kv_heads=8, head_dim=64, norm_eps=1e-5, tied=False,
        experts=128, experts_per_token=4, qkv_bias=True, out_bias=True, mlp_bias=True, sinks=True, window=128,
        period="sliding,full", activation="clamped-swiglu", rope_theta=150_000,
        rope_scaling="yarn,factor=32,original=4096,truncate=no", router_renormalize=True,
    ),
    "olmoe": dict(vocab=50304, mlp=2048, kv_heads=0, norm_eps=1e-5, rope_theta=1e4, experts=64, experts_per_token=8),
    "qwen2_moe": dict(
        vocab=151936, embed=2048, layers=24, heads=16, kv_heads=16, expert_mlp=1408, shared_experts=4, experts=60,
        shared_gate=True, qkv_bias=True, norm_eps=1e-6,
    ),
    "qwen3_moe": dict(vocab=151936, expert_mlp=768, kv_heads=4, norm_eps=1e-6, head_dim=0, layers=24, experts=128),
    "deepseek_v2": dict(
        vocab=102400, embed=4096, layers=32, heads=32, kv_heads=0, mlp=11008, expert_mlp=1407, dense_layers=0,
        kv_latent=512, q_latent=1536, experts=64, shared_experts=2, router_groups=1, router_group_score="none",
    ),
    "deepseek_v3": dict(
        vocab=129280, embed=7168, layers=61, heads=128, mlp=18432, expert_mlp=2048, dense_layers=3, head_dim=128,
        kv_latent=512, q_latent=1536, rope_dim=64, value_dim=128, experts=256, shared_experts=1, router_groups=8,
        router_groups_kept=4, experts_per_token=8, router_scale=2.5, router_renormalize=True, rope_pairs="neighbours",
    ),
    "gpt2": dict(vocab=50257, embed=768, layers=12, heads=12, mlp=0, positions=1024, norm_eps=1e-5, tied=True),
}
# fmt: on


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_an_absent_key_has_the_default_of_transformers(model_type):
    found = values(dict(model_type=model_type))
    assert {knob: found[knob] for knob in DEFAULTS[model_type]} == DEFAULTS[model_type]


LONGEST = {
    "llama": 2048,
    "mistral": 131072,
    "qwen2": 32768,
    "qwen3": 32768,
    "olmo2": 2048,
    "olmo3": 2048,
    "smollm3": 32768,
    "granite": 2048,
    "gpt_neox": 2048,
    "apertus": 65536,
    "starcoder2": 4096,
    "gemma": 8192,
    "gemma2": 8192,
    "gemma3_text": 131072,
    "phi3": 4096,
    "mixtral": 131072,
    "granitemoe": 2048,
    "gpt_oss": 131072,
    "olmoe": 4096,
    "qwen2_moe": 32768,
    "qwen3_moe": 32768,
    "deepseek_v2": 2048,
    "deepseek_v3": 4096,
    "gpt2": 1024,
}


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_the_longest_sequence_has_the_default_of_transformers(model_type):
    folder = Folder(Path("model"), dict(model_type=model_type))
    assert longest_sequence(folder, model_values(folder)) == LONGEST[model_type]


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_a_small_config_is_accepted(model_type):
    assert values(small(model_type))["embed"] == 64


OTHER_VALUES = [
    ("llama", "model_type", "gemma3"),
    ("gemma", "hidden_act", "silu"),
    ("gemma", "hidden_activation", "gelu"),
    ("gemma2", "hidden_activation", "gelu"),
    ("gemma2", "query_pre_attn_scalar", 0),
    ("gemma2", "query_pre_attn_scalar", "24"),
    ("gemma2", "attn_logit_softcapping", -1.0),
    ("gemma3_text", "use_bidirectional_attention", True),
    ("gemma3_text", "sliding_window_pattern", 0),
    ("gpt_oss", "hidden_act", "gelu"),
    ("gpt_oss", "swiglu_limit", 5.0),
    ("gpt_oss", "swiglu_alpha", 1.0),
    ("gpt_oss", "quantization_config", {"quant_method": "fp8"}),
    ("qwen3", "quantization_config", {"quant_method": "mxfp4"}),
    ("phi3", "hidden_act", "gelu"),
    ("phi3", "sliding_window", 0),
    ("phi3", "lm_head_bias", True),
    ("phi3", "full_attn_mod", 2),
    ("phi3", "interpolate_factor", 4),
    ("llama", "hidden_act", "gelu"),
    ("mistral", "hidden_act", "relu"),
    ("qwen2", "hidden_act", "gelu_new"),
    ("qwen3", "hidden_act", "gelu"),
    ("gpt2", "activation_function", "gelu"),
    ("gpt2", "activation_function", "relu"),
    ("mistral", "attention_bias", True),
    ("qwen2", "attention_bias", True),
    ("llama", "sliding_window", 8),
    ("gpt2", "sliding_window", 8),
    ("mistral", "sliding_window", 0),
    ("mistral", "sliding_window", "all"),
    ("llama", "layer_types", ["full_attention", "sliding_attention"]),
    ("mistral", "layer_types", ["sliding_attention", "full_attention"]),
    ("qwen3", "layer_types", ["full_attention", "linear_attention"]),
    ("qwen3", "layer_types", ["full_attention"]),
    ("qwen2", "layer_types", "full_attention"),
    ("qwen2", "max_window_layers", "two"),
    ("llama", "max_window_layers", 2),
    ("llama", "head_dim", "8"),
    ("llama", "hidden_size", None),
    ("llama", "hidden_size", 64.5),
    ("llama", "num_hidden_layers", 0),
    ("llama", "num_hidden_layers", True),
    ("llama", "num_hidden_layers", 10**9),
    ("llama", "max_position_embeddings", "64"),
    ("llama", "max_position_embeddings", None),
    ("llama", "max_position_embeddings", 0),
    ("gpt2", "n_positions", 0),
    ("llama", "rms_norm_eps", -1.0),
    ("gpt2", "layer_norm_epsilon", 0),
    ("llama", "tie_word_embeddings", "yes"),
    ("llama", "rope_theta", "10000"),
    ("llama", "rope_theta", 0.5),
    ("llama", "rope_scaling", "linear"),
    ("llama", "partial_rotary_factor", 0.5),
    ("llama", "rope_interleaved", True),
    ("qwen2", "use_mrope", True),
    ("llama", "attn_logit_softcapping", 50.0),
    ("llama", "final_logit_softcapping", 30.0),
    ("llama", "logit_scale", 0.0625),
    ("llama", "attention_multiplier", 0.015625),
    ("llama", "embedding_multiplier", 12.0),
    ("llama", "residual_multiplier", 0.22),
    ("llama", "logits_scaling", 8.0),
    ("llama", "quantization_config", {"quant_method": "gptq"}),
    ("llama", "auto_map", {"AutoModel": "modeling.Mine"}),
    ("llama", "num_local_experts", 8),
    ("olmo2", "sliding_window", 8),
    ("olmo2", "head_dim", 16),
    ("olmo2", "mlp_bias", True),
    ("olmo3", "layer_types", ["full_attention", "chunked_attention"]),
    ("olmo3", "sliding_window", 0),
    ("smollm3", "no_rope_layers", [1, 2]),
    ("smollm3", "no_rope_layers", [1]),
    ("smollm3", "no_rope_layer_interval", 0),
    ("granite", "logits_scaling", 0),
    ("granite", "residual_multiplier", None),
    ("granite", "position_embedding_type", "alibi"),
    ("gpt_neox", "hidden_act", "relu"),
    ("gpt_neox", "use_parallel_residual", None),
    ("gpt_neox", "rotary_pct", 1.5),
    ("apertus", "hidden_act", "silu"),
    ("apertus", "qk_norm", False),
    ("apertus", "post_norm", True),
    ("starcoder2", "hidden_act", "relu"),
    ("starcoder2", "mlp_bias", True),
    ("mixtral", "router_jitter_noise", 0.1),
    ("mixtral", "num_local_experts", "8"),
    ("mixtral", "norm_topk_prob", False),
    ("mixtral", "attention_bias", True),
    ("mixtral", "router_aux_loss_coef", -0.1),
    ("mixtral", "router_aux_loss_coef", None),
    ("mixtral", "first_k_dense_replace", 1),
    ("mixtral", "moe_layer_freq", 2),
    ("mixtral", "n_group", 8),
    ("mixtral", "topk_group", 4),
    ("mixtral", "kv_lora_rank", 512),
    ("mixtral", "n_shared_experts", 1),
    ("olmoe", "clip_qkv", 8.0),
    ("olmoe", "head_dim", 16),
    ("olmoe", "sliding_window", 8),
    ("olmoe", "norm_topk_prob", "yes"),
    ("olmoe", "scoring_func", "sigmoid"),
    ("qwen2_moe", "decoder_sparse_step", 2),
    ("qwen2_moe", "mlp_only_layers", [0]),
    ("qwen2_moe", "use_sliding_window", True),
    ("qwen2_moe", "shared_expert_intermediate_size", 1409),
    ("qwen2_moe", "shared_expert_intermediate_size", -1408),
    ("qwen2_moe", "n_shared_experts", 1),
    ("qwen3_moe", "decoder_sparse_step", 2),
    ("qwen3_moe", "mlp_only_layers", [0]),
    ("qwen3_moe", "use_sliding_window", True),
    ("qwen3_moe", "shared_expert_intermediate_size", 64),
    ("qwen3_moe", "num_experts_per_tok", 0),
    ("qwen2", "dual_chunk_attention_config", {"chunk_size": 262144}),
    ("deepseek_v2", "norm_topk_prob", True),
    ("deepseek_v2", "topk_method", "noaux_tc"),
    ("deepseek_v2", "seq_aux", False),
    ("deepseek_v2", "scoring_func", "sigmoid"),
    ("deepseek_v3", "scoring_func", "softmax"),
    ("deepseek_v3", "moe_layer_freq", 2),
    ("deepseek_v3", "attention_bias", True),
    ("deepseek_v3", "kv_lora_rank", None),
    ("gpt2", "scale_attn_weights", False),
    ("gpt2", "scale_attn_by_inverse_layer_idx", True),
    ("gpt2", "add_cross_attention", True),
    ("llama", "is_encoder_decoder", True),
    ("llama", "pruned_heads", {"0": [1]}),
    ("llama", "architectures", ["LlamaForSequenceClassification"]),
]


@pytest.mark.parametrize(("model_type", "key", "value"), OTHER_VALUES)
def test_a_value_that_is_not_computed_is_refused_by_its_key(model_type, key, value):
    problems = refusal(small(model_type) | {key: value})
    shown = repr(value) if not isinstance(value, bool | None) else json.dumps(value)
    assert any(key in problem and shown in problem for problem in problems), problems
    assert all(problem.startswith("model/config.json: ") for problem in problems)


def test_keys_of_phi_4_mini_that_say_what_is_computed_anyway_are_taken():
    said = dict(attention_bias=False, mlp_bias=False, lm_head_bias=False, full_attn_mod=1, interpolate_factor=1)
    assert values(small("phi3") | said) == values(small("phi3"))


def test_the_language_model_inside_a_model_of_images_and_text_is_refused_with_the_reason():
    problems = refusal(dict(model_type="gemma3", text_config=small("gemma3_text"), vision_config={}))
    assert "model_type is 'gemma3'" in problems[0]
    assert "text_config is " in problems[1]
    assert "only one in a folder of its own" in problems[1]


def test_all_problems_are_listed_at_once():
    problems = refusal(small("llama", hidden_act="gelu", logit_scale=2.0, new_key=1, num_hidden_layers=-2))
    keys = ("new_key", "logit_scale", "hidden_act", "num_hidden_layers")
    assert [key for key in keys if any(key in problem for problem in problems)] == list(keys)
    assert len(problems) == 4


OWN_NULL = {"num_key_value_heads", "head_dim", "n_inner", "sliding_window", "q_lora_rank", "n_group", "topk_group"}
"""Keys of which null says something by itself."""

NEVER_NULL = {
    *("hidden_act", "activation_function", "scale_attn_weights", "decoder_sparse_step", "qk_norm"),
    *("scoring_func", "topk_method", "moe_layer_freq", "seq_aux", "swiglu_limit", "swiglu_alpha"),
}
"""Keys of `ModelType.allowed` that must have a value: no version of transformers computes the default without."""


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_null_is_as_if_the_key_were_absent_in_every_table_or_refused(model_type):
    kind = MODEL_TYPES[model_type]
    own = OWN_NULL | ({"attn_logit_softcapping", "final_logit_softcapping"} & {*kind.settings})
    keys = {*OFF, *kind.settings, *kind.allowed} - own
    keys |= {"use_sliding_window", "max_window_layers", "layer_types"} if kind.window == "some" else set()
    taken = set()
    for key in keys:
        config = small(model_type)
        config.pop(key, None)
        try:
            found = values(config | {key: None})
        except RequestError:
            continue
        taken.add(key)
        assert found == values(config), key
    # Gemma 1 takes null for the tanh form.
    never = NEVER_NULL | ({"hidden_activation"} if model_type != "gemma" else set())
    assert {*OFF, *kind.allowed} - never - {*kind.settings} <= taken
    assert not taken & never
    needed = {key for key, setting in kind.settings.items() if setting.default is not False} - own
    assert not taken & needed


def test_an_unknown_key_is_refused_even_if_it_is_null():
    assert "new_key is null" in refusal(small("llama", new_key=None))[0]


def test_a_zero_that_stands_for_the_same_value_does_not_differ():
    theirs = values(small("llama", num_key_value_heads=8, head_dim=8))
    assert list(differing(theirs, dict(kv_heads=0, head_dim=0, embed=64))) == []
    assert list(differing(theirs, dict(kv_heads=2, head_dim=16, embed=64))) == ["kv_heads", "head_dim"]


@pytest.mark.parametrize("name", sorted(path.name for path in GOLDEN.iterdir()))
def test_a_config_that_is_written_again_means_the_same(name):
    config = json.loads((GOLDEN / name / "config.json").read_text())
    model = ModelConfig(**values(config))
    written = to_json(model, maximum=64, dtype="bfloat16", model_type=config["model_type"])
    again = ModelConfig(**values(json.loads(json.dumps(written))))
    head_size = dict(head_dim=written.get("head_dim", written.get("qk_nope_head_dim", 0)))
    assert again == model.model_copy(update=head_size)
    assert again.head_size == model.head_size
    assert written["model_type"] == config["model_type"]
    assert written["torch_dtype"] == written["dtype"] == "bfloat16"


@pytest.mark.parametrize("name", sorted(path.name for path in GOLDEN.iterdir()))
def test_a_config_is_written_as_transformers_writes_it(name):
    config = json.loads((GOLDEN / name / "config.json").read_text())
    written = to_json(ModelConfig(**values(config)), maximum=64, dtype="bfloat16", model_type=config["model_type"])
    # A number of layers without a window, where there is no window, may be any. Version 4 had two names for rope_type.
    ours = {key: value for key, value in written.items() if key in config and key != "max_window_layers"}
    if config.get("head_dim", 0) is None:
        # null stands for embed / heads.
        del ours["head_dim"]
    if config.get("sliding_window") == 0:
        # So version 5 writes for Qwen 2 MoE that no layer has a window.
        config["sliding_window"] = None
    if config.get("rope_scaling"):
        config["rope_scaling"]["rope_type"] = config["rope_scaling"].pop("type")
    assert ours == {key: config[key] for key in ours}


def test_the_keys_of_both_versions_are_written():
    model = ModelConfig(family="llama", rope_theta=5e5, rope_scaling="llama3,factor=8,original=16")
    written = to_json(model, maximum=128, dtype="float32")
    table = dict(rope_type="llama3", **LLAMA3)
    assert written["rope_theta"] == 5e5
    assert written["rope_scaling"] == table
    assert written["rope_parameters"] == dict(table, rope_theta=5e5)


GPT_OSS = dict(
    family="moe", sinks=True, mlp_bias=True, activation="clamped-swiglu", router_renormalize=True, qkv_bias=True,
    out_bias=True, window=8, period="sliding,full", rope_scaling="yarn,factor=4,original=48,truncate=no",
)  # fmt: skip


@pytest.mark.parametrize(
    ("knobs", "expected"),
    [
        (dict(family="gpt"), "gpt2"),
        (dict(family="llama"), "llama"),
        (dict(family="llama", window=8), "mistral"),
        (dict(family="llama", qkv_bias=True), "qwen2"),
        (dict(family="llama", qkv_bias=True, window=8), "qwen2"),
        (dict(family="llama", qk_norm="head"), "qwen3"),
        (dict(family="llama", qkv_bias=True, out_bias=True), "llama"),
        (dict(family="llama", mlp_bias=True), "llama"),
        (dict(family="llama", window=8, period="full,sliding", qkv_bias=True), "qwen2"),
        (dict(family="llama", norms="after", qk_norm="full"), "olmo2"),
        (dict(family="llama", norms="after", qk_norm="full", window=8, period="sliding,full"), "olmo3"),
        (dict(family="llama", period="full,full-nope"), "smollm3"),
        (dict(family="llama", logits_divisor=8.0), "granite"),
        (dict(family="moe"), "mixtral"),
        (dict(family="moe", residual_multiplier=0.5), "granitemoe"),
        (dict(family="moe", window=8), "mixtral"),
        (GPT_OSS, "gpt_oss"),
        (dict(family="moe", qk_norm="full", router_renormalize=True), "olmoe"),
        (dict(family="moe", qk_norm="full", router_renormalize=False), "olmoe"),
        (dict(family="moe", qk_norm="head", head_dim=64, router_renormalize=False), "qwen3_moe"),
        (dict(family="moe", shared_experts=3, shared_gate=True, expert_mlp=24, qkv_bias=True), "qwen2_moe"),
    ],
)
def test_a_model_of_our_own_gets_the_simplest_type(knobs, expected):
    model = ModelConfig(**knobs)
    written = to_json(model, maximum=128, dtype="float32")
    assert written["model_type"] == expected
    found = values(written)
    assert {knob: found.get(knob) for knob in knobs} == knobs
    # Its tensors have the names of that type.
    assert family_of(model).leaves == MODEL_TYPES[expected].tensors(model).leaves


def test_the_tensors_of_a_folder_have_the_names_of_its_own_type():
    """Also where a simpler type computes the same: Granite with experts, whose factors are all 1, is a Mixtral."""
    factors = dict(embedding_multiplier=1.0, residual_multiplier=1.0, logits_scaling=1.0)
    model = ModelConfig(**values(small("granitemoe", attention_multiplier=8**-0.5, **factors)))
    assert type_for(model) == "mixtral"
    assert type_for(model, "granitemoe") == "granitemoe"
    names = {piece.name for leaf in family_of(model, "granitemoe").leaves for piece in leaf.pieces}
    assert "model.layers.{layer}.block_sparse_moe.input_linear.weight" in names
    assert not any("experts" in name for name in names)
    assert any("experts.{expert}.w1" in piece.name for leaf in family_of(model).leaves for piece in leaf.pieces)


def test_a_model_that_no_type_computes_has_the_tensors_of_the_nearest():
    """Adapters stand beside its weights by their paths."""
    model = ModelConfig(family="moe", kv_latent=16, rope_dim=8, dense_layers=1, router_scale=3.0, z_loss=0.1)
    own = family_of(model.model_copy(update={"router": "sigmoid", "shared_experts": 0, "qk_norm": "head"}))
    paths = {leaf.path for leaf in own.leaves}
    assert {"blocks.dense.attention.kv_up", "blocks.routed.attention.kv_up"} <= paths


def test_a_type_that_cannot_compute_the_model_is_not_kept():
    model = ModelConfig(family="llama", qkv_bias=True)
    assert to_json(model, maximum=128, dtype="float32", model_type="llama")["model_type"] == "qwen2"


WITHOUT_TYPE = [
    ("llama", dict(qk_norm="full")),
    ("llama", dict(sinks=True)),
    ("llama", dict(qk_norm="head", qkv_bias=True)),
    ("moe", dict(router="sigmoid")),
    ("moe", dict(router_scale=2.5)),
    ("moe", dict(shared_experts=1)),
    ("moe", dict(shared_experts=1, shared_gate=True, qk_norm="head")),
    ("moe", dict(router_renormalize=False)),
    ("moe", dict(qkv_bias=True)),
    ("moe", dict(qk_norm="head", window=8)),
]


@pytest.mark.parametrize(("family", "knobs"), WITHOUT_TYPE)
def test_a_model_without_a_type_is_refused_by_the_knobs_that_it_has(family, knobs):
    with pytest.raises(RequestError, match="no model type") as refused:
        to_json(ModelConfig(family=family, **knobs), maximum=128, dtype="float32")
    for knob, value in knobs.items():
        assert f"{knob} {value}" in str(refused.value)


@pytest.mark.parametrize("model_type", [name for name in ROUTED_TYPES if not name.startswith("deepseek")])
def test_the_number_of_experts_has_two_names(model_type):
    for name in ("num_experts", "num_local_experts"):
        assert values(small(model_type) | {name: 4})["experts"] == 4
    both = refusal(small(model_type) | dict(num_experts=4, num_local_experts=8))
    assert "num_experts (4)" in both[0]
    assert "num_local_experts (8)" in both[0]


def test_a_model_like_those_of_deepseek_is_refused_by_all_that_it_needs():
    keys = dict(first_k_dense_replace=3, moe_layer_freq=2, n_group=8, topk_group=4, kv_lora_rank=512)
    problems = refusal(dict(model_type="deepseek_v32", n_shared_experts=1, **keys))
    assert "model_type is 'deepseek_v32'" in problems[0]
    for key, value in keys.items():
        assert any(f"{key} is {value}, and " in problem for problem in problems), key


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_a_key_that_says_what_holds_anyway_is_read(model_type):
    settings = MODEL_TYPES[model_type].settings
    alike = {key: value for key, (value, *_) in NEUTRAL.items() if key not in settings}
    off = {key: value for key, (value, *_) in OFF.items() if key not in MODEL_TYPES[model_type].settings}
    assert values(small(model_type) | alike | off) == values(small(model_type))
    # No false reason of those that are refused, and none of those that are not.
    (problem,) = refusal(small(model_type) | alike | {"decoder_sparse_step": 2})
    assert "decoder_sparse_step is 2" in problem
    named = refusal(alike | {"model_type": "deepseek_v32", "kv_lora_rank": 512})
    assert [key for key in NEUTRAL if any(key in problem for problem in named)] == []


def test_published_weights_of_deepseek_in_8_bits_are_refused_with_the_way_to_others():
    (problem,) = refusal(configs.DEEPSEEK_R1)
    assert "quantization_config is {'activation_scheme': 'dynamic'" in problem
    assert "fp8_cast_bf16.py" in problem


def test_every_key_with_a_reason_has_a_value_that_is_neutral_or_none():
    """Null is the neutral value of the ranks of latent attention; a model of images and text has none."""
    assert set(REASONS) - set(NEUTRAL) == {"kv_lora_rank", "q_lora_rank", "text_config"}


def test_the_balance_of_a_run_does_not_change_its_type():
    model = ModelConfig(family="moe", balance_rate=0.01, balance_loss=0.5, layers=4, experts_per_token=2)
    written = to_json(model, maximum=128, dtype="float32")
    assert written["model_type"] == "mixtral"
    # Theirs is the mean of four layers, and 2 where the load is even; ours is 1 in each layer.
    assert written["router_aux_loss_coef"] == 1.0
    assert values(written)["balance_loss"] == 0.5


def test_the_width_of_experts_is_written_by_the_key_of_the_type():
    sizes = dict(family="moe", mlp=512, expert_mlp=64)
    mixtral = to_json(ModelConfig(**sizes), maximum=128, dtype="float32")
    assert mixtral["intermediate_size"] == 64
    qwen = to_json(ModelConfig(**sizes, qk_norm="head"), maximum=128, dtype="float32")
    assert qwen["moe_intermediate_size"] == 64
    assert "intermediate_size" not in qwen


def test_the_width_of_experts_may_be_given_by_either_knob():
    theirs = values(small("mixtral", intermediate_size=80))
    assert list(differing(theirs, dict(mlp=80))) == []
    assert list(differing(theirs, dict(mlp=512, expert_mlp=80))) == []
    assert list(differing(theirs, dict(expert_mlp=64))) == ["expert_mlp"]
