"""Rotary positions, windows and the longest sequence of `config.json`, in the forms that people's files have."""

from pathlib import Path

import pytest

from jaxdist.config import ModelConfig
from jaxdist.huggingface.folder import Folder
from jaxdist.huggingface.model_config import longest_sequence, model_values
from tests.huggingface import configs
from tests.huggingface.configs import LLAMA3, refusal, small, values

LONG = dict(short_factor=[1.0, 1.5], long_factor=[2, 4])

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
    "longrope": (
        dict(original_max_position_embeddings=16, rope_scaling=dict(type="longrope", **LONG)),
        "longrope,factor=4,original=16,short=1:1.5,long=2:4",
    ),
    "longrope, called su": (
        dict(
            original_max_position_embeddings=16,
            rope_scaling=dict(type="su", **LONG),
            rope_parameters=dict(rope_type="longrope", original_max_position_embeddings=16, rope_theta=1e4, **LONG),
        ),
        "longrope,factor=4,original=16,short=1:1.5,long=2:4",
    ),
    "longrope with all": (
        dict(rope_parameters=dict(rope_type="longrope", factor=2, attention_factor=1.5, **LONG)),
        "longrope,factor=2,original=64,attention=1.5,short=1:1.5,long=2:4",
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
    model_type = "phi3" if "longrope" in expected else "llama"
    assert values(small(model_type, **keys))["rope_scaling"] == expected


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
    "longrope without lists": (dict(rope_type="longrope", factor=2.0), "lacks short_factor, long_factor"),
    "longrope with a number": (dict(rope_type="longrope", short_factor=1.0, long_factor=[1.0]), "short_factor 1.0"),
    "longrope with two lengths": (dict(rope_type="longrope", short_factor=[1.0], long_factor=[1, 2]), "1 numbers"),
    "mscale": (dict(rope_type="linear", factor=2.0, mscale=1.0), "mscale 1.0"),
    "mscale_all_dim": (dict(rope_type="yarn", factor=2.0, mscale_all_dim=-1.0), "mscale_all=-1.0"),
    "truncated": (dict(rope_type="yarn", factor=2.0, truncate=2), "truncate=2, which must be yes or no"),
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
    "by number": ("qwen2", dict(sliding_window=8, use_sliding_window=True, max_window_layers=1), "full,sliding"),
    "by list": (
        "qwen3",
        dict(sliding_window=8, use_sliding_window=True, layer_types=["sliding_attention", "full_attention"]),
        "sliding,full",
    ),
    "every fourth": ("olmo3", dict(sliding_window=8, num_hidden_layers=8), "sliding,sliding,sliding,full"),
    "NoPE by an interval": ("smollm3", dict(no_rope_layer_interval=2), "full,full-nope"),
    "NoPE by a list": ("smollm3", dict(no_rope_layers=[0, 1], no_rope_layer_interval=7), "full-nope,full"),
    "a window where there is no RoPE": (
        "smollm3",
        dict(no_rope_layer_interval=2, use_sliding_window=True, sliding_window=8, max_window_layers=28),
        "full,sliding-nope",
    ),
}


@pytest.mark.parametrize("name", MIXED)
def test_what_layers_differ_in_is_read_as_a_period(name):
    model_type, keys, period = MIXED[name]
    found = values(small(model_type, **keys))
    assert (found["period"], found["window"]) == (period, 8 if "sliding" in period else 0)


def test_layers_of_which_more_differ_than_can_be_compiled_are_refused():
    keys = dict(num_hidden_layers=70, sliding_window=8, use_sliding_window=True, max_window_layers=1)
    assert "repeat after 70 layers, and at most 64" in refusal(small("qwen2", **keys))[0]


SCALED = dict(rope_type="linear", factor=2.0)
APART = {
    "version 4": dict(rope_theta=1e4, rope_scaling=SCALED),
    "version 5": dict(
        rope_parameters=dict(
            full_attention=dict(rope_theta=1e4, **SCALED),
            sliding_attention=dict(rope_type="default", rope_theta=1e4),
        )
    ),
}


@pytest.mark.parametrize("version", APART)
def test_layers_with_a_window_have_positions_that_are_not_scaled(version):
    found = values(small("olmo3", num_hidden_layers=4, **APART[version]))
    assert (found["rope_theta"], found["rope_scaling"], found["sliding_theta"]) == (1e4, "linear,factor=2", 1e4)
    kinds = ModelConfig(**found).kinds
    assert [(kind.window > 0, kind.theta, kind.scaling) for kind in kinds] == [
        *[(True, 1e4, "none")] * 3,
        (False, 1e4, "linear,factor=2"),
    ]


@pytest.mark.parametrize(
    "keys",
    [
        dict(rotary_pct=0.5, rotary_emb_base=100.0),
        dict(rope_parameters=dict(rope_type="default", rope_theta=100.0, partial_rotary_factor=0.5)),
    ],
)
def test_the_part_of_a_head_that_turns_is_found_in_both_versions(keys):
    found = values(small("gpt_neox", **keys))
    assert (found["rotary_fraction"], found["rope_theta"]) == (0.5, 100.0)


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
