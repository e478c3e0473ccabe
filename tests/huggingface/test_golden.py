"""The logits of real folders are those of transformers, on every mesh."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from tests.huggingface.golden import DENSE, MESHES, MXFP4, NAMES, ROUTED, ROUTED_MESHES, config_of, expected, logits

BOUND = 1e-5
"""Largest difference, as a fraction of the largest logit."""

DEFAULT = {
    *((name, "1x1x1") for name in NAMES),
    *((name, list(MESHES)[1 + number % 3]) for number, name in enumerate(DENSE)),
    *(("qwen2", mesh) for mesh in MESHES),
    *(("gpt2", mesh) for mesh in MESHES),
    *((name, ("data=2,expert=4", "expert=2,model=2")[number % 2]) for number, name in enumerate(ROUTED)),
    ("deepseek_v3", "expert=2,pipeline=2"),
    ("gpt_oss", "expert=2,pipeline=2"),
    (MXFP4, "expert=2,model=2"),
}
"""The rows of the whole suite: every folder on one device and on another mesh; two of them on all."""

FAST = {*((name, "1x1x1") for name in DENSE), ("mixtral", "1x1x1"), ("gpt_oss", "1x1x1"), (MXFP4, "1x1x1")}

ROWS = [
    pytest.param(*row, marks=[] if row in FAST else pytest.mark.slow if row in DEFAULT else pytest.mark.exhaustive)
    for row in (*itertools.product(DENSE, MESHES), *itertools.product((*ROUTED, MXFP4), ROUTED_MESHES))
]


def difference(name: str, mesh: str, **model: object) -> float:
    tokens, theirs = expected(name)
    ours = logits(config_of(name, mesh, **model), tokens)
    assert ours.shape == theirs.shape
    return float(np.abs(ours - theirs).max() / np.abs(theirs).max())


@pytest.mark.parametrize(("name", "mesh"), ROWS)
def test_the_logits_are_those_of_transformers(name, mesh):
    assert difference(name, mesh) <= BOUND


LISTS = "short=1:1.1:1.3:1.5,long=1:1.5:4:8"

WRONG = [
    ("llama1", {"norm_eps": 1e-5}),
    ("llama31", {"rope_scaling": "none"}),
    ("linear", {"rope_scaling": "none"}),
    ("yarn", {"rope_scaling": "yarn,factor=4,original=16,attention=1"}),
    ("olmo2", {"norm_eps": 1e-3}),
    ("olmo3", {"period": "full,sliding"}),
    ("olmo3", {"sliding_theta": 0.0}),
    ("smollm3", {"period": ""}),
    ("granite", {"embedding_multiplier": 1.0}),
    ("granite", {"residual_multiplier": 1.0}),
    ("granite", {"attention_multiplier": 0.0}),
    ("granite", {"logits_divisor": 1.0}),
    ("gpt_neox", {"residual": "sequential"}),
    ("gpt_neox", {"rotary_fraction": 1.0}),
    ("gpt_neox", {"activation": "gelu"}),
    ("gemma", {"family": "llama", "activation": "gelu"}),
    ("gemma", {"activation": "silu"}),
    ("gemma2", {"attention_cap": 0.0}),
    ("gemma2", {"logit_cap": 0.0}),
    ("gemma2", {"attention_multiplier": 0.0}),
    ("gemma2", {"period": "full,sliding"}),
    ("gemma3", {"sliding_theta": 0.0}),
    ("gemma3", {"rope_scaling": "none"}),
    ("phi4_mini", {"rotary_fraction": 1.0, "rope_scaling": f"longrope,factor=4,original=16,{LISTS}"}),
    ("phi3_short", {"rope_scaling": f"longrope,factor=4,original=16,{LISTS}"}),
    ("phi4_mini", {"rope_scaling": "longrope,factor=1,original=16,short=1:1.1:1.5,long=1:2:8"}),
    ("mistral", {"window": 0}),
    ("mistral", {"window": 9}),
    *(
        pytest.param(name, knobs, marks=pytest.mark.slow)
        for name, knobs in [
            ("deepseek_v2", {"rope_pairs": "halves"}),
            ("deepseek_v2", {"router_group_score": "none"}),
            ("deepseek_v2", {"router_group_score": "best-two"}),
            ("deepseek_v2", {"router_scale": 1.0}),
            ("deepseek_v3", {"router_groups_kept": 3}),
            ("deepseek_v3", {"router_renormalize": False}),
            ("deepseek_v3", {"rope_scaling": "yarn,factor=4,original=16,fast=4"}),
            ("deepseek_v3", {"rope_scaling": "yarn,factor=4,original=16,fast=4,mscale=1.5,mscale_all=1.5"}),
            ("deepseek_v3", {"rope_scaling": "yarn,factor=4,original=16,fast=4,mscale=0.707,mscale_all=0.707"}),
        ]
    ),
    ("gpt_oss", {"window": 9}),
    pytest.param("gpt_oss", {"activation": "silu"}, marks=pytest.mark.slow),
    pytest.param("gpt_oss", {"rope_scaling": "yarn,factor=4,original=48"}, marks=pytest.mark.slow),
    pytest.param("gpt_oss", {"experts_per_token": 3}, marks=pytest.mark.slow),
    pytest.param("gpt_oss", {"router_renormalize": False}, marks=pytest.mark.slow),
    pytest.param("granitemoe", {"residual_multiplier": 1.0}, marks=pytest.mark.slow),
    pytest.param("mixtral", {"router_renormalize": False}, marks=pytest.mark.slow),
    pytest.param("olmoe", {"router_renormalize": True}, marks=pytest.mark.slow),
    pytest.param("qwen2_moe", {"router_renormalize": True}, marks=pytest.mark.slow),
    pytest.param("qwen3_moe", {"experts_per_token": 3}, marks=pytest.mark.slow),
]
"""What each addition is for: without it the folder loads, and the logits are others."""


@pytest.mark.parametrize(("name", "model"), WRONG)
def test_a_wrong_value_is_seen_in_the_logits(name, model):
    assert difference(name, "1x1x1", **model) > 4 * BOUND
