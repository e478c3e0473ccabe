"""Losses that are sums over what counts, each with its weight: divided once, on any mesh, for any accumulation."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxdist
from jaxdist.parallel import divisors
from tests.foreign.plain import by_jaxdist, by_optax
from tests.parity import cases
from tests.parity.modules import MLP
from tests.tiers import thinned

ROWS = 16


def masked(seed: int) -> dict[str, np.ndarray]:
    """Rows of which the first few count more often than the last."""
    rng = np.random.default_rng(seed)
    mask = rng.random(ROWS) < np.linspace(1, 0.2, ROWS)
    return {"x": rng.normal(size=(ROWS, 12)).astype("f"), "label": rng.integers(0, 8, ROWS), "mask": mask}


def sums(module, batch):
    logits = module(batch["x"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]) * batch["mask"]
    right = (logits.argmax(-1) == batch["label"]) * batch["mask"]
    return losses.sum(), batch["mask"].sum(), right.sum().astype(losses.dtype)


def mean(module, batch):
    total, weight, _ = sums(module, batch)
    return total / weight


def pair(module, batch):
    return sums(module, batch)[:2]


def pairs(module, batch):
    total, weight, right = sums(module, batch)
    return {"loss": (total, weight), "accuracy": (right, weight)}


BATCHES = [masked(seed) for seed in range(3)]
STRATEGIES = [
    (pair, "4x1x1", dict(scope="rows", accumulation=2, zero=3)),
    (pairs, "replica=2,data=2", dict(accumulation=4)),
    (pairs, "2x1x1", dict(scope="rows", accumulation=4, zero=1)),
]


@pytest.mark.parametrize(("loss", "mesh", "options"), thinned(STRATEGIES, 3))
def test_sums_over_weights_are_those_of_one_device_and_one_micro_batch(loss, mesh, options):
    wanted = by_optax(MLP, mean, BATCHES, optax.sgd(0.5))
    assert cases.moved(wanted) > 0.01
    cases.assert_equal(by_jaxdist(MLP, loss, BATCHES, optax.sgd(0.5), mesh, **options), wanted)


def made(loss, mesh="2x1x1", **options) -> jaxdist.Parallel:
    return jaxdist.parallelize(MLP, loss, optax.sgd(0.1), mesh=mesh, **options)


def test_further_sums_have_weights_of_their_own():
    """In a step and in an evaluation, of rows that do not divide too."""
    trainer = made(pairs, accumulation=2, scope="rows")
    state = trainer.init(0)
    for rows in (16, 13):
        batch = {name: a[:rows] for name, a in BATCHES[0].items()}
        total, weight, right = sums(trainer.module(state), jax.tree.map(jnp.asarray, batch))
        wanted = {"loss": float(total / weight), "accuracy": float(right / weight)}
        assert trainer.evaluate(state, batch) == pytest.approx(wanted, rel=1e-5)
        if rows == 16:
            kept = jax.tree.map(jnp.copy, state)
            _, metrics = trainer.step(state, batch)
            state = kept
            assert float(metrics.loss) == pytest.approx(wanted["loss"], rel=1e-5)
            assert float(metrics.further["accuracy"]) == pytest.approx(wanted["accuracy"], rel=1e-5)
            assert int(metrics.count) == batch["mask"].sum()


def test_a_batch_in_which_nothing_counts_has_no_gradient():
    trainer = made(pair)
    _, metrics = trainer.step(trainer.init(0), BATCHES[0] | {"mask": np.zeros(ROWS, bool)})
    assert (float(metrics.loss), float(metrics.grad_norm), int(metrics.skipped)) == (0, 0, 0)


@pytest.mark.parametrize(
    ("options", "told"),
    thinned(
        [
            (dict(accumulation=4), "2 in one and by 4 in another of the 4 parts"),
            (dict(scope="rows"), "6 in one and by 8 in another of the 2 parts"),
            (dict(scope="device", accumulation=2), "2 in one and by 4 in another of the 4 parts"),
        ],
        3,
    ),
)
def test_a_mean_of_unequal_weights_is_warned_about_at_the_first_step_that_shows_it(options, told):
    alternate = np.arange(ROWS) % 2 == 0
    trainer = made(mean, **options)
    state = trainer.init(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        state, _ = trainer.step(state, BATCHES[0] | {"mask": alternate})
    with pytest.warns(UserWarning, match=f"loss_fn divides by {told}") as warned:
        state, _ = trainer.step(state, BATCHES[0] | {"mask": alternate | (np.arange(ROWS) >= 4)})
    assert warned[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer.step(state, BATCHES[1])


@pytest.mark.parametrize(("loss", "options"), [(mean, dict()), (pair, dict(accumulation=4))])
def test_where_no_mean_of_means_is_made_nothing_is_said(loss, options, recwarn):
    trainer = made(loss, **options)
    trainer.step(trainer.init(0), BATCHES[0])
    assert not recwarn.list


def test_a_loss_that_looks_across_devices_by_itself_is_let_be(recwarn):
    def over_devices(module, batch):
        total, weight = pair(module, batch)
        return total / jax.lax.pmean(weight.astype("float32"), "data")

    trainer = made(over_devices, scope="rows")
    _, metrics = trainer.step(trainer.init(0), BATCHES[0])
    wanted = mean(MLP(nnx.Rngs(jax.random.key(0))), jax.tree.map(jnp.asarray, BATCHES[0]))
    assert float(metrics.loss) == pytest.approx(float(wanted), rel=1e-5)
    assert not recwarn.list


SQUARES = {
    "mean": (lambda losses, mask, w: losses.mean(), None),
    "masked": (lambda losses, mask, w: (losses * mask).sum() / jnp.maximum(mask.sum(), 1) + 0.1 * (w**2).sum(), (1, 2)),
    "where": (lambda losses, mask, w: jnp.mean(losses, where=mask), (1, 2)),
    "average": (lambda losses, mask, w: jnp.average(losses, weights=mask.astype("f")), (1, 2)),
    "each row": (lambda losses, mask, w: (losses * mask / mask.sum()).sum(), (1, 2)),
    "in a call": (lambda losses, mask, w: jax.jit(lambda a, b: (a * b).sum() / b.sum())(losses, mask), (1, 2)),
    "of a module": (lambda losses, mask, w: losses.mean() / (w**2).sum(), None),
    "softmax": (lambda losses, mask, w: jax.nn.softmax(losses).mean(), None),
}


@pytest.mark.smoke
@pytest.mark.parametrize("name", SQUARES)
def test_divisors_that_are_in_the_data_are_found(name):
    loss, wanted = SQUARES[name]
    batch = {"x": np.ones((8, 3), "f"), "mask": np.arange(8) % 3 > 0}
    w = jax.ShapeDtypeStruct((3,), "float32")
    found = divisors.of_loss(lambda w, b: loss((b["x"] @ w) ** 2, b["mask"], w), w, batch)
    assert (None if found is None else divisors.differ(found, jax.tree.leaves(batch), [], 4)) == wanted


VALUES = [
    (
        lambda m, b: (m(b["x"]), b["mask"].sum()),
        r"the sum of loss: shape \(16, 8\) .*; return the sum over what counts",
    ),
    (lambda m, b: {"loss": (m(b["x"]).sum(), b["mask"])}, r"loss with a weight of shape \(16,\) and dtype bool"),
    (lambda m, b: {"mse": (m(b["x"]).sum(), 3)}, r"loss_fn returned a dict of mse; name one of them 'loss'"),
]


@pytest.mark.parametrize(("loss", "told"), VALUES)
def test_mistakes_are_told_when_the_step_is_traced(loss, told):
    with pytest.raises(ValueError, match=told):
        made(loss).lower(BATCHES[0])
