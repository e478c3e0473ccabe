"""The shipped configurations of published models have the published number of parameters, described with no device."""

import json

import pytest

from jaxdist import models
from jaxdist.huggingface.folder import open_config
from jaxdist.huggingface.model_config import differing, model_values
from jaxdist.request import load
from tests.huggingface.configs import MIXTRAL_8X7B, OLMOE_1B_7B, QWEN_3_30B_A3B

PARAMETERS = {
    "llama2_7b": 6_738_415_616,
    "llama31_8b": 8_030_261_248,
    "llama31_70b": 70_553_706_496,
    "llama32_1b": 1_235_814_400,
    "llama32_3b": 3_212_749_824,
    "mistral_7b": 7_241_732_096,
    "mixtral_8x7b": 46_702_792_704,
    "olmoe_1b_7b": 6_919_161_856,
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

ACTIVE = {"mixtral_8x7b": 12_879_925_248, "olmoe_1b_7b": 1_282_017_280, "qwen3_30b_a3b": 3_353_032_704}
"""Parameters that a token goes through. Published are 12.9, 1.28 and 3.3 billion."""

MODEL = {
    "llama2_7b": dict(norm_eps=1e-5, rope_theta=1e4),
    "llama31_8b": dict(norm_eps=1e-5, rope_theta=5e5, rope_scaling="llama3,factor=8,original=8192"),
    "llama32_1b": dict(norm_eps=1e-5, rope_theta=5e5, rope_scaling="llama3,factor=32,original=8192"),
    "mistral_7b": dict(norm_eps=1e-5, rope_theta=1e4, window=4096),
    "mixtral_8x7b": dict(norm_eps=1e-5, rope_theta=1e6, experts_per_token=2, router_renormalize=True),
    "olmoe_1b_7b": dict(norm_eps=1e-5, rope_theta=1e4, experts_per_token=8, router_renormalize=False, qk_norm="full"),
    "qwen3_30b_a3b": dict(norm_eps=1e-6, rope_theta=1e6, experts_per_token=8, router_renormalize=True, qk_norm="head"),
    "qwen25_7b": dict(norm_eps=1e-6, rope_theta=1e6, qkv_bias=True, qk_norm="none"),
    "qwen3_4b": dict(norm_eps=1e-6, rope_theta=1e6, qkv_bias=False, qk_norm="head", head_size=128),
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
PUBLISHED = {
    "llama31_8b": config_json(
        "llama", five=(4096, 32, 32, 8, 14336), vocab_size=128_256, rms_norm_eps=1e-5, rope_theta=5e5,
        rope_scaling=LLAMA3, max_position_embeddings=131_072,
    ),
    "mistral_7b": config_json(
        "mistral", five=(4096, 32, 32, 8, 14336), vocab_size=32_000, rms_norm_eps=1e-5, rope_theta=1e4,
        sliding_window=4096, max_position_embeddings=32_768,
    ),
    "qwen25_7b": config_json(
        "qwen2", five=(3584, 28, 28, 4, 18944), vocab_size=152_064, rms_norm_eps=1e-6, rope_theta=1e6,
        use_sliding_window=False, sliding_window=131_072, max_window_layers=28, max_position_embeddings=131_072,
    ),
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
