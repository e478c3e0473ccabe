"""float16 with a scaled loss: every mesh skips the same steps, and moves the weights as one device does.

What is compared with is one device in float32; the difference is the rounding of float16.
"""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxdist.config import PipelineConfig
from jaxdist.training.forward.loss_scale import LEAST, MOST, PATIENCE, LossScale
from jaxdist.training.forward.rounded_moments import rounded
from tests.parity import cases
from tests.tiers import exhaustive

MODEL = cases.MODEL.model_copy(update={"layers": 2, "embed": 16, "heads": 2})
SCALES = 2.0**30, 2.0**15
"""With the first, no gradient of a table fits into float16; the steps after the second keep it."""

ROWS = {
    "one device": ("1x1x1", {}),
    "zero 3": ("2x2x1", dict(stage=3)),
    "zero 2": ("2x2x1", dict(stage=2, accumulation=2)),
    "pipeline": ("2x1x2", dict(stage=1, accumulation=4, pipeline=PipelineConfig(microbatches=4))),
}


@pytest.mark.parametrize("row", ["zero 3", *exhaustive([("zero 2",), ("pipeline",), ("one device",)])])
def test_an_overflow_is_skipped_and_the_steps_after_it_equal_one_device(row):
    """The first step changes nothing: two steps in float32, with the rows of the second and the third, do the same."""
    mesh, options = ROWS[row]
    got = cases.train(mesh, model=MODEL, dtype=jnp.float16, scales=SCALES, **options)
    assert got.scales == [(2.0**29, 0, 1), (2.0**15, 1, 1), (2.0**15, 2, 1)]
    assert not np.isfinite(got.norms[0])
    wanted = cases.train("1x1x1", model=MODEL, steps=2, batches=lambda number: _rows(number + 1))
    np.testing.assert_allclose(got.losses[1:], wanted.losses, rtol=1e-3)
    np.testing.assert_allclose(got.norms[1:], wanted.norms, rtol=1e-2)
    got.losses, got.norms, got.gradient = wanted.losses, wanted.norms, wanted.gradient
    cases.assert_equal(got, wanted, tolerance=2e-2)


@pytest.mark.parametrize("what", exhaustive([("adapters",), ("moments",)]))
def test_scaling_alone_changes_nothing(what):
    """In float32, by powers of two: of adapters beside frozen weights, and with moments that are rounded by chance."""
    rule = rounded(optax.chain(optax.trace(0.9), optax.scale_by_schedule(lambda count: -0.5)), ("trace",))
    options = {"model": MODEL.model_copy(update={"lora_rank": 4})} if what == "adapters" else {"optimizer": rule}
    wanted = cases.train("2x1x1", stage=1, **options)
    got = cases.train("2x1x1", stage=1, scales=(2.0**12,) * 3, **options)
    assert got.scales == [(2.0**12, good, 0) for good in (1, 2, 3)]
    cases.assert_equal(got, wanted, tolerance=1e-6)


def _rows(number: int) -> dict[str, np.ndarray]:
    named = cases.rows(number, vocab=cases.VOCAB, length=cases.SEQUENCE)
    return dict(zip(("tokens", "labels"), named, strict=True))


def scale(value: float, good: int = 0) -> LossScale:
    return LossScale(jnp.float32(value), jnp.int32(good))


@pytest.mark.parametrize(
    ("before", "finite", "after"),
    [
        ((8.0, PATIENCE - 2), True, (8.0, PATIENCE - 1)),
        ((8.0, PATIENCE - 1), True, (16.0, 0)),
        ((8.0, PATIENCE - 1), False, (4.0, 0)),
        ((LEAST, 5), False, (LEAST, 0)),
        ((MOST, PATIENCE - 1), True, (MOST, 0)),
    ],
)
def test_it_is_halved_by_an_overflow_and_doubled_by_many_good_steps(before, finite, after):
    found = scale(*before).after(jnp.asarray(finite))
    assert (float(found.scale), int(found.good)) == after


@pytest.mark.parametrize(("count", "wanted"), [(1, 512.0), (8, 64.0), (9, 64.0), (15, 64.0), (0, 1024.0)])
def test_that_of_a_sum_is_a_power_of_two(count, wanted):
    """Between half of the scale over the count and all of it; no label at all is no division by zero."""
    assert float(scale(1024.0).of_sum(jnp.int32(count))) == wanted
