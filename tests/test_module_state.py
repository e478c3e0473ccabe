"""What `parallelize` keeps of a module: its modes as they were built, its parameters, and what a call leaves in it."""

import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxdist
from jaxdist.training.step import TrainState
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


# Modes: training as built, evaluation as `module.eval()` has it


class Moded(Net):
    def __init__(self, rngs, frozen):
        super().__init__(rngs)
        self.norm = nnx.BatchNorm(16, use_running_average=frozen, rngs=rngs)
        self.norm.var[...] += 0.5
        self.dropout = nnx.Dropout(0.5, deterministic=frozen, rngs=rngs)

    def middle(self, h):
        return self.dropout(self.norm(h))


def evaluated(rngs):
    module = Moded(rngs, frozen=False)
    module.eval()
    return module


class Bridged(Net):
    """A Linen batch norm that is frozen in its own constructor, and a frozen dropout of nnx."""

    def __init__(self, rngs):
        super().__init__(rngs)
        norm = nnx.bridge.ToNNX(nn.BatchNorm(use_running_average=True), rngs=rngs)
        self.norm = nnx.bridge.lazy_init(norm, jnp.ones((1, 16)))
        self.dropout = nnx.Dropout(0.5, deterministic=True, rngs=rngs)

    def middle(self, h):
        return self.dropout(self.norm(h, mutable=["batch_stats"]))


FROZEN = {"constructor": lambda rngs: Moded(rngs, frozen=True), "eval": evaluated, "Linen": Bridged}


@pytest.mark.parametrize(
    ("name", "options"), [("constructor", dict(scope="rows")), ("eval", dict(zero=3)), ("Linen", dict(zero=1))]
)
def test_what_was_built_frozen_stays_frozen(name, options):
    state, module = assert_equals_one_device(FROZEN[name], **options)
    wanted = nnx.to_pure_dict(nnx.state(module, nnx.BatchStat))
    got = {"norm": {name: state.variables["norm"][name] for name in wanted["norm"]}}
    jax.tree.map(np.testing.assert_array_equal, got, wanted)


def flags(module: nnx.Module) -> tuple[bool, bool]:
    return module.norm.use_running_average, module.dropout.deterministic


@pytest.mark.parametrize("frozen", [True, False])
def test_steps_have_the_modes_of_the_constructor_and_evaluations_those_of_eval(frozen):
    seen = []

    def loss(module, batch, train):
        seen.append((train, *flags(module)))
        return cross_entropy(module, batch)

    on_mesh = made(lambda rngs: Moded(rngs, frozen), loss=loss)
    on_mesh.lower(rows())
    assert {train: modes for train, *modes in seen} == {True: [frozen, frozen]}
    module = on_mesh.model.merge(on_mesh.model.abstract, on_mesh.model.variables, train=False)
    assert flags(module) == (True, True)


def test_a_mode_that_the_constructor_leaves_open_is_that_of_training():
    """`nnx.MultiHeadAttention` with dropout does."""

    def make(rngs):
        return nnx.MultiHeadAttention(2, 16, decode=False, dropout_rate=0.1, rngs=rngs)

    model = made(make).model
    assert make(nnx.Rngs(0)).deterministic is None
    assert model.merge(model.abstract, model.variables, train=True).deterministic is False
    assert model.merge(model.abstract, model.variables, train=False).deterministic is True


def test_the_axes_of_batch_norm_are_for_steps_alone():
    """A module that is taken off the mesh knows no mesh axis."""
    model = made(lambda rngs: Moded(rngs, False), scope="rows").model
    assert model.merge(model.abstract, model.variables, train=True).norm.axis_name == ("data",)
    assert model.merge(model.abstract, model.variables, train=False).norm.axis_name is None


# Parameters and attributes


def _assign(module, x):
    module.up.kernel[...] = 0.5 * module.up.kernel[...]


def _set_value(module, x):
    module.up.kernel.set_value(module.up.kernel.get_value() * 0.5)


def _replace(module, x):
    module.head.bias = nnx.Param(module.head.bias[...] + 1)


def _swap(module, x):
    module.a, module.b = module.b, module.a


def _update(module, x):
    nnx.update(module, jax.tree.map(lambda a: 0.5 * a, nnx.state(module, nnx.Param)))


def _create(module, x):
    module.late = nnx.Linear(12, 16, rngs=nnx.Rngs(0))


