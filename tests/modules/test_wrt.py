"""`parallelize(..., wrt=...)`: some parameters learn what they do on one device, and the rest costs nothing."""

from collections import Counter
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxdist
from jaxdist.programs.hlo import Collective
from jaxdist.sharding import named
from tests.parity import cases
from tests.parity.modules import MLP, Convolution, Deep, cross_entropy, images, vectors
from tests.tiers import exhaustive, thinned
from tests.training.test_staged import Decoder, logical
from tests.training.test_staged import batch as sentences

STEPS = 3


class Wide(nnx.Module):
    """Two matrices that a model axis can split."""

    def __init__(self, rngs):
        self.up = nnx.Param(0.3 * rngs.params.normal((12, 16)), axes=("embed", "mlp"))
        self.down = nnx.Param(0.3 * rngs.params.normal((16, 8)), axes=("mlp", None))

    def __call__(self, x):
        return jnp.tanh(x @ self.up) @ self.down


def optimizer():
    return optax.sgd(0.3, momentum=0.9)


def made(model=MLP, mesh="4x1x1", wrt=None, loss=cross_entropy, **options) -> jaxdist.Parallel:
    return jaxdist.parallelize(model, loss, optimizer(), mesh=mesh, wrt=wrt, **options)


def first_layer(name: str) -> bool:
    return name.startswith("layers.0")


def kernels(name: str) -> bool:
    return name.endswith("kernel")


def up(name: str) -> bool:
    return name == "up"


def one_device(model, wrt, make=vectors, seed: int = 0) -> tuple[list[float], dict[str, np.ndarray]]:
    """(losses, parameters) after plain Flax and optax have taken the steps, as a user would write them."""
    module = model(nnx.Rngs(jax.random.key(seed)))

    def chosen(path, value) -> bool:
        return isinstance(value, nnx.Param) and wrt(".".join(map(str, path)))

    rule = nnx.Optimizer(module, optimizer(), wrt=chosen)
    rng = np.random.default_rng(seed)

    @nnx.jit
    def step(module, rule, batch):
        loss = lambda module: cross_entropy(module, batch)[0]
        loss, grads = nnx.value_and_grad(loss, argnums=nnx.DiffState(0, chosen))(module)
        rule.update(module, grads)
        return loss

    losses = [float(step(module, rule, make(rng))) for _ in range(STEPS)]
    return losses, jax.device_get(named(nnx.to_pure_dict(nnx.state(module, nnx.Param))))


def trained(on_mesh: jaxdist.Parallel, make=vectors, seed: int = 0) -> tuple[list[float], jaxdist.api.TrainState]:
    state = on_mesh.init(seed)
    rng = np.random.default_rng(seed)
    losses = []
    for _ in range(STEPS):
        state, metrics = on_mesh.step(state, make(rng))
        losses.append(float(metrics.loss))
    return losses, state


CASES = [
    (MLP, first_layer, "4x1x1", dict(zero=3, scope="rows")),
    (MLP, kernels, "replica=2,data=2", dict(zero=2, scope="rows")),
    (MLP, first_layer, "4x1x1", dict(zero=3, accumulation=2)),
    (Wide, up, "2x2x1", dict(zero=3, rules={"mlp": ("model",)})),
    (Deep, lambda name: name == "blocks.up.kernel", "4x1x1", dict(zero=3)),
    (Deep, lambda name: name.startswith("head"), "2x1x1", dict(zero=2)),
    (MLP, first_layer, "4x1x1", dict(zero=1)),
    (MLP, kernels, "2x1x1", dict(zero=0)),
    (Wide, lambda name: name == "down", "2x2x1", dict(zero=0, rules={"mlp": ("model",)})),
]


