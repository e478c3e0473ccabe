"""Moments in bfloat16: rounded without a bias, alike on every mesh, and near the moments in f32."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxdist.mesh import devices_asked, make_mesh, parse_mesh
from jaxdist.optimizers.table import UPDATE_RULES
from jaxdist.parallel.pipeline.stages import Stages
from jaxdist.parallel.placement import Placement
from jaxdist.training.forward.optimizer import optimizer
from jaxdist.training.forward.rounded_moments import _seed, random_bits, rounded, stochastic
from tests.parity import cases
from tests.training.test_optimizer import BASE, GRADS, PARAMS, ROLES


def rounds(a, count, number=0):
    return np.asarray(stochastic(a, _seed(jnp.asarray(count), number)), np.float32)


def test_a_number_goes_to_a_neighbour_as_often_as_the_mean_needs():
    x = np.float32(1 + 0.3 * 2**-7)  # bfloat16 has 8 bits: 1 and 1 + 2^-7 are neighbours
    found = rounds(jnp.full((64, 256), x), 5)
    assert set(np.unique(found)) == {1.0, 1 + 2**-7}
    up = (found > 1).mean()
    assert abs(up - 0.3) < 4 * np.sqrt(0.3 * 0.7 / found.size)
    assert (found == rounds(jnp.full((64, 256), x), 5)).all()
    for other in (rounds(jnp.full((64, 256), x), 6), rounds(jnp.full((64, 256), x), 5, 1)):
        alike = ((other > 1) == (found > 1)).mean()
        assert abs(alike - (0.3**2 + 0.7**2)) < 0.02


@pytest.mark.parametrize("x", [0.0, -0.0, 1.5, -3.0, 2.0**-130, np.inf])
def test_what_bfloat16_holds_stays(x):
    np.testing.assert_array_equal(rounds(jnp.full(1000, x, jnp.float32), 3), np.float32(x))


def test_the_bits_do_not_depend_on_how_an_array_lies():
    """Split over devices, or folded into the stages of a pipeline."""
    x = np.random.default_rng(0).normal(size=(4, 6, 8)).astype(np.float32)
    wanted = rounds(jnp.asarray(x), 7)
    mesh = make_mesh(parse_mesh("2x2x1"), jax.devices()[:4])
    with jax.set_mesh(mesh):
        split = jax.device_put(x, jax.NamedSharding(mesh, jax.P(None, "data", "model")))
        made = jax.jit(stochastic)(split, _seed(jnp.asarray(7), 0))
        assert jax.typeof(made).sharding.spec == jax.P(None, "data", "model")
        np.testing.assert_array_equal(np.asarray(made, np.float32), wanted)
    stages = Stages(ranks=2, virtual=1, sizes=(2, 2))
    folded = stages.fold({"blocks": jnp.asarray(x)})["blocks"]
    np.testing.assert_array_equal(rounds(folded, 7).reshape(x.shape), wanted)


@pytest.mark.parametrize(("mesh", "sizes"), [("data=2,pipeline=2", (1, 3)), ("pipeline=3", (2, 1, 1))])
def test_layers_of_stages_with_padding_have_their_own_bits(mesh, sizes):
    x = np.random.default_rng(0).normal(size=(4, 6, 8)).astype(np.float32)
    seed = _seed(jnp.asarray(7), 0)
    wanted = np.asarray(jax.jit(random_bits)(x, seed))
    stages = Stages(ranks=len(sizes), virtual=1, sizes=sizes)
    places = stages.places({"blocks": {"w": Placement(*[jax.P()] * 4)}, "table": Placement(*[jax.P()] * 4)})
    layers, split = places["blocks"]["w"].role.layers, "data" if "data" in mesh else None
    assert not places["table"].role.layers
    devices = make_mesh(parse_mesh(mesh), jax.devices()[: devices_asked(parse_mesh(mesh))])
    with jax.set_mesh(devices):
        lies = jax.NamedSharding(devices, jax.P(None, "pipeline", None, split, None))
        folded = jax.device_put(stages.fold({"blocks": jnp.asarray(x)})["blocks"], lies)
        found = jax.jit(random_bits, static_argnums=2)(folded, seed, layers)
        assert jax.typeof(found).sharding.spec == lies.spec
    np.testing.assert_array_equal(np.asarray(found).reshape(-1, 6, 8)[stages.valid.ravel()], wanted)


@pytest.mark.parametrize("name", [name for name, row in UPDATE_RULES.items() if row.moments])
def test_every_rule_of_the_table_keeps_its_moments_in_bfloat16(name):
    """The first update is that of f32 to the bit, because rounding comes after it; the second is near it."""
    config = BASE.model_copy(update={"name": name})
    params, updates = [], []
    for moments in ("float32", "bfloat16"):
        rule = optimizer(config.model_copy(update={"moments": moments}), 10, ROLES)
        state = rule.init(PARAMS)
        first, state = rule.update(GRADS[0], state, PARAMS)
        second, state = rule.update(GRADS[1], state, PARAMS)
        updates.append((first, second))
        params.append({str(a.dtype) for a in jax.tree.leaves(state) if a.ndim})
    assert params == [{"float32"}, {"bfloat16"}]
    (first, second), (first_too, second_too) = updates
    jax.tree.map(np.testing.assert_array_equal, first, first_too)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0.02), second, second_too)


def test_a_second_moment_grows_where_rounding_to_the_nearest_stays():
    """At beta2 0.999 a change is soon below half of the last place of bfloat16."""
    grads = {"w": jnp.ones(512)}
    adam = optax.scale_by_adam(b2=0.999)
    rule = rounded(adam, ("mu", "nu"))

    def nearest(state):
        return state._replace(nu=jax.tree.map(lambda a: a.astype(jnp.bfloat16).astype(jnp.float32), state.nu))

    def both(states, _):
        ours, stuck = states
        return (rule.update(grads, ours)[1], nearest(adam.update(grads, stuck)[1])), None

    (ours, stuck), _ = jax.lax.scan(both, (rule.init(grads), adam.init(grads)), length=3000)
    wanted = 1 - 0.999**3000
    assert float(ours.nu["w"].astype(jnp.float32).mean()) == pytest.approx(wanted, rel=0.02)
    assert float(stuck.nu["w"].mean()) < 0.8 * wanted


@pytest.mark.slow
def test_a_mesh_trains_as_one_device():
    """Of moments that differ in the last bit of f32, one in some 10,000 is rounded to the other neighbour."""
    rule = rounded(optax.chain(optax.trace(0.9), optax.scale_by_schedule(lambda count: -0.5)), ("trace",))
    model = cases.MODEL.model_copy(update={"layers": 2})
    one = cases.train("1x1x1", optimizer=rule, model=model)
    for mesh, options in {"2x2x1": dict(stage=3), "1x1x2": dict(accumulation=4)}.items():
        cases.assert_equal(cases.train(mesh, optimizer=rule, model=model, **options), one, tolerance=1e-4)