def _append(module, x):
    module.parts.append(nnx.Linear(12, 16, use_bias=False, rngs=nnx.Rngs(0)))


def _remove(module, x):
    del module.a


def _reshape(module, x):
    module.a = nnx.Param(jnp.zeros(3))


def _retype(module, x):
    module.a = nnx.Variable(module.a[...])


def _tie(module, x):
    module.b = module.a


def _untie(module, x):
    module.upper.kernel = nnx.Param(module.up.kernel[...])


def _count(module, x):
    module.calls += 1


def _log(module, x):
    module.log.append(x.sum())


def _more(module, x):
    module.parts.append(nnx.Dropout(0.1, deterministic=True))


def _sow(module, x):
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        module.sow(nnx.Intermediate, "h", x)


def _grow(module, x):
    module.seen = nnx.Variable(jnp.concatenate([module.seen[...], jnp.zeros(1)]))


def _retouch(module, x):
    module.seen.set_value(module.seen[...].astype(jnp.int32))


def everything(module, rngs):
    module.a, module.b = nnx.Param(jnp.ones(16)), nnx.Param(jnp.zeros(16))
    module.upper = nnx.Linear(12, 16, use_bias=False, rngs=rngs)
    module.upper.kernel = module.up.kernel
    module.parts, module.log, module.calls = nnx.List([]), [], 0
    module.seen = nnx.Variable(jnp.zeros(2))


REFUSED = [
    (_assign, "assigns parameter up.kernel; parameters are made in __init__ and changed by the optimizer alone: keep"),
    (_set_value, "assigns parameter up.kernel"),
    (_replace, "assigns parameter head.bias"),
    (_swap, "assigns parameter a, b"),
    (_update, "assigns parameter a, b, head.bias, head.kernel, up.kernel"),
    (_create, "adds parameter late.bias, late.kernel"),
    (_append, "adds parameter parts.0.kernel"),
    (_remove, "removes parameter a"),
    (_reshape, "changes the shape or dtype of parameter a"),
    (_retype, "removes parameter a"),
    (_tie, "removes parameter b"),
    (_untie, "adds parameter upper.kernel"),
    (_count, "changes calls, which the next step would not see because it is no nnx.Variable"),
    (_log, "changes log, which the next step"),
    (_more, "changes parts.0.broadcast_dims"),
    (_sow, "adds h.0; a step keeps"),
    (_grow, "changes the shape or dtype of seen"),
    (_retouch, "changes the shape or dtype of seen"),
]


@pytest.mark.parametrize("scope", ["batch", "rows"])
@pytest.mark.parametrize(("call", "told"), REFUSED, ids=[call.__name__[1:] for call, _ in REFUSED])
def test_a_call_that_leaves_what_a_step_cannot_keep_is_told(call, told, scope):
    on_mesh = made(lambda rngs: Net(rngs, everything, call), scope=scope)
    with pytest.raises(ValueError, match=f"calling the module {told}"):
        on_mesh.lower(rows())


def test_an_assignment_inside_a_transformation_of_flax_is_told():
    def call(module, x):
        nnx.remat(_assign)(module, x)

    with pytest.raises(ValueError, match=r"calling the module assigns parameter up.kernel"):
        made(lambda rngs: Net(rngs, call=call), precision="bfloat16", zero=3).lower(rows())


def test_a_layer_of_flax_that_assigns_parameters_is_told():
    def state(module, rngs):
        module.up = nnx.SpectralNorm(module.up, rngs=rngs)

    with pytest.raises(ValueError, match=r"assigns parameter up.layer_instance.kernel"):
        made(lambda rngs: Net(rngs, state)).lower(rows())


class Block(nnx.Module):
    def __init__(self, rngs, call=lambda module, x: None):
        self.up, self.call = nnx.Linear(12, 12, rngs=rngs), call

    def __call__(self, x):
        self.call(self, x)
        return x + jnp.tanh(self.up(x))


class Deep(nnx.Module):
    def __init__(self, rngs, block=lambda module, x: None, embed=lambda module, x: None, head=lambda module, x: None):
        self.blocks = jaxdist.stack(lambda rngs: Block(rngs, block), 2, rngs)
        self.up, self.head_ = nnx.Linear(12, 12, use_bias=False, rngs=rngs), nnx.Linear(12, 8, rngs=rngs)
        self.calls = embed, head
        self.deterministic = False

    def embed(self, batch):
        self.calls[0](self, batch["x"])
        return self.up(batch["x"])

    def head(self, x, batch):
        self.calls[1](self, x)
        logits = self.head_(x) if not self.deterministic else 2 * self.head_(x)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()