@pytest.mark.parametrize(("model", "wrt", "mesh", "options"), [*thinned(CASES[:4], 4), *exhaustive(CASES[4:])])
def test_the_chosen_parameters_learn_what_they_do_on_one_device_and_the_others_keep_their_bits(
    model, wrt, mesh, options
):
    wanted, params = one_device(model, wrt)
    on_mesh = made(model, mesh, wrt, **options)
    start = jax.device_get(named(on_mesh.init(0).frozen))
    losses, state = trained(on_mesh)
    np.testing.assert_allclose(losses, wanted, rtol=1e-5)
    learned = named(state.params)
    frozen = named(state.frozen)
    assert learned.keys() == set(filter(wrt, params))
    assert frozen.keys() == params.keys() - learned.keys()
    for name, leaf in learned.items():
        np.testing.assert_allclose(leaf, params[name], rtol=1e-5, atol=1e-6, err_msg=name)
    for name, leaf in frozen.items():
        np.testing.assert_array_equal(leaf, start[name], err_msg=name)
    kept = {leaf.shape for leaf in jax.tree.leaves(state.optimizer) if leaf.ndim}
    assert kept == {leaf.shape for leaf in learned.values()}
    assert len([leaf for leaf in jax.tree.leaves(state.optimizer) if leaf.ndim]) == len(learned)


def test_batch_statistics_move_although_the_scale_beside_them_is_frozen():
    on_mesh = made(Convolution, "2x1x1", lambda name: name.startswith("head"), zero=1)
    start = on_mesh.init(0)
    mean = np.array(named(start.variables)["norm.mean"])
    scale = np.array(named(start.frozen)["norm.scale"])
    state, _ = on_mesh.step(start, images(np.random.default_rng(0)))
    np.testing.assert_array_equal(named(state.frozen)["norm.scale"], scale)
    assert np.abs(named(state.variables)["norm.mean"] - mean).max() > 1e-3


def elements(found: list[Collective]) -> Counter:
    """How many are summed and gathered over the devices, without scalars."""
    kinds = {"all-reduce": "sum", "reduce-scatter": "sum", "all-gather": "gather"}
    total: Counter = Counter()
    for one in found:
        total[kinds[one.kind]] += one.count * one.array_elements
    return total


@pytest.mark.parametrize("zero", [*thinned([(3,), (0,)], 2), *exhaustive([(1,), (2,)])])
def test_a_frozen_parameter_has_no_gradient_to_sum_and_lies_as_zero_would_split_it(zero):
    """Under "rows" each gradient is reduced once; what is gathered stays the same."""
    batch = vectors(np.random.default_rng(0))
    all_of_them = made(zero=zero, scope="rows")
    some = made(zero=zero, scope="rows", wrt=first_layer)
    frozen = sum(leaf.size for name, leaf in named(some.model.abstract).items() if not first_layer(name))
    moved, less = (elements(on_mesh.collectives(batch)) for on_mesh in (all_of_them, some))
    assert moved["sum"] - less["sum"] == frozen
    assert moved["gather"] == less["gather"]
    assert (less["gather"] > 0) == (zero > 0)
    whole = jax.tree.map(lambda a: a.spec, named(all_of_them.shardings.params))
    parts = jax.tree.map(lambda a: a.spec, named(some.shardings.params) | named(some.shardings.frozen))
    assert parts == whole
    assert any(any(spec.partitions) for spec in parts.values()) == (zero > 0)


@pytest.mark.slow
def test_mixed_precision_keeps_trained_weights_alone_from_step_to_step():
    on_mesh = made(wrt=first_layer, zero=3, precision="mixed", scope="rows")
    losses, state = trained(on_mesh)
    assert named(state.weights).keys() == named(state.params).keys()
    assert {leaf.dtype for leaf in jax.tree.leaves(state.weights)} == {jnp.dtype("bfloat16")}
    wanted, _ = one_device(MLP, first_layer)
    np.testing.assert_allclose(losses, wanted, rtol=1e-2)


