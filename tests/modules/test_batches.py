"""Batches of arrays that have no rows, or not first, or that lie on the mesh already."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxdist
from tests.processes import told
from tests.tiers import thinned

ROWS, LENGTH = 8, 6


class Net(nnx.Module):
    def __init__(self, rngs):
        self.up, self.head = nnx.Linear(12, 16, rngs=rngs), nnx.Linear(16, 8, rngs=rngs)

    def __call__(self, x):
        return self.head(jnp.tanh(self.up(x)))


def batch(seed: int = 0):
    """Time first, a table that all rows share, a number and a key."""
    rng = np.random.default_rng(seed)
    return {
        "series": rng.normal(size=(LENGTH, ROWS, 12)).astype("f"),
        "label": rng.integers(0, 8, ROWS),
        "mask": rng.random(LENGTH) < 0.6,
        "temperature": 0.5 + seed,
        "nested": {"key": jax.random.key(seed)},
    }


DIMS = {"series": 1, "mask": None}


def loss(module, batch):
    """A mean over rows; noise of the key is the same for all of them."""
    x = jnp.mean(batch["series"], axis=0, where=batch["mask"][:, None, None])
    x += 0.1 * jax.random.normal(batch["nested"]["key"], (1, 12))
    logits = module(x) / batch["temperature"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()


def made(mesh="2x1x1", batch_dims=DIMS, **options) -> jaxdist.Parallel:
    return jaxdist.parallelize(Net, loss, optax.sgd(0.5), mesh=mesh, batch_dims=batch_dims, **options)


def by_hand(steps: int) -> list[float]:
    graph, params = nnx.split(Net(nnx.Rngs(jax.random.key(0))))
    losses = []
    for step in range(steps):
        value, grads = jax.value_and_grad(lambda params, step=step: loss(nnx.merge(graph, params), batch(step)))(params)
        params = jax.tree.map(lambda w, g: w - 0.5 * g, params, grads)
        losses.append(float(value))
    return losses


STRATEGIES = [
    ("4x1x1", dict(scope="rows", accumulation=2, zero=3)),
    ("2x1x1", dict(accumulation=4)),
    ("replica=2,data=2", dict(zero=1)),
]


@pytest.mark.smoke
@pytest.mark.parametrize(("mesh", "options"), thinned(STRATEGIES, 3))
def test_arrays_without_rows_are_whole_in_each_part_and_rows_are_where_they_were(mesh, options):
    trainer = made(mesh, **options)
    state = trainer.init(0)
    start = trainer.evaluate(state, {**batch(), "series": batch()["series"][:, :7], "label": batch()["label"][:7]})
    losses = []
    for step in range(3):
        state, metrics = trainer.step(state, batch(step))
        losses.append(float(metrics.loss))
    wanted = by_hand(3)
    assert losses == pytest.approx(wanted, rel=1e-5)
    some = jax.tree.map(jnp.asarray, batch()) | {"series": batch()["series"][:, :7], "label": batch()["label"][:7]}
    assert start["loss"] == pytest.approx(float(loss(Net(nnx.Rngs(jax.random.key(0))), some)), rel=1e-5)


@pytest.mark.slow
def test_a_global_array_is_a_batch_with_its_rows_in_order():
    trainer = made("4x1x1", accumulation=2)
    rows = batch()
    whole = trainer.gradients(trainer.init(0), rows)
    series = np.moveaxis(rows["series"], 1, 0)
    put = lambda a: jax.make_array_from_process_local_data(trainer.batch_sharding, a)
    there = made("4x1x1", {"mask": None}, accumulation=2)
    time_first = lambda module, batch: loss(module, batch | {"series": jnp.moveaxis(batch["series"], 0, 1)})
    given = there.gradients(there.init(0), rows | {"series": put(series), "label": put(rows["label"])}, time_first)
    assert float(given.loss) == pytest.approx(float(whole.loss), rel=1e-6)
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)
    jax.tree.map(close, jax.device_get(given.grads), jax.device_get(whole.grads))


PROCESS = """
import numpy as np, optax, jaxdist
from tests.parity.modules import MLP, cross_entropy, vectors
on_mesh = jaxdist.parallelize(MLP, cross_entropy, optax.sgd(0.3), mesh="4x1x1", zero=3, accumulation=2,
                              devices=jax.devices())
rng, state, curve = np.random.default_rng(0), on_mesh.init(0), []
own = slice(16 // jax.process_count() * jax.process_index(), 16 // jax.process_count() * (jax.process_index() + 1))
for _ in range(2):
    put = lambda a: jax.make_array_from_process_local_data(on_mesh.batch_sharding, a[own], a.shape)
    state, metrics = on_mesh.step(state, {name: put(a) for name, a in vectors(rng).items()})
    curve += [float(metrics.loss), float(metrics.grad_norm)]
tell(curve)
"""


@pytest.mark.slow
def test_two_processes_that_give_their_own_rows_have_one_curve_with_one():
    curves = [curve for processes in (1, 2) for curve in told(PROCESS, processes, devices=4)]
    np.testing.assert_allclose(curves[1:], [curves[0]] * 2, rtol=1e-5)


MISTAKES = [
    (dict(batch_dims={"mas": None}), r"batch_dims names mas, but a batch holds label, mask, nested.key, series, temp"),
    (dict(batch_dims={"label": 1}), r"dim 1 of label counts rows, but its shape is \(8,\)"),
    (dict(batch_dims={"series": 1}), r"a batch holds label of shape \(8,\), mask of shape \(6,\)"),
]


@pytest.mark.parametrize(("options", "told"), MISTAKES)
def test_dims_that_do_not_fit_are_told(options, told):
    with pytest.raises(ValueError, match=told):
        made(**options).lower(batch())


def test_dims_that_are_no_dict_are_told():
    with pytest.raises(ValueError, match=r"batch_dims is 1; give a dict of dims, or None"):
        made(batch_dims=1)