@pytest.mark.parametrize("mesh", ["2x1x1", "1x1x2"])
@pytest.mark.parametrize("where", ["block", "embed", "head"])
def test_stacked_layers_and_stages_tell_it_too(where, mesh):
    on_mesh = made(lambda rngs: Deep(rngs, **{where: _assign}), mesh, jaxdist.staged, scope="rows", accumulation=2)
    with pytest.raises(ValueError, match=r"calling the module assigns parameter up.kernel"):
        on_mesh.lower(rows())


def test_what_a_stage_stores_is_told():
    on_mesh = made(lambda rngs: Deep(rngs, head=_sow), "1x1x2", jaxdist.staged, scope="rows", accumulation=2)
    with pytest.raises(ValueError, match=r"calling the module adds h.0"):
        on_mesh.lower(rows())


@pytest.mark.slow
def test_a_pipeline_evaluates_in_evaluation_mode():
    losses = {}
    for mesh in ("1x1x1", "1x1x2"):
        on_mesh = made(Deep, mesh, jaxdist.staged, scope="rows", accumulation=2)
        losses[mesh] = on_mesh.evaluate(on_mesh.init(0), rows())["loss"]
    module = Deep(nnx.Rngs(jax.random.key(0)))
    module.eval()
    assert losses["1x1x1"] == pytest.approx(float(jaxdist.staged(module, rows())), rel=1e-5)
    assert losses["1x1x2"] == pytest.approx(losses["1x1x1"], rel=1e-5)


class Transformed(Net):
    """Parameters come out of these transformations as other objects, and as the same arrays."""

    def __call__(self, x):
        h = nnx.remat(lambda up, x: jnp.tanh(up(x)))(self.up, x)
        return nnx.jit(lambda head, h: head(h))(self.head, h)


def test_transformations_of_flax_assign_nothing():
    assert_equals_one_device(Transformed, zero=3)


HELD = {
    "bare array": (lambda m, rngs: setattr(m, "scale", jnp.ones(16)), "holds scale, an array that is no nnx.Variable"),
    "bare list": (lambda m, rngs: setattr(m, "scales", [jnp.ones(16)]), "holds scales, an array"),
    "dict": (lambda m, rngs: setattr(m, "s", nnx.data({"a": jnp.ones(3)})), "holds s.a, an array that is no"),
    "tree": (lambda m, rngs: setattr(m, "v", nnx.Variable({"a": jnp.ones(3)})), "v holds a dict; give each array"),
}


@pytest.mark.parametrize("name", HELD)
def test_arrays_that_flax_takes_for_settings_are_told(name):
    state, told = HELD[name]
    with pytest.raises(ValueError, match=told):
        made(lambda rngs: Net(rngs, state))


# Variables


def state_of_all_kinds(module, rngs):
    module.calls = nnx.Variable(jnp.zeros((), jnp.int32))
    module.started = nnx.Variable(jnp.zeros((), bool))
    module.constant = nnx.Variable(jnp.asarray([0.1, 1e8, 3.3]))
    module.order = np.arange(3)
    module.average = nnx.Variable(jnp.zeros((12, 16)))
    module.mean = nnx.BatchStat(jnp.zeros(12))
    module.tokens = nnx.Variable(0)


def all_kinds(module, x):
    module.calls[...] += 1
    module.started[...] = True
    module.average[...] = 0.9 * module.average[...] + 0.1 * module.up.kernel[...]
    module.mean[...] = 0.9 * module.mean[...] + 0.1 * x.mean(0)
    module.tokens.set_value(module.tokens.get_value() + 2)


@pytest.mark.parametrize("scope", ["batch", "rows", "device"])
def test_variables_are_those_of_one_device_and_the_same_on_all(scope):
    """Counts of calls, flags, averages of weights, constants, and statistics that are means over rows."""
    state, module = assert_equals_one_device(lambda rngs: Net(rngs, state_of_all_kinds, all_kinds), scope=scope)
    wanted = nnx.to_pure_dict(nnx.state(module, nnx.Not(nnx.Param)))
    assert int(wanted["calls"]) == STEPS
    close = ("average", "mean")
    for name, value in wanted.items():
        got = state.variables[name]
        np.testing.assert_allclose(got, value, rtol=1e-5 if name in close else 0, atol=1e-7 if name in close else 0)