@pytest.mark.slow
def test_a_checkpoint_holds_the_frozen_parameters_too(tmp_path):
    there = made(mesh="4x1x1", zero=3, wrt=kernels)
    _, state = trained(there)
    there.save(tmp_path, state)
    here = made(mesh="2x1x1", zero=1, wrt=kernels)
    restored = here.restore(tmp_path)
    for name in ("params", "frozen", "optimizer"):
        jax.tree.map(np.testing.assert_array_equal, getattr(restored, name), getattr(state, name))
    batch = vectors(np.random.default_rng(5))
    wanted = there.evaluate(state, batch)["loss"]
    assert here.evaluate(restored, batch)["loss"] == pytest.approx(wanted, rel=1e-6)
    module = here.module(restored)
    assert float(cross_entropy(module, jax.tree.map(jnp.asarray, batch))[0]) == pytest.approx(wanted, rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wrt", "told"),
    [
        (first_layer, "head.kernel is trained there and frozen here"),
        (None, "head.bias is frozen there and trained here"),
    ],
)
def test_a_checkpoint_of_other_trained_parameters_is_refused(wrt, told, tmp_path):
    there = made(mesh="1x1x1", wrt=kernels)
    there.save(tmp_path, there.init(0))
    with pytest.raises(ValueError, match=f"{told}; give parallelize the same wrt"):
        made(mesh="1x1x1", wrt=wrt).restore(tmp_path)


PARTS = {
    "table": lambda name: name.startswith("words"),
    "blocks": lambda name: name.startswith("blocks"),
    "mlp and norm": lambda name: "mlp" in name or name.startswith("norm"),
}
STAGED = [
    ("blocks", "2x1x2", dict(zero=3, accumulation=2, schedule="zb-u")),
    ("mlp and norm", "1x1x2", dict(zero=0, accumulation=4)),
    ("table", "1x1x2", dict(zero=1, accumulation=2, schedule="gpipe")),
    ("mlp and norm", "1x1x2", dict(zero=0, accumulation=4, schedule="interleaved", virtual_stages=2)),
    ("blocks", "1x1x3", dict(zero=0, accumulation=4, schedule="zb-u")),
]


def steps_of_stages(mesh: str, wrt: Callable[[str], bool], **options) -> cases.Outcome:
    rule = optax.chain(cases.remember(), optax.sgd(0.1))
    on_mesh = jaxdist.parallelize(Decoder, jaxdist.staged, rule, mesh=mesh, wrt=wrt, scope="rows", **options)
    state = on_mesh.init(0)
    rng = np.random.default_rng(1)
    before = logical(on_mesh, state.params)
    start = jax.device_get(state.frozen)
    losses, norms, gradients = [], [], []
    for _ in range(STEPS):
        state, metrics = on_mesh.step(state, sentences(rng))
        losses.append(float(metrics.loss))
        norms.append(float(metrics.grad_norm))
        gradients.append(logical(on_mesh, state.optimizer[0]))
    jax.tree.map(np.testing.assert_array_equal, state.frozen, start)
    return cases.Outcome(losses, norms, gradients[0], before, logical(on_mesh, state.params))


@pytest.mark.slow
@pytest.mark.parametrize(("part", "mesh", "options"), [STAGED[0], *exhaustive(STAGED[1:])])
def test_parts_of_a_staged_module_learn_what_they_do_on_one_device(part, mesh, options):
    got = steps_of_stages(mesh, PARTS[part], **options)
    wanted = steps_of_stages("1x1x1", PARTS[part])
    cases.assert_equal(got, wanted)
    assert all(map(PARTS[part], named(wanted.gradient)))


def test_what_is_printed_tells_how_many_parameters_are_trained():
    on_mesh = made(wrt=first_layer)
    sizes = {name: leaf.size for name, leaf in named(on_mesh.model.abstract).items()}
    trained = sum(size for name, size in sizes.items() if first_layer(name))
    assert repr(on_mesh).startswith(f"{sum(sizes.values()):,} parameters ({trained} of them trained) on data=4")
    assert "trained" not in repr(made())


@pytest.mark.parametrize(
    ("wrt", "told"),
    [
        ("head", "wrt is 'head'; give a function of a parameter's path"),
        (lambda name: False, "wrt is false for all 6 parameters .*; choose one to train"),
    ],
)
def test_mistakes(wrt, told):
    with pytest.raises(ValueError, match=told):
        made(wrt=wrt)
