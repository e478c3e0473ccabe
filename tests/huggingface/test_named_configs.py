"""The shipped configurations of published models have the published number of parameters, described with no device."""

import json

import pytest

from jaxdist import models
from jaxdist.huggingface.folder import open_config
from jaxdist.huggingface.model_config import differing, model_values
from jaxdist.request import load
from tests.huggingface.configs import DEEPSEEK_R1_IN_BFLOAT16, MIXTRAL_8X7B, OLMOE_1B_7B, QWEN_3_30B_A3B

PARAMETERS = {
    "apertus_8b": 8_053_338_176,
    "apertus_70b": 70_599_864_480,
    "gptoss_20b": 20_914_757_184,
    "gptoss_120b": 116_829_156_672,
    "olmo2_7b": 7_298_617_344,
    "pythia_160m": 162_322_944,
    "smollm3_3b": 3_075_098_624,
    "llama2_7b": 6_738_415_616,
    "llama31_8b": 8_030_261_248,
    "llama31_70b": 70_553_706_496,
    "llama32_1b": 1_235_814_400,
    "llama32_3b": 3_212_749_824,
    "mistral_7b": 7_241_732_096,
    "mixtral_8x7b": 46_702_792_704,
    "olmoe_1b_7b": 6_919_161_856,
    "deepseek_v3_671b": 671_026_404_352,
    "gemma3_1b": 999_885_952,
    "gemma3_27b": 27_009_346_304,
    "phi4_14b": 14_659_507_200,
    "qwen25_05b": 494_032_768,
    "qwen25_7b": 7_615_616_512,
    "qwen3_06b": 596_049_920,
    "qwen3_4b": 4_022_468_096,
    "qwen3_8b": 8_190_735_360,
    "qwen3_30b_a3b": 30_532_122_624,
    "smollm2_135m": 134_515_008,
    "smollm2_17b": 1_711_376_384,
    "tinyllama_11b": 1_100_048_384,
}

ACTIVE = {
    # All but the embedding table are 3.61 and 5.13 billion, which are published.
    "gptoss_20b": 4_187_440_704,
    "gptoss_120b": 5_711_982_912,
    **{"mixtral_8x7b": 12_879_925_248, "olmoe_1b_7b": 1_282_017_280, "qwen3_30b_a3b": 3_353_032_704},
    "deepseek_v3_671b": 37_552_282_624,
}
"""Parameters that a token goes through. Published are 12.9, 1.28, 3.3 and 37 billion."""

GPT_OSS = dict(
    norm_eps=1e-5, rope_theta=1.5e5, rope_scaling="yarn,factor=32,original=4096,truncate=no", window=128,
    period="sliding,full", activation="clamped-swiglu", experts_per_token=4, router_renormalize=True,
)  # fmt: skip
MODEL = {
    "llama2_7b": dict(norm_eps=1e-5, rope_theta=1e4),
    "llama31_8b": dict(norm_eps=1e-5, rope_theta=5e5, rope_scaling="llama3,factor=8,original=8192"),
    "llama32_1b": dict(norm_eps=1e-5, rope_theta=5e5, rope_scaling="llama3,factor=32,original=8192"),
    "mistral_7b": dict(norm_eps=1e-5, rope_theta=1e4, window=4096),
    "mixtral_8x7b": dict(norm_eps=1e-5, rope_theta=1e6, experts_per_token=2, router_renormalize=True),
    "olmoe_1b_7b": dict(norm_eps=1e-5, rope_theta=1e4, experts_per_token=8, router_renormalize=False, qk_norm="full"),
    "qwen3_30b_a3b": dict(norm_eps=1e-6, rope_theta=1e6, experts_per_token=8, router_renormalize=True, qk_norm="head"),
    "deepseek_v3_671b": dict(
        norm_eps=1e-6, rope_theta=1e4, router="sigmoid", rope_pairs="neighbours", router_scale=2.5
    ),
    "phi4_14b": dict(norm_eps=1e-5, rope_theta=2.5e5, rope_scaling="none", window=0, tied=False),
    "qwen25_7b": dict(norm_eps=1e-6, rope_theta=1e6, qkv_bias=True, qk_norm="none"),
    "qwen3_4b": dict(norm_eps=1e-6, rope_theta=1e6, qkv_bias=False, qk_norm="head", head_size=128),
    "apertus_8b": dict(norm_eps=1e-5, rope_theta=1.2e7, rope_scaling="llama3,factor=8,original=8192"),
    "apertus_70b": dict(norm_eps=1e-5, rope_theta=1.2e7, rope_scaling="llama3,factor=8,original=8192"),
    "gptoss_20b": GPT_OSS,
    "gptoss_120b": GPT_OSS,
    "olmo2_7b": dict(norm_eps=1e-6, rope_theta=5e5, norms="after"),
    "pythia_160m": dict(norm_eps=1e-5, rope_theta=1e4, rotary_fraction=0.25, residual="parallel"),
    "smollm3_3b": dict(norm_eps=1e-6, rope_theta=5e6, period="full,full,full,full-nope"),
    "smollm2_135m": dict(norm_eps=1e-5, rope_theta=1e5),
    "smollm2_17b": dict(norm_eps=1e-5, rope_theta=1.3e5),
    "tinyllama_11b": dict(norm_eps=1e-5, rope_theta=1e4),
}
"""What no number of parameters shows."""