def rows_by_shape(module, x):
    module.seen[...] += x.shape[0]


def rows_by_value(module, x):
    module.seen[...] += (x > 0).sum(dtype=jnp.int32)


def hidden_by_remat(module, x):
    nnx.remat(rows_by_value)(module, x)


def any_row(module, x):
    module.flag[...] |= (x > 2).any()


def largest(module, x):
    module.peak[...] = jnp.maximum(module.peak[...], x.max())


def whole_statistic(module, x):
    module.histogram[...] += (x > 0).sum(dtype=jnp.int32)


def average(module, x):
    module.average.update(values=x.mean(1))


def of_a_key(module, x):
    module.seen[...] = jax.random.randint(module.rngs.noise(), (), 0, 100)


def counters(module, rngs):
    module.seen, module.flag = nnx.Variable(jnp.zeros((), jnp.int32)), nnx.Variable(jnp.zeros((), bool))
    module.peak, module.average = nnx.Variable(jnp.zeros(())), nnx.metrics.Average()
    module.histogram, module.rngs = nnx.BatchStat(jnp.zeros((), jnp.int32)), rngs.fork()


OF_ROWS = [
    (rows_by_shape, "seen"),
    (rows_by_value, "seen"),
    (hidden_by_remat, "seen"),
    (any_row, "flag"),
    (largest, "peak"),
    (whole_statistic, "histogram"),
    (average, "average.count"),
    (of_a_key, "seen"),
]


@pytest.mark.parametrize("scope", ["rows", "device"])
@pytest.mark.parametrize(("call", "name"), OF_ROWS, ids=[call.__name__ for call, _ in OF_ROWS])
def test_what_devices_make_of_their_own_rows_is_told(call, name, scope):
    on_mesh = made(lambda rngs: Net(rngs, counters, call), scope=scope)
    with pytest.raises(ValueError, match=f"makes {name} of the rows, .*: use scope 'batch', or, for a mean over the"):
        on_mesh.lower(rows())


def test_under_batch_they_are_those_of_one_device():
    def call(module, x):
        for one in (rows_by_shape, rows_by_value, any_row, largest, whole_statistic, average):
            one(module, x)

    state, module = assert_equals_one_device(lambda rngs: Net(rngs, counters, call))
    assert int(state.variables["seen"]) > STEPS * 16
    for path, wanted in jax.tree.leaves_with_path(nnx.to_pure_dict(nnx.state(module, nnx.Not(nnx.Param)))):
        got = state.variables
        for key in path:
            got = got[key.key]
        np.testing.assert_allclose(bits(got), bits(wanted), rtol=1e-5)


class Random(Net):
    """Draws as often as its rows say, and advances a key of its own by splitting it."""

    def __init__(self, rngs):
        super().__init__(rngs)
        self.rngs, self.key = rngs.fork(), nnx.Variable(rngs())

    def __call__(self, x):
        self.rngs.noise.count[...] += (x > 0).sum().astype(jnp.uint32)
        key, now = jax.random.split(self.key[...])
        self.key[...] = key
        return super().__call__(x), jax.random.uniform(now)


def drawn(module, batch):
    logits, number = module(batch["x"])
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()
    return loss, {"mean": number, "square": number**2}


def test_random_numbers_are_new_in_each_step_and_other_on_each_device():
    """Counts stay the same on all devices even where rows decide how often they draw."""
    on_mesh = made(Random, loss=drawn, scope="rows")
    state = on_mesh.init(0)
    found = []
    for step in range(STEPS):
        keys = [jax.random.fold_in(jax.device_get(state.variables["key"]), rank) for rank in range(4)]
        numbers = np.array([jax.random.uniform(jax.random.split(key)[1]) for key in keys])
        state, metrics = on_mesh.step(state, rows(step))
        assert_copies_are_equal(state.variables)
        np.testing.assert_allclose(metrics.further["mean"], numbers.mean(), rtol=1e-6)
        np.testing.assert_allclose(metrics.further["square"], np.mean(numbers**2), rtol=1e-6)
        found.extend(numbers)
    assert len({round(float(number), 6) for number in found}) == 4 * STEPS
