"""Variables whose dims have names, such as codebooks, teachers and queues, are split by `rules` as parameters are."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.modules.net import Net, assert_equals_one_device, made, rows

RULES = {"mlp": ("model",), "codes": ("model",), "kept": ()}
OPTIONS = dict(mesh="2x2x1", rules=RULES)
WHOLE = {"codes": 32 * 16 * 4, "teacher": 12 * 16 * 4, "queue": 24 * 16 * 4, "seen": 4}
"""Bytes of each variable."""


class Quantized(Net):
    """Adds to each row's features the nearest of its codes, which follow the features that they are nearest to."""

    def __init__(self, rngs):
        super().__init__(rngs)
        self.up.kernel = nnx.Param(self.up.kernel[...], axes=(None, "mlp"))
        self.codes = nnx.Variable(rngs.params.normal((32, 16)), axes=("codes", None))
        self.teacher = nnx.Variable(jnp.array(self.up.kernel[...]), axes=("kept", "mlp"))
        # As Flax annotates it; the dims that are not named are the last ones.
        self.queue = nnx.BatchStat(jnp.zeros((24, 16)), out_sharding=("codes",))
        self.seen = nnx.Variable(jnp.zeros((), jnp.int32))

    def middle(self, h):
        codes = self.codes[...]
        nearest = jnp.argmin(jnp.sum((h[:, None] - codes[None]) ** 2, -1), 1)
        chosen = jax.nn.one_hot(nearest, 32)
        count = chosen.sum(0)[:, None]
        features = jax.lax.stop_gradient(h)
        self.codes[...] = jnp.where(count > 0, 0.9 * codes + 0.1 * chosen.T @ features / jnp.maximum(count, 1), codes)
        self.teacher[...] = 0.9 * self.teacher[...] + 0.1 * self.up.kernel[...]
        self.queue[...] = jnp.concatenate([features, self.queue[...]])[:24]
        self.seen[...] += len(h)
        return h + codes[nearest]


def held(variables) -> dict[str, int]:
    """Bytes of each variable on the first device."""
    return {name: a.addressable_shards[0].data.nbytes for name, a in variables.items()}


def test_they_are_those_of_one_device_and_lie_in_parts(tmp_path):
    with nnx.use_eager_sharding(False):  # plain Flax would look for a mesh
        state, module = assert_equals_one_device(Quantized, zero=3, **OPTIONS)
    halves = {name: size // 2 for name, size in WHOLE.items()} | {"seen": 4}
    assert held(state.variables) == halves
    wanted = nnx.to_pure_dict(nnx.state(module, nnx.Not(nnx.Param)))
    assert not np.allclose(wanted["codes"], made(Quantized, **OPTIONS).init(0).variables["codes"])
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    jax.tree.map(close, dict(state.variables), wanted)

    trainer = made(Quantized, zero=3, **OPTIONS)
    jax.tree.map(close, nnx.to_pure_dict(nnx.state(trainer.module(state), nnx.Not(nnx.Param))), wanted)
    trainer.save(tmp_path, state)
    after, _ = trainer.step(state, rows(7))
    there = made(Quantized, mesh="1x4x1", rules=RULES)
    restored = there.restore(tmp_path)
    assert held(restored.variables) == {name: size // 4 for name, size in WHOLE.items()} | {"seen": 4}
    again, _ = there.step(restored, rows(7))
    jax.tree.map(close, jax.device_get(again.variables), jax.device_get(after.variables))
    jax.tree.map(close, jax.device_get(again.params), jax.device_get(after.params))


@pytest.mark.slow
def test_given_ones_are_split_and_a_step_is_that_of_one_device(tmp_path):
    trainer = made(Quantized, **OPTIONS)
    state, _ = trainer.step(trainer.init(0), rows())
    trainer.export(tmp_path / "weights.safetensors", state)
    given = trainer.init(1, params=tmp_path / "weights.safetensors")
    np.testing.assert_array_equal(given.variables["codes"], state.variables["codes"])
    assert held(given.variables) == held(state.variables)
    assert trainer.evaluate(given, rows(1)) == trainer.evaluate(state, rows(1))
    found = trainer.verify(rows())
    assert found.equal, str(found)


def named(*names, shape=(6, 5)):
    return lambda rngs: Net(
        rngs, lambda module, rngs: setattr(module, "memory", nnx.Variable(jnp.zeros(shape), axes=names))
    )


WRONG = [
    (
        named("codes", None, shape=(33, 4)),
        {},
        r"memory \(33, 4\) has a dim 'codes' of 33, which does not divide by model=2",
    ),
    (named("codes", None, None), {}, r"an nnx.Variable of shape \(6, 5\) has 3 logical axes"),
    (named("codes", None), dict(scope="rows"), "rules split model, which scope 'rows' cannot do"),
]


def test_mistakes():
    for make, options, told in WRONG:
        with pytest.raises(ValueError, match=told):
            made(make, mesh="2x2x1", rules={"codes": ("model",)}, **options)
