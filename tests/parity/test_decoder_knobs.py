"""Promise 1 for biases, norms and sizes of attention, scaled positions, and a table of more positions than a row."""

from __future__ import annotations

import itertools
from functools import cache

import jax
import jax.numpy as jnp
import optax
import pytest

from jaxdist.config import PipelineConfig
from tests.parity import cases
from tests.tiers import exhaustive

LLAMA3 = "llama3,factor=8,original=8"
MODELS = {
    "norm of each head": cases.LLAMA.model_copy(
        update=dict(head_dim=8, qkv_bias=True, qk_norm="head", norm_eps=1e-6, rope_scaling=LLAMA3)
    ),
    # No axis divides heads of 6.
    "norm of all heads": cases.LLAMA.model_copy(
        update=dict(head_dim=6, qkv_bias=True, qk_norm="full", rope_scaling="yarn,factor=4,original=8")
    ),
    # Nor 23 positions.
    "positions": cases.MODEL.model_copy(update=dict(heads=8, positions=23)),
}

ZB_U = PipelineConfig(schedule="zb-u")
ZB_H1 = PipelineConfig(schedule="zb-h1")

ROWS = [
    ("norm of each head", "2x4x1", dict(stage=3, sequence=True, accumulation=4), "block", False),
    ("norm of all heads", "1x8x1", dict(), "none", False),
    ("norm of each head", "1x2x1", dict(sequence=True), "none", False),
    ("norm of each head", "1x1x2", dict(accumulation=4, stage=1, pipeline=ZB_U), "none", False),
    ("norm of each head", "2x2x2", dict(stage=3, sequence=True, accumulation=4, pipeline=ZB_H1), "none", True),
    ("norm of all heads", "1x4x2", dict(sequence=True, accumulation=4, pipeline=ZB_U), "none", False),
    ("positions", "2x2x1", dict(stage=3, sequence=True, accumulation=2), "none", False),
    ("norm of each head", "context=2,model=2", dict(stage=1, sequence=True, context="ring"), "none", True),
    ("positions", "data=2,context=2,model=2", dict(stage=3, sequence=True, context="ring"), "block", False),
]
"""(model, mesh, options, remat, whether documents are apart)."""

PARTS_OF_ROWS = [
    ("norm of each head", "replica=2,model=4", dict(stage=1, accumulation=2), "dots", False),
    ("norm of all heads", "2x2x1", dict(stage=3, sequence=True), "dots", True),
    ("positions", "1x2x2", dict(sequence=True, accumulation=4), "none", True),
    (
        "norm of all heads",
        "data=2,context=2,model=2",
        dict(stage=3, sequence=True, context="ulysses"),
        "dots",
        True,
    ),
    (
        "norm of each head",
        "context=2,model=2,pipeline=2",
        dict(stage=1, sequence=True, accumulation=4, pipeline=ZB_U, context="ring"),
        "none",
        True,
    ),
]

PRODUCT = [
    (model, mesh, dict(stage=stage, sequence=sequence, accumulation=4), "none", False)
    for model, mesh, stage, sequence in itertools.product(
        MODELS, ("8x1x1", "2x4x1", "1x8x1", "replica=2,data=2,model=2", "2x2x2", "1x4x2"), (0, 1, 2, 3), (False, True)
    )
    if not (sequence and mesh == "8x1x1")
]


@cache
def one_device(model: str, apart: bool) -> cases.Outcome:
    outcome = cases.train(model=MODELS[model], apart=apart)
    assert cases.moved(outcome) > 0.01
    return outcome


def check(model: str, mesh: str, options: dict, remat: str, apart: bool) -> None:
    got = cases.train(mesh, model=MODELS[model].model_copy(update={"remat": remat}), apart=apart, **options)
    cases.assert_equal(got, one_device(model, apart))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "mesh", "options", "remat", "apart"),
    ROWS,
    ids=lambda value: " ".join(value) if isinstance(value, dict) else str(value),
)
def test_equals_one_device(model, mesh, options, remat, apart):
    check(model, mesh, options, remat, apart)


@pytest.mark.parametrize(
    ("model", "mesh", "options", "remat", "apart"), exhaustive([*PRODUCT, *PARTS_OF_ROWS]), ids=str
)
def test_every_layout_equals_one_device(model, mesh, options, remat, apart):
    check(model, mesh, options, remat, apart)


@pytest.mark.slow
@pytest.mark.parametrize("knobs", [dict(rope_scaling="none"), dict(norm_eps=1e-3)], ids=str)
def test_without_a_knob_the_training_is_another(knobs):
    """Or the rows above would prove nothing."""
    name = "norm of each head"
    other = cases.train(model=MODELS[name].model_copy(update=knobs))
    with pytest.raises(AssertionError):
        cases.assert_equal(other, one_device(name, False), tolerance=1e-3)


@pytest.mark.exhaustive
@pytest.mark.parametrize("model", ["norm of each head", "norm of all heads"])
def test_adamw_in_float64(model):
    options = dict(optimizer=optax.adamw(1e-3), dtype=jnp.float64, param_dtype=jnp.float64, max_norm=0.5)
    with jax.enable_x64(True):
        wanted = cases.train(model=MODELS[model], **options)
        got = cases.train("2x4x1", 2, MODELS[model], stage=3, sequence=True, **options)
    cases.assert_equal(got, wanted, tolerance=1e-10)