@pytest.mark.parametrize("name", PARAMETERS)
def test_it_has_the_published_number_of_parameters(name):
    assert models.parameters(models.build(load(name, {}).model)) == PARAMETERS[name]


@pytest.mark.parametrize("name", ACTIVE)
def test_a_token_goes_through_the_published_number_of_parameters(name):
    config = load(name, {}).model
    assert models.active_parameters(models.build(config), config) == ACTIVE[name]


@pytest.mark.parametrize("name", MODEL)
def test_it_has_the_published_values_that_no_parameter_shows(name):
    model = load(name, {}).model
    assert {knob: getattr(model, knob) for knob in MODEL[name]} == MODEL[name]


def config_json(kind, **sizes):
    """Return the keys of a published config.json that determine the function."""
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size")
    return {
        "architectures": [f"{kind.capitalize()}ForCausalLM"],
        "model_type": kind,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        **dict(zip(names, sizes.pop("five"), strict=True)),
        **sizes,
    }


LLAMA3 = dict(
    rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192
)
GPT_OSS_YARN = dict(
    rope_type="yarn", factor=32.0, beta_fast=32.0, beta_slow=1.0, original_max_position_embeddings=4096, truncate=False
)
GEMMA_3 = dict(
    model_type="gemma3_text", architectures=["Gemma3ForCausalLM"], tie_word_embeddings=True,
    hidden_act="gelu_pytorch_tanh",
)  # fmt: skip
PUBLISHED = {
    "olmo2_7b": config_json(
        "olmo2", five=(4096, 32, 32, 32, 11008), vocab_size=100_352, rms_norm_eps=1e-6, rope_theta=500_000,
        rope_scaling=None, max_position_embeddings=4096,
    ),
    "smollm3_3b": config_json(
        "smollm3", five=(2048, 36, 16, 4, 11008), vocab_size=128_256, rms_norm_eps=1e-6, rope_theta=5e6,
        no_rope_layer_interval=4, no_rope_layers=[1, 1, 1, 0] * 9, layer_types=["full_attention"] * 36,
        max_window_layers=28, use_sliding_window=False, sliding_window=None, max_position_embeddings=65_536,
        tie_word_embeddings=True, architectures=["SmolLM3ForCausalLM"], pretraining_tp=2,
    ),
    "pythia_160m": dict(
        architectures=["GPTNeoXForCausalLM"], model_type="gpt_neox", hidden_act="gelu", hidden_size=768,
        intermediate_size=3072, layer_norm_eps=1e-5, max_position_embeddings=2048, num_attention_heads=12,
        num_hidden_layers=12, rotary_emb_base=10_000, rotary_pct=0.25, tie_word_embeddings=False,
        use_parallel_residual=True, vocab_size=50_304, torch_dtype="float16",
    ),
    "apertus_8b": config_json(
        "apertus", five=(4096, 32, 32, 8, 21504), vocab_size=131_072, rms_norm_eps=1e-5, rope_theta=12_000_000,
        rope_scaling=LLAMA3, max_position_embeddings=65_536, hidden_act="xielu", mlp_bias=False, qk_norm=True,
        post_norm=False,
    ),
    "gptoss_20b": config_json(
        "gpt_oss", five=(2880, 24, 64, 8, 2880), architectures=["GptOssForCausalLM"], vocab_size=201_088, head_dim=64,
        num_local_experts=32, num_experts_per_tok=4, experts_per_token=4, router_aux_loss_coef=0.9, swiglu_limit=7.0,
        sliding_window=128, layer_types=["sliding_attention", "full_attention"] * 12, attention_bias=True,
        initial_context_length=4096, max_position_embeddings=131_072, rms_norm_eps=1e-5, rope_theta=150_000,
        rope_scaling=GPT_OSS_YARN, quantization_config=dict(quant_method="mxfp4", modules_to_not_convert=["lm_head"]),
    ),
    "gptoss_120b": config_json(
        "gpt_oss", five=(2880, 36, 64, 8, 2880), architectures=["GptOssForCausalLM"], vocab_size=201_088, head_dim=64,
        num_local_experts=128, num_experts_per_tok=4, experts_per_token=4, router_aux_loss_coef=0.9, swiglu_limit=7.0,
        sliding_window=128, layer_types=["sliding_attention", "full_attention"] * 18, attention_bias=True,
        initial_context_length=4096, max_position_embeddings=131_072, rms_norm_eps=1e-5, rope_theta=150_000,
        rope_scaling=GPT_OSS_YARN, quantization_config=dict(quant_method="mxfp4", modules_to_not_convert=["lm_head"]),
    ),
    "apertus_70b": config_json(
        "apertus", five=(8192, 80, 64, 8, 43008), vocab_size=131_072, rms_norm_eps=1e-5, rope_theta=12_000_000,
        rope_scaling=LLAMA3, max_position_embeddings=65_536, hidden_act="xielu", mlp_bias=False, qk_norm=True,
        post_norm=False,
    ),
    "llama31_8b": config_json(
        "llama", five=(4096, 32, 32, 8, 14336), vocab_size=128_256, rms_norm_eps=1e-5, rope_theta=5e5,
        rope_scaling=LLAMA3, max_position_embeddings=131_072,
    ),
    "mistral_7b": config_json(
        "mistral", five=(4096, 32, 32, 8, 14336), vocab_size=32_000, rms_norm_eps=1e-5, rope_theta=1e4,
        sliding_window=4096, max_position_embeddings=32_768,
    ),
    "gemma3_1b": config_json(
        "llama", five=(1152, 26, 4, 1, 6912), vocab_size=262_144, rms_norm_eps=1e-6, rope_theta=1_000_000,
        head_dim=256, query_pre_attn_scalar=256, sliding_window=512, sliding_window_pattern=6, attention_bias=False,
        rope_local_base_freq=10_000, max_position_embeddings=32_768, hidden_activation="gelu_pytorch_tanh",
        cache_implementation="hybrid", **GEMMA_3,
    ),
    "gemma3_27b": config_json(
        "llama", five=(5376, 62, 32, 16, 21504), vocab_size=262_208, rms_norm_eps=1e-6, rope_theta=1_000_000,
        head_dim=128, query_pre_attn_scalar=168, sliding_window=1024, rope_local_base_freq=10_000,
        rope_scaling=dict(factor=8.0, rope_type="linear"), max_position_embeddings=131_072,
        **GEMMA_3,
    ),
    "phi4_14b": config_json(
        "phi3", five=(5120, 40, 40, 10, 17920), vocab_size=100_352, rms_norm_eps=1e-5, rope_theta=250_000,
        rope_scaling=None, sliding_window=None, original_max_position_embeddings=16_384,
        max_position_embeddings=16_384, embd_pdrop=0.0, resid_pdrop=0.0, attention_bias=False,
    ),
    "qwen25_7b": config_json(
        "qwen2", five=(3584, 28, 28, 4, 18944), vocab_size=152_064, rms_norm_eps=1e-6, rope_theta=1e6,
        use_sliding_window=False, sliding_window=131_072, max_window_layers=28, max_position_embeddings=131_072,
    ),
    "deepseek_v3_671b": DEEPSEEK_R1_IN_BFLOAT16,
    "mixtral_8x7b": MIXTRAL_8X7B,
    "olmoe_1b_7b": OLMOE_1B_7B,
    "qwen3_30b_a3b": QWEN_3_30B_A3B,
    "qwen3_8b": config_json(
        "qwen3", five=(4096, 36, 32, 8, 12288), vocab_size=151_936, rms_norm_eps=1e-6, rope_theta=1e6, head_dim=128,
        use_sliding_window=False, sliding_window=None, max_window_layers=36, max_position_embeddings=40_960,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_it_fits_the_folder_of_the_published_weights(tmp_path, name):
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[name]))
    found = model_values(open_config(tmp_path))
    # The weight of the load-balancing loss is a choice of a run.
    found.pop("balance_loss", None)
    ours = load(name, {}).model.model_dump()
    assert list(differing(found, {knob: ours[knob] for knob in found})) == []
    assert list(differing(found, {"embed": 1})) == ["embed"]
