"""What the options of `jaxdist.parallelize` do, in numbers: scopes, random keys, precision, several processes."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxdist
from tests.parity.modules import MLP, cross_entropy, vectors
from tests.processes import told
from tests.tiers import thinned

RATE = 0.3


class Normed(nnx.Module):
    """A batch norm between two matrices."""

    def __init__(self, rngs):
        self.up = nnx.Linear(12, 16, use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.head = nnx.Linear(16, 8, rngs=rngs)

    def __call__(self, x):
        return self.head(jnp.tanh(self.norm(self.up(x))))


class Mixture(nnx.Module):
    """Every row goes through every expert, of 4, and the router weights what they return."""

    def __init__(self, rngs):
        self.router = nnx.Linear(12, 4, rngs=rngs)
        self.up = nnx.Param(rngs.params.normal((4, 12, 16)), axes=("experts", "embed", "mlp"))
        self.down = nnx.Param(0.3 * rngs.params.normal((4, 16, 8)), axes=("experts", "mlp", None))

    def __call__(self, x):
        h = jnp.tanh(jnp.einsum("bd,edf->bef", x, self.up[...]))
        return jnp.einsum("be,bef,efo->bo", nnx.softmax(self.router(x)), h, self.down[...])


class Noisy(nnx.Module):
    """Draws one number in each call."""

    def __init__(self, rngs):
        self.scale, self.rngs = nnx.Param(jnp.ones(())), rngs.fork()

    def __call__(self):
        return self.scale * jax.random.uniform(self.rngs.noise())


def noise(module, batch):
    drawn = module()
    return drawn, {"square": drawn**2}


def made(model, loss=cross_entropy, mesh="4x1x1", **options) -> jaxdist.Parallel:
    return jaxdist.parallelize(model, loss, optax.sgd(RATE), mesh=mesh, **options)


def rows(seed: int = 0):
    return vectors(np.random.default_rng(seed))


def test_under_rows_every_device_draws_numbers_of_its_own():
    """Of its rank's key, and others in the next step; under batch all rows see one draw."""
    on_mesh = made(Noisy, noise, scope="rows")
    state = on_mesh.init(0)
    is_key = lambda a: jax.dtypes.issubdtype(a.dtype, jax.dtypes.prng_key)
    (key,) = jax.device_get([a for a in jax.tree.leaves(state.variables) if is_key(a)])
    for step, seed in enumerate((1, 2)):
        scale = float(state.params["scale"])
        state, metrics = on_mesh.step(state, rows(seed))
        streams = [jax.random.fold_in(key, rank) for rank in range(4)]
        drawn = np.array([jax.random.uniform(jax.random.fold_in(stream, step)) for stream in streams])
        assert np.std(drawn) > 0.05
        np.testing.assert_allclose(metrics.loss, scale * drawn.mean(), rtol=1e-6)
        np.testing.assert_allclose(metrics.further["square"], scale**2 * np.mean(drawn**2), rtol=1e-6)
    together = made(Noisy, noise)
    _, metrics = together.step(together.init(0), rows())
    np.testing.assert_allclose(metrics.further["square"], metrics.loss**2, rtol=1e-6)


def by_hand(module: nnx.Module, batch, parts: int) -> tuple[float, nnx.State, nnx.State]:
    """(loss, parameters, statistics) after a step of SGD, of `parts` that have statistics of their own."""
    graph, params, rest = nnx.split(module, nnx.Param, ...)

    @jax.jit
    @partial(jax.value_and_grad, has_aux=True)
    def gradient(params, part):
        module = nnx.merge(graph, params, rest, copy=True)
        loss, _ = cross_entropy(module, part)
        return loss, nnx.split(module, nnx.Param, ...)[2]

    cut = [jax.tree.map(lambda a, i=i: np.split(a, parts)[i], batch) for i in range(parts)]
    found = [gradient(params, part) for part in cut]
    mean = lambda *values: sum(values) / parts
    (loss, rest), grads = jax.tree.map(mean, *found)
    return float(loss), jax.tree.map(lambda w, g: w - RATE * g, params, grads), rest


@pytest.mark.parametrize(("zero", "scope", "parts"), thinned([(3, "device", 4), (0, "rows", 1), (0, "device", 4)], 3))
def test_statistics_are_those_of_a_device_or_of_all(zero, scope, parts):
    """What torch's DDP does with and without synchronised batch norm; running statistics are averaged."""
    on_mesh = made(Normed, scope=scope, zero=zero)
    state, metrics = on_mesh.step(on_mesh.init(0), rows())
    module = Normed(nnx.Rngs(jax.random.key(0)))
    loss, params, rest = by_hand(module, rows(), parts)
    assert abs(loss - by_hand(module, rows(), 5 - parts)[0]) > 1e-3  # the scopes can be told apart
    assert float(metrics.loss) == pytest.approx(loss, rel=1e-5)
    close = partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
    jax.tree.map(close, jax.device_get(state.params), nnx.to_pure_dict(params))
    jax.tree.map(close, jax.device_get(state.variables), nnx.to_pure_dict(rest))


