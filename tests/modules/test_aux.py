"""`gradients(..., has_aux=True)` returns arrays of all rows of a batch, in its order, whatever computes them where."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxdist
from tests.tiers import thinned

ROWS = 24


class Split(nnx.Module):
    """Two matrices that the model axis may split."""

    def __init__(self, rngs):
        draw = nnx.initializers.lecun_normal()
        self.up = nnx.Param(draw(rngs.params(), (12, 16)), axes=("embed", "mlp"))
        self.down = nnx.Param(draw(rngs.params(), (16, 8)), axes=("mlp", None))

    def __call__(self, x):
        return jnp.tanh(x @ self.up[...]) @ self.down[...]


def rows_of(module, batch):
    logits = module(batch["x"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    return losses, logits


def with_mean(module, batch):
    losses, logits = rows_of(module, batch)
    return (losses.mean(), {"largest": logits.max(-1).mean()}), {"losses": losses, "logits": logits}


def with_sum(module, batch):
    losses, logits = rows_of(module, batch)
    return ((losses * batch["mask"]).sum(), batch["mask"].sum()), {"losses": losses, "logits": logits}


def mean(module, batch):
    return rows_of(module, batch)[0].mean()


def batch():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(ROWS, 12)).astype("f")
    return {"x": x, "label": rng.integers(0, 8, ROWS), "mask": (rng.random(ROWS) < 0.7).astype("f")}


def made(mesh, **options):
    return jaxdist.parallelize(Split, mean, optax.sgd(0.1), mesh=mesh, **options)


SPLIT = {"mlp": ("model",)}
CASES = [
    ("4x1x1", "batch", 3, dict(zero=3), with_mean),
    ("2x2x1", "batch", 3, dict(rules=SPLIT), with_sum),
    ("4x1x1", "rows", 1, {}, with_sum),
    ("2x2x1", "batch", 1, dict(zero=1, rules=SPLIT), with_mean),
    ("replica=2,data=2", "rows", 3, dict(zero=2), with_sum),
    ("4x1x1", "rows", 3, dict(zero=3), with_mean),
]


@pytest.mark.parametrize(("mesh", "scope", "k", "options", "loss"), thinned(CASES, 5))
def test_arrays_with_rows_are_those_of_one_device_in_the_order_of_the_batch(mesh, scope, k, options, loss):
    trainer = made(mesh, scope=scope, accumulation=k, **options)
    state = trainer.init(0)
    found = trainer.gradients(state, batch(), loss, has_aux=True)
    module = trainer.module(state)
    losses, logits = rows_of(module, jax.tree.map(jnp.asarray, batch()))
    np.testing.assert_allclose(found.aux["losses"], losses, rtol=1e-5)
    np.testing.assert_allclose(found.aux["logits"], logits, rtol=1e-5, atol=1e-6)
    split = {shard.data.shape[0] for shard in found.aux["logits"].addressable_shards}
    assert split == {ROWS // trainer.layout.ranks}
    alone = made("1x1x1").gradients(made("1x1x1").init(0), batch(), loss, has_aux=True)
    np.testing.assert_allclose(found.loss, alone.loss, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), found.grads, alone.grads)
    assert found.further.keys() == alone.further.keys()
    after, _ = trainer.update(state, found)
    assert int(after.step) == 1


WRONG = [
    (lambda module, batch: mean(module, batch), r"has_aux is true, but loss_fn returned shape \(\) and dtype float32"),
    (lambda module, batch: (mean(module, batch), {"n": jnp.zeros(3)}), r"aux of shape \(3,\) as n for 12 rows; give"),
    (
        lambda module, batch: (mean(module, batch), batch["x"].sum()),
        r"aux of shape \(\) for 12 rows; give arrays whose",
    ),
]


def test_mistakes():
    trainer = made("2x1x1", scope="rows")
    state = trainer.init(0)
    with pytest.raises(ValueError, match="no loss_fn is given; give one that returns a pair"):
        trainer.gradients(state, batch(), has_aux=True)
    for loss, told in WRONG:
        with pytest.raises(ValueError, match=told) as refused:
            trainer.gradients(state, batch(), loss, has_aux=True)
        assert not re.search("\n", str(refused.value))
