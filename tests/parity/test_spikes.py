"""Spikes: every mesh skips the same updates, and makes the others as one device does that never saw the spike."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdist.config import PipelineConfig
from jaxdist.config.spikes import FEWEST, WINDOW
from jaxdist.training.forward.spikes import Recent, none_yet
from tests.parity import cases
from tests.parity.test_float16 import MODEL
from tests.tiers import exhaustive

HIGH = 100.0
ROWS = {
    "the loss, zero 3": ((0.1, HIGH), "2x2x1", dict(stage=3)),
    "the norm, pipeline": ((HIGH, 1e-3), "2x1x2", dict(accumulation=4, pipeline=PipelineConfig(microbatches=4))),
    "the norm, one device": ((HIGH, 1e-3), "1x1x1", {}),
    "the loss, zero 2": ((0.1, HIGH), "4x1x1", dict(stage=2, accumulation=2, inside=False)),
}


@pytest.mark.parametrize("row", [*list(ROWS)[:1], *exhaustive([(name,) for name in list(ROWS)[1:]])])
def test_a_spike_is_skipped_and_the_steps_after_it_equal_one_device(row):
    """The first step changes nothing: two steps with the rows of the second and the third do the same."""
    before, mesh, options = ROWS[row]
    got = cases.train(mesh, model=MODEL, usual=(before, (HIGH, HIGH)), **options)
    # The window does not hold the spike, and the losses after it are low, which is no spike.
    assert got.spikes == [(1, 1, WINDOW), (1, 1, WINDOW + 2), (1, 1, WINDOW + 3)]

    def rows(number: int) -> dict[str, np.ndarray]:
        named = cases.rows(number + 1, vocab=cases.VOCAB, length=cases.SEQUENCE)
        return dict(zip(("tokens", "labels"), named, strict=True))

    wanted = cases.train("1x1x1", model=MODEL, steps=2, batches=rows)
    np.testing.assert_allclose(got.losses[1:], wanted.losses, rtol=1e-5)
    np.testing.assert_allclose(got.norms[1:], wanted.norms, rtol=1e-5)
    got.losses, got.norms, got.gradient = wanted.losses, wanted.norms, wanted.gradient
    cases.assert_equal(got, wanted)


def taken(recent: Recent, loss: float, norm: float, sigmas: float = 6.0) -> tuple[Recent, bool]:
    """The rings after a step, and whether its update was made."""
    loss, norm = jnp.float32(loss), jnp.float32(norm)
    finite = jnp.isfinite(loss) & jnp.isfinite(norm)
    made = finite & recent.usual(sigmas).has(loss, norm)
    return recent.after(loss, norm, finite, made), bool(made)


def noisy(count: int) -> tuple[Recent, np.ndarray]:
    """The rings after so many usual steps, and their losses; norms are a tenth."""
    losses = 2 + 0.1 * np.random.default_rng(0).standard_normal(count)
    recent = none_yet()
    after = jax.jit(recent.after.__func__)
    for loss in losses:
        recent = after(recent, jnp.float32(loss), jnp.float32(loss / 10), True, jnp.asarray(True))
    return recent, losses


def test_the_mean_and_the_deviation_of_the_last_updates_are_the_limit():
    """Also where the ring has begun anew."""
    recent, losses = noisy(WINDOW + 9)
    last = losses[-WINDOW:]
    usual = recent.usual(6.0)
    np.testing.assert_allclose(usual.loss, last.mean() + 6 * last.std(), rtol=1e-5)
    np.testing.assert_allclose(usual.norm, (last.mean() + 6 * last.std()) / 10, rtol=1e-5)
    below, above = 0.999 * float(usual.loss), 1.001 * float(usual.loss)
    assert taken(recent, below, 0.2)[1]
    assert taken(recent, 0.01, 0.001)[1]
    for loss, norm in ((above, 0.2), (2.0, above / 10), (np.nan, 0.2), (2.0, np.inf)):
        after, made = taken(recent, loss, norm)
        assert not made
        assert int(after.spikes) == np.isfinite(loss + norm)
        np.testing.assert_array_equal(after.losses, recent.losses)
        assert int(after.made) == WINDOW + 9


def test_before_enough_updates_none_is_a_spike_and_a_steady_loss_has_none():
    recent, _ = noisy(FEWEST - 1)
    assert taken(recent, 1e6, 1e6)[1]
    recent, _ = noisy(FEWEST)
    assert not taken(recent, 1e6, 1e6)[1]
    steady = Recent(jnp.full(WINDOW, 2.0), jnp.full(WINDOW, 1.0), jnp.int32(WINDOW), jnp.int32(0))
    assert taken(steady, 2.1, 1.05)[1]
    assert not taken(steady, 2.13, 1.05)[1]
