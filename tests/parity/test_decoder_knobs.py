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
    "OLMo 3": cases.LLAMA.model_copy(
        update=dict(
            layers=4,
            embedding_multiplier=30.0,
            norms="after",
            qk_norm="full",
            window=5,
            period="sliding,full",
            sliding_theta=100.0,
            rope_scaling="yarn,factor=4,original=8",
        )
    ),
    "GPT-NeoX": cases.LLAMA.model_copy(
        update=dict(
            kv_heads=0,
            norm="layer",
            residual="parallel",
            gate="off",
            activation="gelu-erf",
            rotary_fraction=0.5,
            qkv_bias=True,
            out_bias=True,
            mlp_bias=True,
            head_dim=8,
        )
    ),
    "Apertus, Granite": cases.LLAMA.model_copy(
        update=dict(
            layers=4,
            activation="xielu",
            gate="off",
            qk_norm="head",
            embedding_multiplier=3.0,
            residual_multiplier=0.4,
            attention_multiplier=0.2,
            logits_divisor=2.0,
            period="full,full-nope",
            norms="both",
            mlp_bias=True,
        )
    ),
    # Caps so low that most of what they cap is far from linear.
    "Gemma": cases.LLAMA.model_copy(
        update=dict(
            family="gemma",
            layers=4,
            norms="both",
            head_dim=8,
            qk_norm="head",
            window=5,
            period="sliding,full",
            sliding_theta=10.0,
            attention_multiplier=0.2,
            attention_cap=1.5,
            logit_cap=3.0,
        )
    ),
    "gpt-oss": cases.LLAMA.model_copy(
        update=dict(
            family="moe",
            layers=4,
            head_dim=8,
            qkv_bias=True,
            out_bias=True,
            mlp_bias=True,
            sinks=True,
            activation="clamped-swiglu",
            window=5,
            period="sliding,full",
            experts=4,
            expert_mlp=16,
            balance_rate=0.0,
            balance_loss=1e-2,
            capacity_factor=0.5,
            rope_scaling="yarn,factor=4,original=8,truncate=no",
        )
    ),
    # In the region of a pipeline, gradients of what nothing splits are added up along the sequence by other code.
    "latent attention": cases.LLAMA.model_copy(
        update=dict(kv_heads=0, head_dim=12, kv_latent=16, q_latent=24, rope_dim=8, value_dim=16)
        | dict(rope_pairs="neighbours", rope_scaling="yarn,factor=4,original=8,mscale=1,mscale_all=0.7")
    ),
    "LongRoPE": cases.LLAMA.model_copy(update=dict(rope_scaling="longrope,factor=4,original=8,short=1:1,long=1.5:3")),
    # Nor 23 positions.
    "positions": cases.MODEL.model_copy(update=dict(heads=8, positions=23)),
}

ZB_U = PipelineConfig(schedule="zb-u")
ZB_H1 = PipelineConfig(schedule="zb-h1")

F1B = PipelineConfig(schedule="1f1b")

ROWS = [
    ("norm of all heads", "1x8x1", dict(), "none", False),
    ("norm of all heads", "1x4x2", dict(sequence=True, accumulation=4, pipeline=ZB_U), "none", False),
    (
        "Gemma",
        "context=2,model=2,pipeline=2",
        dict(stage=1, accumulation=4, context="ring", pipeline=F1B),
        "none",
        True,
    ),
    ("gpt-oss", "data=2,expert=2,model=2", dict(stage=3, sequence=True, accumulation=2), "block", False),
    (
        "latent attention",
        "context=2,model=2,pipeline=2",
        dict(stage=1, sequence=True, accumulation=4, context="ring", pipeline=F1B),
        "block",
        False,
    ),
    ("GPT-NeoX", "data=2,context=2,pipeline=2", dict(stage=2, accumulation=4, pipeline=ZB_H1), "none", False),
    ("Apertus, Granite", "1x2x2", dict(sequence=True, accumulation=4, pipeline=F1B), "block", True),
]
"""(model, mesh, options, remat, whether documents are apart)."""

PARTS_OF_ROWS = [
    ("norm of each head", "2x2x2", dict(stage=3, sequence=True, accumulation=4, pipeline=ZB_H1), "none", True),
    ("LongRoPE", "2x2x2", dict(stage=3, sequence=True, accumulation=4, pipeline=ZB_H1), "none", False),
    (
        "OLMo 3",
        "context=2,model=2,pipeline=2",
        dict(stage=1, accumulation=4, context="ring", pipeline=ZB_U),
        "none",
        True,
    ),
    (
        "gpt-oss",
        "context=2,model=2,pipeline=2",
        dict(stage=1, accumulation=4, context="ring", pipeline=ZB_U),
        "none",
        True,
    ),
    ("norm of each head", "2x4x1", dict(stage=3, sequence=True, accumulation=4), "block", False),
    ("Gemma", "data=2,context=2,model=2", dict(stage=2, sequence=True, context="ulysses"), "dots", True),
    ("gpt-oss", "expert=2,context=2,model=2", dict(stage=2, sequence=True, context="ulysses"), "dots", True),
    ("positions", "data=2,context=2,model=2", dict(stage=3, sequence=True, context="ring"), "block", False),
    ("norm of each head", "1x2x1", dict(sequence=True), "none", False),
    ("norm of each head", "1x1x2", dict(accumulation=4, stage=1, pipeline=ZB_U), "none", False),
    ("positions", "2x2x1", dict(stage=3, sequence=True, accumulation=2), "none", False),
    ("OLMo 3", "2x2x1", dict(stage=3, sequence=True, accumulation=2), "block", False),
    ("Gemma", "2x2x1", dict(stage=3, sequence=True, accumulation=2), "block", False),
    ("gpt-oss", "expert=2,model=4", dict(stage=1), "none", False),
    ("GPT-NeoX", "2x2x1", dict(stage=3, sequence=True), "dots", True),
    ("Apertus, Granite", "2x2x1", dict(stage=3, sequence=True), "none", False),
    ("norm of each head", "context=2,model=2", dict(stage=1, sequence=True, context="ring"), "none", True),
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


RATES = {"OLMo 3": 0.1}
"""Where the usual rate makes the loss jump, and with it what rounding does."""


def optimizer(model: str) -> optax.GradientTransformation:
    return optax.sgd(RATES.get(model, 0.5))


@cache
def one_device(model: str, apart: bool) -> cases.Outcome:
    outcome = cases.train(model=MODELS[model], apart=apart, optimizer=optimizer(model))
    assert cases.moved(outcome) > 0.01
    return outcome


def check(model: str, mesh: str, options: dict, remat: str, apart: bool) -> None:
    asked = MODELS[model].model_copy(update={"remat": remat})
    got = cases.train(mesh, model=asked, apart=apart, optimizer=optimizer(model), **options)
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
