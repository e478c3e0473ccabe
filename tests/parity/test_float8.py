"""Matmuls in fp8: every mesh learns what one device does, up to what a number of fp8 that falls elsewhere makes of it.

All else is in float32 here, so that a number in fp8 seldom falls elsewhere.
"""

from dataclasses import replace

import jax
import numpy as np
import pytest

from jaxdist.config import PipelineConfig
from jaxdist.parallel import float8
from jaxdist.sharding import Layout
from tests.parity import cases
from tests.tiers import exhaustive

MODEL = cases.MODEL.model_copy(update={"layers": 2})
LLAMA = cases.LLAMA.model_copy(update={"layers": 2})

ROWS = {
    "zero 3": ("2x2x1", MODEL, dict(stage=3, sequence=True)),
    "pipeline": ("2x1x2", MODEL, dict(stage=1, pipeline=PipelineConfig(microbatches=4), accumulation=4)),
    "llama": ("2x2x1", LLAMA, dict(stage=2, accumulation=2)),
    "context": ("data=2,context=2", LLAMA, dict(stage=3)),
}
TOLERANCE = 2e-2
"""Of three steps; the first gradient is equal to 1e-5."""


def first(steps: cases.Outcome) -> cases.Outcome:
    """What is known of the first of these steps: all but the change of the weights."""
    return replace(steps, losses=steps.losses[:1], norms=steps.norms[:1], after=steps.before)


@pytest.mark.parametrize("row", ["zero 3", *exhaustive([("pipeline",), ("llama",), ("context",)])])
def test_a_mesh_equals_one_device(row):
    mesh, model, options = ROWS[row]
    wanted = cases.train("1x1x1", model=model, float8=True, accumulation=options.get("accumulation", 1))
    got = cases.train(mesh, model=model, float8=True, **options)
    cases.assert_equal(first(got), first(wanted))
    cases.assert_equal(got, wanted, TOLERANCE)


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
