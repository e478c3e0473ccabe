"""A module of two matrices on a mesh and, as plain Flax and optax train it, on one device."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jaxdist
from jaxdist.training.forward.step import TrainState
from tests.parity.modules import cross_entropy, vectors

RATE, STEPS = 0.3, 3


def rows(step: int = 0) -> dict[str, np.ndarray]:
    return vectors(np.random.default_rng(step))


class Net(nnx.Module):
    """Two matrices; `state` makes what else it holds, `call` is made in the forward pass."""

    def __init__(self, rngs, state=lambda module, rngs: None, call=lambda module, x: None):
        self.up = nnx.Linear(12, 16, use_bias=False, rngs=rngs)
        self.head = nnx.Linear(16, 8, rngs=rngs)
        self.call = call
        state(self, rngs)

    def middle(self, h):
        return h

    def __call__(self, x):
        self.call(self, x)
        return self.head(self.middle(jnp.tanh(self.up(x))))


def one_device(make) -> tuple[list[float], nnx.Module]:
    """(losses, module) after plain Flax and optax have taken the steps, as a user would write them."""
    module = make(nnx.Rngs(jax.random.key(0)))
    optimizer = nnx.Optimizer(module, optax.sgd(RATE), wrt=nnx.Param)

    @nnx.jit
    def step(module, optimizer, batch):
        loss, grads = nnx.value_and_grad(lambda module: cross_entropy(module, batch)[0])(module)
        optimizer.update(module, grads)
        return loss

    return [float(step(module, optimizer, rows(i))) for i in range(STEPS)], module


def made(make, mesh="4x1x1", loss=cross_entropy, **options) -> jaxdist.Parallel:
    return jaxdist.parallelize(make, loss, optax.sgd(RATE), mesh=mesh, **options)


def trained(make, **options) -> tuple[list[float], TrainState]:
    on_mesh = made(make, **options)
    state, losses = on_mesh.init(0), []
    for i in range(STEPS):
        state, metrics = on_mesh.step(state, rows(i))
        losses.append(float(metrics.loss))
    return losses, state


def bits(a: jax.Array) -> np.ndarray:
    return np.asarray(jax.random.key_data(a) if jnp.issubdtype(a.dtype, jax.dtypes.prng_key) else a)


def assert_copies_are_equal(tree) -> None:
    """Every device's copy of what is replicated, bit by bit."""
    for path, a in jax.tree.leaves_with_path(tree):
        if a.sharding.is_fully_replicated:
            first, *others = [bits(shard.data) for shard in a.addressable_shards]
            for copy in others:
                np.testing.assert_array_equal(copy, first, err_msg=jax.tree_util.keystr(path))


def assert_equals_one_device(make, **options) -> tuple[TrainState, nnx.Module]:
    """Losses, and parameters after the steps, which are the gradients of all of them with plain SGD."""
    wanted, module = one_device(make)
    losses, state = trained(make, **options)
    np.testing.assert_allclose(losses, wanted, rtol=1e-5)
    assert_copies_are_equal((state.params, state.variables))
    params = nnx.to_pure_dict(nnx.state(module, nnx.Param))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), state.params, params)
    return state, module
