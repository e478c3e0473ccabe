"""Loops of one's own: `gradients` and `update` are the halves of a step, and several losses and optimizers fit in."""

import os
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxdist
from tests.parity.modules import MLP, Convolution, cross_entropy, images, vectors
from tests.tiers import thinned


def made(model=MLP, optimizer=None, mesh="4x1x1", loss=cross_entropy, **options) -> jaxdist.Parallel:
    return jaxdist.parallelize(model, loss, optimizer or optax.adam(0.01), mesh=mesh, **options)


def rows(seed: int = 0, make=vectors):
    return make(np.random.default_rng(seed))


# Optimised code may fuse the end of one half with the beginning of the other, and rounds once where two round twice.
FUSED = "xla_backend_optimization_level=0" not in os.environ["XLA_FLAGS"]
same = partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6) if FUSED else np.testing.assert_array_equal


def bits(tree):
    raw = lambda a: jax.random.key_data(a) if jax.dtypes.issubdtype(a.dtype, jax.dtypes.prng_key) else a
    return jax.tree.map(lambda a: np.asarray(raw(a)), tree)


HALVES = [
    (Convolution, images, "4x1x1", dict(zero=3, accumulation=2)),
    (MLP, vectors, "replica=2,data=2", dict(zero=1, scope="rows", precision="mixed")),
    (MLP, vectors, "2x1x1", dict(zero=2, optimizer=optax.polyak_sgd(1.0), scope="rows")),
]


@pytest.mark.smoke
@pytest.mark.parametrize(("model", "make", "mesh", "options"), thinned(HALVES, 3))
def test_a_step_is_its_two_halves_to_the_bit(model, make, mesh, options):
    trainer = made(model, mesh=mesh, **options)
    whole, halves = trainer.init(0), trainer.init(0)
    for seed in range(3):
        whole, wanted = trainer.step(whole, rows(seed, make))
        gradients = trainer.gradients(halves, rows(seed, make))
        halves, got = trainer.update(halves, gradients)
        jax.tree.map(same, bits(got), bits(wanted))
        jax.tree.map(same, bits(halves), bits(whole))


@pytest.mark.slow
def test_gradients_of_several_losses_are_added_and_lie_as_parameters_do():
    """One of them is given for a call; the sum of both is the gradient of the sum."""

    def decay(module, batch):
        return sum(jnp.sum(p[...] ** 2) for p in (module.head.kernel, module.head.bias))

    def both(module, batch):
        return cross_entropy(module, batch)[0] + decay(module, batch)

    trainer = made(optimizer=optax.sgd(0.1), zero=3)
    state, batch = trainer.init(0), rows()
    first, second = trainer.gradients(state, batch), trainer.gradients(state, batch, decay)
    wanted = made(optimizer=optax.sgd(0.1), loss=both, zero=3).gradients(state, batch)
    with jax.set_mesh(trainer.mesh):
        total = jax.jit(lambda a, b: jax.tree.map(jnp.add, a, b))(first.grads, second.grads)
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)
    jax.tree.map(close, jax.device_get(total), jax.device_get(wanted.grads))
    assert jax.tree.map(lambda a: a.sharding.spec, first.grads) == jax.tree.map(
        lambda a: a.spec, trainer.shardings.params
    )
    after, metrics = trainer.update(state, first._replace(grads=total))
    assert float(metrics.loss) == float(first.loss)
    assert int(after.step) == 1


class Pair(nnx.Module):
    """A generator and a discriminator."""

    def __init__(self, rngs):
        self.g, self.d = nnx.Linear(4, 12, rngs=rngs), MLP(rngs)


def of_generator(pair, batch):
    return optax.sigmoid_binary_cross_entropy(pair.d(pair.g(batch["z"]))[:, 0], jnp.ones(16)).mean()


def of_discriminator(pair, batch):
    fake = jax.lax.stop_gradient(pair.g(batch["z"]))
    true, false = pair.d(batch["x"])[:, 0], pair.d(fake)[:, 0]
    return (jax.nn.softplus(-true) + jax.nn.softplus(false)).mean()


@pytest.mark.slow
def test_a_gan_learns_what_it_does_on_one_device():
    rule = optax.multi_transform(
        {"g": optax.sgd(0.2), "d": optax.sgd(0.1, momentum=0.5)},
        lambda params: {name: jax.tree.map(lambda _, name=name: name, part) for name, part in params.items()},
    )
    batches = [rows(seed) | {"z": np.random.default_rng(seed).normal(size=(16, 4)).astype("f")} for seed in range(3)]
    trainer = made(Pair, rule, loss=of_discriminator, zero=2, mesh="replica=2,data=2")
    state = trainer.init(0)
    params = jax.device_get(state.params)
    kept = rule.init(params)
    graph, _, rest = nnx.split(Pair(nnx.Rngs(0)), nnx.Param, ...)
    for batch in batches:
        found = {"d": trainer.gradients(state, batch), "g": trainer.gradients(state, batch, of_generator)}
        grads = {name: gradients.grads[name] for name, gradients in found.items()}
        state, _ = trainer.update(state, found["d"]._replace(grads=grads))

        def loss(params, loss_fn, batch=batch):
            return loss_fn(nnx.merge(graph, params, rest, copy=True), batch)

        grads = {"d": jax.grad(loss)(params, of_discriminator)["d"], "g": jax.grad(loss)(params, of_generator)["g"]}
        updates, kept = rule.update(grads, kept, params)
        params = optax.apply_updates(params, updates)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), jax.device_get(state.params), params
    )


@pytest.mark.exhaustive
def test_a_line_search_is_given_its_function_and_a_plateau_the_loss():
    trainer = made(optimizer=optax.lbfgs(), mesh="2x1x1", zero=1)
    state, batch = trainer.init(0), rows()
    with pytest.raises(ValueError, match=r"needs grad and value_fn, which step does not know; call gradients"):
        trainer.step(state, batch)

    def value(params):
        return cross_entropy(trainer.model.merge(params, {}, train=True), jax.tree.map(jnp.asarray, batch))[0]

    losses = []
    for _ in range(3):
        found = trainer.gradients(state, batch)
        losses.append(float(found.loss))
        state, _ = trainer.update(state, found, value=found.loss, grad=found.grads, value_fn=value)
    params = jax.device_get(trainer.init(0).params)
    rule = optax.lbfgs()
    kept = rule.init(params)
    for wanted in losses:
        loss, grads = jax.value_and_grad(value)(params)
        assert wanted == pytest.approx(float(loss), rel=1e-4)
        updates, kept = rule.update(grads, kept, params, value=loss, grad=grads, value_fn=value)
        params = optax.apply_updates(params, updates)
    plateau = optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau(patience=1, rtol=1.0))
    trainer = made(optimizer=plateau, mesh="2x1x1")
    state = trainer.init(0)
    for _ in range(3):
        state, _ = trainer.step(state, batch)
    assert float(state.optimizer[1].scale) < 1


def test_mistakes():
    trainer = made(mesh="2x1x1")
    state = trainer.init(0)
    found = trainer.gradients(state, rows())
    with pytest.raises(ValueError, match=r"gradients is dict; give what gradients\(state, batch\) returned"):
        trainer.update(state, found.grads)
    with pytest.raises(ValueError, match=r"the gradient of head.bias is missing, and the parameter has "):
        trainer.update(state, found._replace(grads={**found.grads, "head": {"kernel": found.grads["head"]["kernel"]}}))
    with pytest.raises(ValueError, match=r"loss_fn takes \(module\), but is called as loss_fn\(module, batch\)"):
        trainer.gradients(state, rows(), lambda module: 0.0)
