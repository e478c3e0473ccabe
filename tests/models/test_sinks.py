"""Attention sinks: results, and gradients of q, k, v and sinks, against one more key whose value is 0."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest

from jaxdist.models.scores import Scores
from tests.models import rings

pytestmark = pytest.mark.smoke

SINKS = [0.5, -1.0, 2.0, 6.0]
"""Of four heads, two for each key: a weak one, and one that takes nearly all of the softmax."""


def with_sinks(sequence: int) -> list[jax.Array]:
    """q, k, v, the sinks, and a gradient of the output."""
    *heads, g = rings.random_heads(sequence)
    return [*heads, jnp.asarray(SINKS), g]


@pytest.mark.parametrize(("sequence", "window"), [(32, 0), (256, 20)])
def test_in_blocks(one_device, sequence, window):
    """One block, and two with a window."""
    given = with_sinks(sequence)
    scores = Scores.of(8, window)
    found = jax.jit(partial(rings.with_gradients, partial(rings.attend, one_device, scores)))(*given)
    rings.assert_same(found, rings.by_hand(given, scores=scores))


@pytest.mark.parametrize("form", ["ring", "ulysses"])
def test_over_context(form):
    given = with_sinks(32)
    rings.assert_same(rings.by_ring(given, 2, form=form), rings.by_hand(given))
