"""Rotary positions, windows and the longest sequence of `config.json`, in the forms that people's files have."""

from pathlib import Path

import pytest

from jaxdist.huggingface.folder import Folder
from jaxdist.huggingface.model_config import longest_sequence, model_values
from tests.huggingface import configs
from tests.huggingface.configs import LLAMA3, refusal, small, values

ROPES = {
    "none": ({}, "none"),
    "null": (dict(rope_scaling=None), "none"),
    "default": (dict(rope_parameters=dict(rope_type="default")), "none"),
    "linear of 4": (dict(rope_scaling=dict(type="linear", factor=4.0)), "linear,factor=4"),
    "linear of 5": (dict(rope_parameters=dict(rope_type="linear", factor=4.0)), "linear,factor=4"),
    "llama3": (dict(rope_scaling=dict(rope_type="llama3", **LLAMA3)), "llama3,factor=8,original=16"),
    "llama3, other frequencies": (
        dict(rope_scaling=dict(rope_type="llama3", **LLAMA3) | dict(low_freq_factor=2.0, high_freq_factor=8.0)),
        "llama3,factor=8,original=16,low=2,high=8",
    ),
    "yarn": (dict(rope_scaling=dict(type="yarn", factor=4.0)), "yarn,factor=4,original=64"),
    "yarn with all": (
        dict(
            rope_parameters=dict(
                rope_type="yarn",
                factor=4.0,
                original_max_position_embeddings=16,
                beta_fast=16,
                beta_slow=2,
                attention_factor=1.5,
                truncate=True,
            )
        ),
        "yarn,factor=4,original=16,fast=16,slow=2,attention=1.5",
    ),
    "both": (
        dict(
            rope_scaling=dict(rope_type="linear", factor=4.0),
            rope_parameters=dict(rope_type="linear", factor=4, rope_theta=1e4),
        ),
        "linear,factor=4",
    ),
}


@pytest.mark.parametrize("name", ROPES)
def test_rotary_positions_of_both_versions_are_read(name):
    keys, expected = ROPES[name]
    assert values(small("llama", **keys))["rope_scaling"] == expected


@pytest.mark.parametrize(
    ("keys", "theta"),
    [
        ({}, 1e4),
        (dict(rope_theta=5e5), 5e5),
        (dict(rope_theta=5e5, rope_parameters=dict(rope_type="default")), 5e5),
        (dict(rope_parameters=dict(rope_type="default", rope_theta=1e6)), 1e6),
        (dict(rope_theta=1000000, rope_parameters=dict(rope_type="default", rope_theta=1e6)), 1e6),
    ],
)
def test_the_base_of_rotary_positions_is_found_in_both_versions(keys, theta):
    assert values(small("llama", **keys))["rope_theta"] == theta


WRONG_ROPES = {
    "dynamic": (dict(type="dynamic", factor=2.0), "rope_type 'dynamic'"),
    "longrope": (dict(rope_type="longrope", factor=2.0), "rope_type 'longrope'"),
    "mscale": (dict(rope_type="yarn", factor=2.0, mscale=1.0), "mscale 1.0"),
    "mscale_all_dim": (dict(rope_type="yarn", factor=2.0, mscale_all_dim=1.0), "mscale_all_dim 1.0"),
    "not truncated": (dict(rope_type="yarn", factor=2.0, truncate=False), "truncate false"),
    "part": (dict(rope_type="linear", factor=2.0, partial_rotary_factor=0.25), "partial_rotary_factor 0.25"),
    "no factor": (dict(rope_type="linear"), "lacks factor"),
    "no frequencies": (dict(rope_type="llama3", factor=8.0), "lacks low_freq_factor, high_freq_factor"),
    "shrinks": (dict(rope_type="linear", factor=0.5), "factor=0.5"),
    "by layer": (dict(full_attention=dict(rope_type="default")), "full_attention"),
}


@pytest.mark.parametrize("name", WRONG_ROPES)
@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_another_scaling_is_refused_by_name(key, name):
    table, expected = WRONG_ROPES[name]
    problems = refusal(small("llama", **{key: table}))
    assert len(problems) == 1
    assert key in problems[0]
    assert expected in problems[0]


def test_two_bases_that_differ_are_refused():
    keys = dict(rope_theta=1e4, rope_parameters=dict(rope_type="default", rope_theta=1e6))
    assert (
        "rope_parameters.rope_theta (1000000.0) and rope_theta (10000.0) differ" in refusal(small("llama", **keys))[0]
    )


def test_two_scalings_that_differ_are_refused():
    old = dict(type="linear", factor=4.0)
    new = dict(rope_type="linear", factor=2.0)
    assert "differ" in refusal(small("llama", rope_scaling=old, rope_parameters=new))[0]


WINDOWS = {
    "mistral, null": ("mistral", dict(sliding_window=None), 0),
    "mistral": ("mistral", dict(sliding_window=8), 8),
    "mistral, listed": ("mistral", dict(sliding_window=8, layer_types=["sliding_attention"] * 2), 8),
    "llama, listed": ("llama", dict(sliding_window=None, layer_types=["full_attention"] * 2), 0),
    "qwen, not used": ("qwen2", dict(sliding_window=8), 0),
    "qwen, not used by any layer": ("qwen2", dict(sliding_window=8, use_sliding_window=True, max_window_layers=2), 0),
    "qwen, used by all layers": ("qwen3", dict(sliding_window=8, use_sliding_window=True, max_window_layers=0), 8),
    "qwen, listed": (
        "qwen3",
        dict(sliding_window=8, use_sliding_window=True, layer_types=["sliding_attention"] * 2),
        8,
    ),
}


@pytest.mark.parametrize("name", WINDOWS)
def test_the_window_of_all_layers_is_read(name):
    model_type, keys, expected = WINDOWS[name]
    assert values(small(model_type, **keys))["window"] == expected


MIXED = {
    "by number": dict(sliding_window=8, use_sliding_window=True, max_window_layers=1),
    "by list": dict(sliding_window=8, use_sliding_window=True, layer_types=["full_attention", "sliding_attention"]),
}


@pytest.mark.parametrize("name", MIXED)
def test_windows_that_differ_between_layers_are_refused(name):
    assert "1 of 2 layers have a sliding window" in refusal(small("qwen2", **MIXED[name]))[0]


def test_layers_that_slide_over_no_window_are_refused():
    problems = refusal(small("qwen2", sliding_window=8, layer_types=["sliding_attention"] * 2))
    assert "gives no window" in problems[0]


def test_a_scaling_covers_more_than_the_longest_sequence():
    config = small("qwen2", rope_scaling=dict(type="yarn", factor=4.0, original_max_position_embeddings=64))
    folder = Folder(Path("model"), config)
    assert longest_sequence(folder, model_values(folder)) == 256


def test_a_maximum_that_counts_the_scaling_already_stays():
    folder = Folder(Path("model"), configs.LLAMA_31_8B)
    assert longest_sequence(folder, model_values(folder)) == 131072
