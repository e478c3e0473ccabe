"""The shipped configurations of published models have the published number of parameters, described with no device."""

import pytest

from jaxdist import models
from jaxdist.request import load

PARAMETERS = {
    "llama2_7b": 6_738_415_616,
    "llama31_8b": 8_030_261_248,
    "llama31_70b": 70_553_706_496,
    "llama32_1b": 1_235_814_400,
    "llama32_3b": 3_212_749_824,
    "mistral_7b": 7_241_732_096,
    "qwen25_05b": 494_032_768,
    "qwen25_7b": 7_615_616_512,
    "qwen3_06b": 596_049_920,
    "qwen3_4b": 4_022_468_096,
    "qwen3_8b": 8_190_735_360,
    "smollm2_135m": 134_515_008,
    "smollm2_17b": 1_711_376_384,
    "tinyllama_11b": 1_100_048_384,
}

MODEL = {
    "llama2_7b": dict(norm_eps=1e-5, rope_theta=1e4),
    "llama31_8b": dict(norm_eps=1e-5, rope_theta=5e5, rope_scaling="llama3,factor=8,original=8192"),
    "llama32_1b": dict(norm_eps=1e-5, rope_theta=5e5, rope_scaling="llama3,factor=32,original=8192"),
    "mistral_7b": dict(norm_eps=1e-5, rope_theta=1e4, window=4096),
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


@pytest.mark.parametrize("name", MODEL)
def test_it_has_the_published_values_that_no_parameter_shows(name):
    model = load(name, {}).model
    assert {knob: getattr(model, knob) for knob in MODEL[name]} == MODEL[name]
