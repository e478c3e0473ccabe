"""Promise 1 where layers are of several kinds: a window of 5 tokens in two of three layers."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdist import models
from jaxdist.config import Config, PipelineConfig
from jaxdist.config.model import FAMILIES
from jaxdist.mesh import make_mesh, parse_mesh
from jaxdist.mesh.split import Split
from jaxdist.sharding import Layout
from jaxdist.training.forward.decoder import DecoderForward
from tests.kinds import (  # noqa: F401  # fixtures are used by themselves
    DENSE,
    LAYERS,
    PERIOD,
    llama_of_several_kinds,
    moe_of_two_forms,
    written_out,
)
from tests.parity import cases
from tests.tiers import exhaustive

MODEL = cases.LLAMA.model_copy(update=dict(layers=LAYERS, heads=4, window=5))

ROWS = {
    "ZeRO 3": ("data=4", dict(stage=3)),
    "ZeRO 2, rows in turn": ("data=2", dict(stage=2, accumulation=4, remat="block")),
    "tensor and sequence": ("data=2,model=2", dict(sequence=True, remat="dots")),
    "ring": ("context=4", dict(context="ring")),
    "Ulysses, documents": ("context=2,model=2", dict(context="ulysses", apart=True)),
    "offload": ("data=2", dict(remat="offload")),
}
"""(mesh, options)."""


def piped(schedule: str, **options: object) -> dict:
    return dict(accumulation=4, pipeline=PipelineConfig(schedule=schedule)) | options


PIPELINES = {
    "1f1b": ("pipeline=2", piped("1f1b")),
    "gpipe": ("pipeline=3", piped("gpipe", remat="stage")),
    "1f1b, tensor and sequence": ("data=2,model=2,pipeline=2", piped("1f1b", sequence=True, stage=2, remat="block")),
    "1f1b, ring, documents": ("context=2,pipeline=2", piped("1f1b", context="ring", apart=True)),
    "interleaved": ("data=2,pipeline=2", piped("interleaved", layers=10, stage=3, remat="dots")),
    "zb-u": ("data=2,pipeline=2", piped("zb-u", stage=1)),
    "zb-h1": ("data=2,model=2,pipeline=2", piped("zb-h1", stage=3, sequence=True, remat="dots")),
}
"""Stages of three and four layers; with three, the last one has only the rest of a period."""


@cache
def one_device(apart: bool, layers: int = LAYERS) -> cases.Outcome:
    return cases.train(model=MODEL.model_copy(update={"layers": layers}), apart=apart)


def check(mesh: str, options: dict, layers: int = LAYERS) -> None:
    options = {"remat": "none", "layers": layers} | options
    model = MODEL.model_copy(update={name: options.pop(name) for name in ("remat", "layers")})
    cases.assert_equal(cases.train(mesh, model=model, **options), one_device(options.get("apart", False), model.layers))


def test_equals_one_device():
    check(*ROWS["ZeRO 3"])


def others(rows: dict, *by_hand: str) -> list:
    """All but the first, which the fast tier has; some of them only when they are asked for."""
    _, *rest = rows
    return [*(row for row in rest if row not in by_hand), *exhaustive((row,) for row in by_hand)]


@pytest.mark.slow
@pytest.mark.parametrize("row", others(ROWS, "ring", "offload"))
def test_every_mesh_equals_one_device(row):
    check(*ROWS[row])


def test_a_pipeline_equals_one_device():
    check(*PIPELINES["1f1b"])


@pytest.mark.slow
@pytest.mark.parametrize("row", others(PIPELINES, "gpipe", "1f1b, tensor and sequence", "zb-u"))
def test_every_pipeline_equals_one_device(row):
    check(*PIPELINES[row])


@pytest.mark.slow
@pytest.mark.parametrize(("layers", "stage"), [(2, 3), *exhaustive([(4, 1), (6, 3)])])
def test_less_than_a_period_one_and_whole_ones(layers, stage):
    check("data=2,model=2", dict(stage=stage), layers)


def test_loss_and_gradient_are_those_of_the_layers_written_out():
    """And not those of layers that all have the window, or have none."""
    mesh = make_mesh(parse_mesh("1x1x1"), jax.devices()[:1])
    layout = Layout.of(Split(Config(model=MODEL), parse_mesh("1x1x1")), mesh)
    model = models.build(MODEL, layout)
    forward = DecoderForward(model, layout)
    params = cases.weights(MODEL)
    tokens = jnp.asarray(cases.rows()[0][:4])

    def loss(logits, params):
        return jnp.sum(jnp.square(logits(params)))

    outcome = jax.jit(jax.value_and_grad(loss, argnums=1), static_argnums=0)
    with jax.set_mesh(mesh):
        found = outcome(lambda params: forward.logits(params, tokens), params)
        wanted = outcome(
            lambda params: model.logits(params, written_out(model, params, model.embed(params, tokens))), params
        )
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4), found, wanted)
    for same in ("sliding", "full"):
        traits = FAMILIES["llama"]._replace(period=(same,))
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(FAMILIES, "llama", traits)
            other = DecoderForward(models.build(MODEL, layout), layout)
        with jax.set_mesh(mesh):
            got = jax.jit(loss, static_argnums=0)(lambda params, other=other: other.logits(params, tokens), params)
        assert abs(got - wanted[0]) > 0.1


MIXTURE = cases.LLAMA.model_copy(
    update=dict(family="moe", layers=DENSE + 2, mlp=48, experts=4, expert_mlp=24, balance_loss=1e-2, z_loss=1e-3)
    | dict(heads=4, kv_heads=0, head_dim=12, kv_latent=16, q_latent=24, rope_dim=8, value_dim=16)
    | dict(rope_pairs="neighbours", rope_scaling="yarn,factor=4,original=8,mscale=1,mscale_all=0.7")
)
"""Two dense layers, and two routed ones, with latent attention."""

MIXTURE_ROWS = {
    "ZeRO 3": ("data=2,model=2", dict(stage=3)),
    "experts": ("data=2,expert=2,model=2", dict(stage=2, accumulation=4, remat="block", sequence=True)),
    "offload": ("expert=2,context=2", dict(remat="offload", context="ring")),
    "Ulysses": ("context=2,model=2", dict(context="ulysses", remat="dots", stage=1)),
    "1f1b": ("model=2,pipeline=2", piped("1f1b", remat="block")),
    "1f1b, ZeRO 2": ("data=2,pipeline=2", piped("1f1b", stage=2, remat="stage", layers=DENSE + 3)),
    "interleaved": ("data=2,pipeline=2", piped("interleaved", stage=3, layers=DENSE + 5)),
    "zb-u, experts": ("expert=2,model=2,pipeline=2", piped("zb-u", stage=1, sequence=True, remat="dots")),
    "zb-h1": ("data=2,pipeline=2", piped("zb-h1", stage=3)),
}
"""(mesh, options). Of stages, the first alone has the dense layers; with an odd number of others, these are padded."""

MIXTURE_BY_HAND = ("Ulysses", "1f1b, ZeRO 2", "interleaved", "zb-u, experts", "zb-h1")


@cache
def mixture_on_one_device(layers: int = MIXTURE.layers) -> cases.Outcome:
    return cases.train(model=MIXTURE.model_copy(update={"layers": layers}))


def check_mixture(mesh: str, options: dict) -> None:
    options = {"remat": "none", "layers": MIXTURE.layers} | options
    sizes = {name: options.pop(name) for name in ("remat", "layers")}
    model = MIXTURE.model_copy(update=sizes | {"capacity_factor": 0.5})
    found, wanted = cases.train(mesh, model=model, **options), mixture_on_one_device(model.layers)
    cases.assert_equal(found, wanted)
    assert found.counts["load"].shape == (model.layers - DENSE, MIXTURE.experts)
    np.testing.assert_array_equal(found.counts["load"], wanted.counts["load"])


def test_dense_layers_and_then_experts_equal_one_device():
    check_mixture(*MIXTURE_ROWS["ZeRO 3"])
    blocks = mixture_on_one_device().after["blocks"]
    assert blocks["dense"]["mlp"]["gate_up"].shape == (DENSE, 32, 2, 48)
    assert blocks["routed"]["mlp"]["gate_up"].shape == (2, 4, 32, 2, 24)


@pytest.mark.slow
@pytest.mark.parametrize("row", others(MIXTURE_ROWS, *MIXTURE_BY_HAND))
def test_dense_layers_and_then_experts_on_every_mesh(row):
    check_mixture(*MIXTURE_ROWS[row])


def test_the_layers_of_a_mixture_are_those_written_out():
    mesh = make_mesh(parse_mesh("1x1x1"), jax.devices()[:1])
    layout = Layout.of(Split(Config(model=MIXTURE), parse_mesh("1x1x1")), mesh)
    model = models.build(MIXTURE, layout)
    params = cases.weights(MIXTURE)
    tokens = jnp.asarray(cases.rows()[0][:4])
    with jax.set_mesh(mesh):
        found = jax.jit(DecoderForward(model, layout).logits)(params, tokens)
        wanted = jax.jit(lambda params: model.logits(params, written_out(model, params, model.embed(params, tokens))))(
            params
        )
    np.testing.assert_allclose(found, wanted, atol=1e-5)


@pytest.mark.slow
def test_experts_in_layers_of_several_kinds_equal_one_device(monkeypatch):
    """Two periods of routed layers, and one layer more: what their routers count is added up once."""
    monkeypatch.setitem(FAMILIES, "moe", FAMILIES["moe"]._replace(period=PERIOD))
    model = MIXTURE.model_copy(update=dict(layers=DENSE + 7, window=5))
    found = cases.train("replica=2,expert=2,model=2", model=model, stage=2, sequence=True)
    wanted = cases.train(model=model)
    np.testing.assert_array_equal(found.counts["load"], wanted.counts["load"])
    cases.assert_equal(found, wanted)
