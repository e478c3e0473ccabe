"""The comparison of fast forms with plain ones: it passes what is right, and none of what is wrong."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdist.models import activations, norms, numerics, positions
from jaxdist.models.numerics import Sizes

SMALL = Sizes(rows=2, sequence=32, heads=4, kv_heads=2, size=16, mlp=48, vocab=80)
FORMS = {
    "attention": ["q", "k", "v"],
    "cross-entropy": ["x", "table"],
    "RMSNorm": ["x", "scale"],
    "SwiGLU": ["x", "gate-up", "down"],
    "rotary": ["x"],
}


def found(dtype=jnp.float32) -> dict[str, numerics.Difference]:
    return {one.what: one for one in numerics.everything(SMALL, dtype, jax.devices()[0])}


@pytest.mark.slow
def test_in_bfloat16_within_rounding():
    there = found(jnp.bfloat16)
    assert {one.what: one.error for one in there.values() if not one.fine} == {}
    assert max(one.error for one in there.values()) > 1e-3  # so it was bfloat16


def test_each_backward_pass_is_the_derivative():
    """To 1e-10 in float64, the parts of GPT's MLP and norm too."""
    with jax.enable_x64(True):
        compare = partial(numerics._compare, dtype=np.dtype("float64"), device=jax.devices()[0])
        shapes = ((2, 8, 16), (16,), (16,))
        there = [
            *found(np.dtype("float64")).values(),
            *compare("GELU", "x", lambda _, x: activations.gelu(x), jax.nn.gelu, shapes[:1]),
            *compare("LayerNorm", "xsb", lambda _, *given: norms._layer_norm(1e-5, *given), plain_layer_norm, shapes),
        ]
    assert {one.what: one.error for one in there if not one.error < 1e-10} == {}
    assert len(there) == sum(1 + len(inputs) for inputs in FORMS.values()) + 2 + 4


def plain_layer_norm(x, scale, bias):
    deviation = x - jnp.mean(x, axis=-1, keepdims=True)
    return deviation / jnp.sqrt(jnp.mean(deviation**2, axis=-1, keepdims=True) + 1e-5) * scale + bias


def test_what_is_wrong_is_told(monkeypatch):
    """Half of a rotation, an epsilon, a label: each in its own form and in no other."""
    turn, loss = positions._turn, numerics.cross_entropy
    monkeypatch.setattr(positions, "_turn", lambda *given: turn(*given[:-1], max(given[-1], 0)))  # the gradient alone
    monkeypatch.setattr(numerics, "_rms_norm", lambda layout, x, scale: numerics._plain_rms_norm(x, scale) + 0.1)
    monkeypatch.setattr(numerics, "cross_entropy", lambda layout, x, table, ids: loss(layout, x, table, abs(ids)))
    there = found()
    assert list(there) == [
        text for name, inputs in FORMS.items() for text in (name, *(f"{name}, d {i}" for i in inputs))
    ]
    wrong = [one.what for one in there.values() if not one.fine]
    assert wrong == ["cross-entropy", "cross-entropy, d x", "cross-entropy, d table", "RMSNorm", "rotary, d x"]
    assert {one.what: one.error for one in there.values() if one.what not in wrong and not one.error < 1e-5} == {}
