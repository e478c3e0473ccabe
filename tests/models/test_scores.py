"""Another scale of the scores, a soft cap, values of another size than keys: each form against the plain one."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdist.config import ModelConfig
from jaxdist.models.attention import NO_CAP, AttentionCall, causal_attention
from jaxdist.models.decoding import attend_to_slots
from jaxdist.models.scores import Scores
from jaxdist.sharding import Layout
from tests.models import rings

pytestmark = pytest.mark.smoke

SCORES = Scores(0.6, window=20, cap=1.5)
VALUE_SIZE = 12


def heads(sequence: int) -> list[jax.Array]:
    return rings.random_heads(sequence, value_size=VALUE_SIZE)


def test_in_blocks(one_device):
    given = heads(256)
    attend = partial(rings.with_gradients, partial(causal_attention, one_device, SCORES))
    rings.assert_same(jax.jit(attend)(*given), rings.by_hand(given, scores=SCORES))


@pytest.mark.parametrize("form", ["ring", "ulysses"])
def test_over_context(form):
    given = heads(32)
    rings.assert_same(rings.by_ring(given, 2, None, SCORES, form), rings.by_hand(given, scores=SCORES))


def test_cudnn_is_not_for_values_of_another_size():
    layout = Layout((), "gpu", (), (9, 0))
    call = AttentionCall(layout, (2, 256, 4, 64), jnp.bfloat16, value_size=128)
    reason = call.beyond_cudnn
    assert reason == "cuDNN attention takes values of the size of keys, and here they have 128 and 64"
    assert replace(call, value_size=64).beyond_cudnn == ""


def test_cudnn_caps_no_scores():
    layout = Layout((), "gpu", (), (9, 0))
    model = ModelConfig(family="llama", embed=256, heads=4, attention_cap=50)
    assert AttentionCall.of(model, 0, layout, 2, jnp.bfloat16).unknown_mask == NO_CAP
    assert (
        AttentionCall.of(model.model_copy(update={"attention_cap": 0.0}), 0, layout, 2, jnp.bfloat16).beyond_cudnn == ""
    )
    traced = lambda scores: str(
        jax.make_jaxpr(partial(causal_attention, layout, scores))(*(jnp.ones((1, 8, 2, 64), "bfloat16"),) * 3)
    )
    assert "tanh" in traced(Scores(0.1, cap=50.0))


def test_with_a_cache():
    """The query of position 29, to slots in any order."""
    q, k, v, _ = heads(32)
    slots = np.random.default_rng(0).permutation(32)
    by_head = (a[:, slots].swapaxes(1, 2) for a in (k, v))
    found = attend_to_slots(SCORES, q[:, 29:30], *by_head, jnp.asarray(slots)[None], jnp.full(2, 29))
    with jax.numpy_rank_promotion("allow"):
        wanted = rings.plain(q, k, v, scores=SCORES)[:, 29:30]
    np.testing.assert_allclose(found.out, wanted, atol=1e-5)


def test_a_window_that_hides_nothing_is_none():
    assert SCORES.within(20) == SCORES.within(4) == Scores(0.6, cap=1.5)
    assert SCORES.within(21) == SCORES
