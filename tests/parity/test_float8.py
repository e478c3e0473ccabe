"""Matmuls in fp8: every mesh learns what one device does, up to what a number of fp8 that falls elsewhere makes of it.

All else is in float32 here, so that a number in fp8 seldom falls elsewhere.
"""

from dataclasses import replace
from functools import partial

import jax
import numpy as np
import pytest

from jaxdist.config import PipelineConfig
from jaxdist.mesh import make_mesh, parse_mesh
from jaxdist.parallel import experts, float8
from jaxdist.sharding import Layout
from tests.parity import cases
from tests.tiers import exhaustive

MODEL = cases.MODEL.model_copy(update={"layers": 2})
LLAMA = cases.LLAMA.model_copy(update={"layers": 2})
MOE = LLAMA.model_copy(update=dict(family="moe", experts=4, expert_mlp=32, shared_experts=1, capacity_factor=0.5))
"""Many tokens find no room in the first round of the dispatch: the further ones multiply in fp8 too."""

ROWS = {
    "zero 3": ("2x2x1", MODEL, dict(stage=3, sequence=True)),
    "pipeline": ("2x1x2", MODEL, dict(stage=1, pipeline=PipelineConfig(microbatches=4), accumulation=4)),
    "llama": ("2x2x1", LLAMA, dict(stage=2, accumulation=2)),
    "experts": ("data=2,expert=2", MOE, dict(stage=3)),
    "experts and stages": (
        "expert=2,model=2,pipeline=2",
        MOE,
        dict(stage=1, pipeline=PipelineConfig(microbatches=4), accumulation=4),
    ),
    "context": ("data=2,context=2", LLAMA, dict(stage=3)),
}
TOLERANCE = 2e-2
"""Of three steps; the first gradient is equal to 1e-5."""
ROUTED = 5e-2
"""Of three steps with experts, where a token whose scores are nearly equal may go to another one."""


def first(steps: cases.Outcome) -> cases.Outcome:
    """What is known of the first of these steps: all but the change of the weights."""
    return replace(steps, losses=steps.losses[:1], norms=steps.norms[:1], after=steps.before)


OTHERS = exhaustive([("pipeline",), ("llama",), ("context",), ("experts and stages",)])


@pytest.mark.parametrize("row", ["zero 3", "experts", *OTHERS])
def test_a_mesh_equals_one_device(row):
    mesh, model, options = ROWS[row]
    wanted = cases.train("1x1x1", model=model, float8=True, accumulation=options.get("accumulation", 1))
    got = cases.train(mesh, model=model, float8=True, **options)
    cases.assert_equal(first(got), first(wanted))
    cases.assert_equal(got, wanted, ROUTED if model.family == "moe" else TOLERANCE)


@pytest.mark.parametrize(("dtype", "bits"), [(float8.FORWARD, 4), (float8.BACKWARD, 3)])
@pytest.mark.parametrize("largest", [1e-30, 0.7, 1.0, 447.0, 3e38])
def test_numbers_are_rounded_to_the_bits_of_their_format(dtype, bits, largest):
    """Down to 2^-13 of the largest, to so many bits of the significand: those of numpy's own arithmetic."""
    a = np.random.default_rng(0).uniform(2.0**-13, 1, 1000).astype(np.float32)
    a = np.where(np.arange(1000) % 2, a, -a)
    a[0] = 1
    a *= np.float32(largest)
    found = np.asarray(jax.jit(lambda a: float8.rounded(Layout(manual=True), a, dtype))(a))
    fraction, exponent = np.frexp(a.astype(np.float64))
    np.testing.assert_array_equal(found, np.ldexp(np.rint(np.ldexp(fraction, bits)), exponent - bits))


def test_experts_multiply_rounded_numbers_forward_and_back():
    """A plain program with the same numbers; a layout without fp8 differs from it."""
    rng = np.random.default_rng(0)
    draw = lambda *shape: jax.numpy.asarray(rng.normal(size=shape), np.float32)
    x, w, g = draw(8, 2, 16), draw(2, 16, 12), draw(8, 2, 12)
    fp8, plain = (Layout(manual=True, platform="cpu", float8=on) for on in (True, False))

    @partial(jax.jit, static_argnums=0)
    def found(layout):
        y, back = jax.vjp(lambda x, w: experts.grouped(layout, "RED,EDG->REG", x, w), x, w)
        return y, *back(g)

    a, b = (float8.rounded(fp8, each, float8.FORWARD) for each in (x, w))
    c = float8.rounded(fp8, g, float8.BACKWARD)
    products = ("red,edg->reg", a, b), ("reg,edg->red", c, b), ("red,reg->edg", a, c)
    with jax.set_mesh(make_mesh(parse_mesh("1x1x1"), jax.devices()[:1])):
        results = found(fp8), found(plain)
    for got, wide, product in zip(*results, products, strict=True):
        np.testing.assert_allclose(got, jax.numpy.einsum(*product), rtol=1e-5, atol=1e-5)
        assert np.abs(np.asarray(got) - np.asarray(wide)).max() > 0.01