def after_steps(mesh: str, steps: int = 3, **options) -> tuple[list[float], jaxdist.Parallel, dict]:
    """(losses, what `parallelize` returned, parameters) of a mixture after some steps."""
    on_mesh = made(Mixture, mesh=mesh, **options)
    state = on_mesh.init(0)
    losses = []
    for seed in range(steps):
        state, metrics = on_mesh.step(state, rows(seed))
        losses.append(float(metrics.loss))
    return losses, on_mesh, state.params


EXPERTS = {"experts": ("expert",)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "zero", "rules"),
    [
        ("data=2,expert=2", 3, EXPERTS),
        ("expert=4,model=2", 1, {**EXPERTS, "mlp": ("model",)}),
    ],
)
def test_experts_of_a_module_lie_apart_and_learn_what_they_do_on_one_device(mesh, zero, rules):
    """The gradient of each step is in the parameters after it. ZeRO splits a device's own experts."""
    wanted, _, on_one = after_steps("1x1x1")
    losses, on_mesh, params = after_steps(mesh, zero=zero, rules=rules)
    assert losses == pytest.approx(wanted, rel=1e-5)
    close = partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
    jax.tree.map(close, jax.device_get(params), jax.device_get(on_one))
    up = params["up"].addressable_shards[0].data.shape
    sizes = on_mesh.mesh.shape
    assert up == (4 // sizes["expert"] // sizes["data"], 12, 16 // sizes["model"])


PRECISIONS = [
    (3, "mixed", "bfloat16"),
    (0, "bfloat16", "bfloat16"),
    (0, "mixed", "bfloat16"),
    (3, "float32", "float32"),
]


@pytest.mark.parametrize(("zero", "precision", "dtype"), thinned(PRECISIONS, 4))
def test_precision_is_that_of_weights_and_rows_and_parameters_stay_float32(zero, precision, dtype):
    """`mixed` keeps the weights that follow from the parameters; those move by less than it can tell."""
    seen = set()

    def loss(module, batch):
        seen.add((module.head.kernel.dtype, batch["x"].dtype, batch["label"].dtype))
        return cross_entropy(module, batch)

    on_mesh = made(MLP, loss, precision=precision, zero=zero, scope="rows")
    state = on_mesh.init(0)
    wanted = float(cross_entropy(on_mesh.module(state), jax.tree.map(jnp.asarray, rows()))[0])
    seen.clear()
    state, metrics = on_mesh.step(state, rows())
    assert seen == {(jnp.dtype(dtype), jnp.dtype(dtype), jnp.dtype("int32"))}
    assert float(metrics.loss) == pytest.approx(wanted, rel=1e-6 if precision == "float32" else 5e-3)
    assert {a.dtype for a in jax.tree.leaves(state.params)} == {jnp.dtype("float32")}
    half = jax.tree.map(lambda a: a.astype(jnp.bfloat16), state.params)
    assert all((a != b).any() for a, b in zip(jax.tree.leaves(half), jax.tree.leaves(state.params), strict=True))
    jax.tree.map(np.testing.assert_array_equal, state.weights, half if precision == "mixed" else None)


PROCESS = """
import numpy as np, optax, jaxdist
from tests.parity.modules import MLP, cross_entropy, vectors
on_mesh = jaxdist.parallelize(MLP, cross_entropy, optax.sgd(0.3), mesh="replica=2,data=2", zero=3, accumulation=2,
                              scope="rows", devices=jax.devices())
rng, state, curve = np.random.default_rng(0), on_mesh.init(0), []
for _ in range(3):
    state, metrics = on_mesh.step(state, vectors(rng))
    curve += [float(metrics.loss), float(metrics.grad_norm)]
rest = {name: a[:13] for name, a in vectors(rng).items()}
tell([*curve, on_mesh.evaluate(state, rest)["loss"]])
"""


@pytest.mark.slow
def test_two_processes_that_give_the_same_rows_have_one_curve_with_one():
    """13 rows of an evaluation do not divide."""
    curves = [curve for processes in (1, 2) for curve in told(PROCESS, processes, devices=4)]
    assert len(curves) == 3
    np.testing.assert_allclose(curves[1:], [curves[0]] * 2, rtol=1e-5)
