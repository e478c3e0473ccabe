"""The variables of a module after steps on a mesh are those of one device, and the same on every device."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from tests.modules.net import STEPS, Net, assert_copies_are_equal, assert_equals_one_device, bits, made, rows


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
    with pytest.raises(
        ValueError, match=f"computes {name} from the rows, .*: use scope 'batch', or, for a mean over the"
    ):
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
