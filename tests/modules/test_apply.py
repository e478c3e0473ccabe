"""`trainer.apply`: any function of the module and arrays, on the sharded state, equals the module on one device."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdist
from tests.parity.modules import Convolution, cross_entropy, images
from tests.tiers import thinned
from tests.training.test_staged import Decoder
from tests.training.test_staged import batch as sentences


def made(model=Convolution, loss=cross_entropy, mesh="4x1x1", **options) -> jaxdist.Parallel:
    return jaxdist.parallelize(model, loss, optax.sgd(0.1), mesh=mesh, **options)


def logits_and_mean(module, x, scale):
    logits = module(x) * scale
    return {"logits": logits, "mean": logits.mean(), "classes": logits.mean(0)}


ROWS = images(np.random.default_rng(0))["x"]


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("mesh", "options"),
    thinned([("4x1x1", dict(zero=3)), ("2x1x1", dict(scope="rows", zero=1)), ("2x2x1", dict(zero=0))], 3),
)
def test_a_function_of_the_module_has_the_results_of_one_device_and_keeps_rows_sharded(mesh, options):
    if mesh == "2x2x1":
        mesh = "replica=2,data=2"
    trainer = made(mesh=mesh, **options)
    state = trainer.init(0)
    found = trainer.apply(state, logits_and_mean, ROWS, 2.0)
    wanted = logits_and_mean(trainer.module(state), jnp.asarray(ROWS), 2.0)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), jax.device_get(found), wanted)
    ranks = trainer.layout.ranks
    assert found["logits"].addressable_shards[0].data.shape == (len(ROWS) // ranks, 8)
    assert found["classes"].is_fully_replicated
    odd = trainer.apply(state, logits_and_mean, ROWS[:13], 2.0)["logits"]
    np.testing.assert_allclose(odd, wanted["logits"][:13], rtol=1e-5, atol=1e-6)


def test_a_function_is_compiled_once_for_its_shapes_and_training_mode_is_asked_for():
    trainer = made(mesh="2x1x1")
    state = trainer.init(0)
    traced = []

    def drops(scale):
        def call(module, x):
            traced.append(scale)
            return jnp.float32(not module.dropout.deterministic) * scale + 0 * x.sum()

        return call

    for _ in range(3):
        assert float(trainer.apply(state, drops(2.0), ROWS)) == 0
    # Once for the shapes of the results, and once for the program.
    assert traced == [2.0] * 2
    assert float(trainer.apply(state, drops(3.0), ROWS, train=True)) == 3
    assert traced == [2.0] * 2 + [3.0] * 2
    state, _ = trainer.step(state, images(np.random.default_rng(1)))
    assert np.isfinite(float(trainer.apply(state, drops(2.0), ROWS)))
    assert len(traced) == 4


@pytest.mark.slow
def test_a_pipeline_applies_all_of_its_layers():
    trainer = made(Decoder, jaxdist.staged, "2x1x2", scope="rows", accumulation=2, zero=1)
    state = trainer.init(0)
    rows = sentences(np.random.default_rng(0))
    embed = lambda module, batch: jaxdist.scan(module.blocks, module.embed(batch))
    found = jax.device_get(trainer.apply(state, embed, rows))
    wanted = embed(trainer.module(state), jax.tree.map(jnp.asarray, rows))
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


def test_a_function_of_numbers_alone_has_no_rows_and_rows_alone_are_no_function():
    trainer = made(mesh="2x1x1")
    found = trainer.apply(trainer.init(0), lambda module, n: module.head.bias[...] + n, 3)
    np.testing.assert_array_equal(found, np.full(8, 3.0))
    with pytest.raises(ValueError, match="fn is ndarray; give a function of the module"):
        trainer.apply(trainer.init(0), ROWS)
