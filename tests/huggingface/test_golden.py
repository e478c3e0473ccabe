"""The logits of real folders are those of transformers, on every mesh."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from tests.huggingface.golden import DENSE, MESHES, NAMES, ROUTED, ROUTED_MESHES, config_of, expected, logits

BOUND = 1e-5
"""Largest difference, as a fraction of the largest logit."""

DEFAULT = {
    *((name, "1x1x1") for name in NAMES),
    *((name, list(MESHES)[1 + number % 3]) for number, name in enumerate(DENSE)),
    *(("qwen2", mesh) for mesh in MESHES),
    *(("gpt2", mesh) for mesh in MESHES),
    *((name, mesh) for name in ROUTED for mesh in ("data=2,expert=4", "expert=2,model=2")),
    ("mixtral", "expert=2,pipeline=2"),
}
"""The rows of the whole suite: every folder on one device and on another mesh; two of them on all."""

FAST = {*((name, "1x1x1") for name in DENSE), ("mixtral", "1x1x1")}

ROWS = [
    pytest.param(*row, marks=[] if row in FAST else pytest.mark.slow if row in DEFAULT else pytest.mark.exhaustive)
    for row in (*itertools.product(DENSE, MESHES), *itertools.product(ROUTED, ROUTED_MESHES))
]


def difference(name: str, mesh: str, **model: object) -> float:
    tokens, theirs = expected(name)
    ours = logits(config_of(name, mesh, **model), tokens)
    assert ours.shape == theirs.shape
    return float(np.abs(ours - theirs).max() / np.abs(theirs).max())


@pytest.mark.parametrize(("name", "mesh"), ROWS)
def test_the_logits_are_those_of_transformers(name, mesh):
    assert difference(name, mesh) <= BOUND


WRONG = [
    ("llama1", {"norm_eps": 1e-5}),
    ("llama31", {"rope_scaling": "none"}),
    ("linear", {"rope_scaling": "none"}),
    ("yarn", {"rope_scaling": "yarn,factor=4,original=16,attention=1"}),
    ("mistral", {"window": 0}),
    ("mistral", {"window": 9}),
    pytest.param("mixtral", {"router_renormalize": False}, marks=pytest.mark.slow),
    pytest.param("olmoe", {"router_renormalize": True}, marks=pytest.mark.slow),
    pytest.param("qwen3_moe", {"experts_per_token": 3}, marks=pytest.mark.slow),
]
"""What each addition is for: without it the folder loads, and the logits are others."""


@pytest.mark.parametrize(("name", "model"), WRONG)
def test_a_wrong_value_is_seen_in_the_logits(name, model):
    assert difference(name, "1x1x1", **model) > 4 * BOUND
