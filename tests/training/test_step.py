"""Steps that are skipped, dropout, and what gradients are added in."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from jaxdist import models
from jaxdist.config import OptimizerConfig
from jaxdist.mesh import devices_asked, make_mesh, parse_mesh
from jaxdist.models import Stack
from jaxdist.models.inputs import BlockInputs
from jaxdist.parallel.placement import Placement
from jaxdist.parallel.placing import ZeroOptions
from jaxdist.sharding import Layout
from jaxdist.training.forward.base import ForwardOptions
from jaxdist.training.forward.decoder import DecoderForward
from jaxdist.training.forward.optimizer import optimizer
from jaxdist.training.forward.step import Step
from tests.models.roles import roles
from tests.parity import cases

pytestmark = pytest.mark.smoke


class Setup:
    def __init__(
        self,
        mesh: str = "2x1x1",
        model=cases.MODEL,
        config: OptimizerConfig | None = None,
        stage: int = 0,
        inside: bool = True,
        **options,
    ):
        shape = parse_mesh(mesh)
        self.mesh = make_mesh(shape, jax.devices()[: devices_asked(shape)])
        self.layout = Layout.on(self.mesh)
        self.model = models.build(model, self.layout)
        tx = optimizer(config or OptimizerConfig(warmup=5), 20, roles(self.model))
        options = ForwardOptions(dropout=model.dropout > 0, **options)
        self.forward = DecoderForward(self.model, self.layout, ZeroOptions(stage), options, inside)
        self.step = Step(self.forward, tx)

    def batch(self, accumulation: int = 1):
        return cases.on_mesh(self.mesh, self.layout, *cases.rows(), accumulation)


def test_a_step_that_is_not_finite_changes_nothing_but_the_counts():
    setup = Setup()
    with jax.set_mesh(setup.mesh):
        take = jax.jit(setup.step.train)
        state, _ = take(jax.jit(setup.step.init)(jax.random.key(0)), setup.batch())
        bad = jax.tree.map(lambda a: a, state.params)
        bad["norm"]["bias"] = bad["norm"]["bias"].at[3].set(jnp.nan)
        broken, metrics = take(state._replace(params=bad), setup.batch())
        assert not np.isfinite(metrics.loss)
        assert (int(broken.step), int(broken.skipped), int(broken.skipped_in_a_row)) == (2, 1, 1)
        jax.tree.map(np.testing.assert_array_equal, broken.optimizer, state.optimizer)  # the schedule's count too
        jax.tree.map(np.testing.assert_array_equal, broken.params, bad)

        healed, metrics = take(broken._replace(params=state.params), setup.batch())
        assert np.isfinite(metrics.loss)
        assert (int(healed.step), int(healed.skipped), int(healed.skipped_in_a_row)) == (3, 1, 0)
        straight, _ = take(state, setup.batch())
        jax.tree.map(np.testing.assert_array_equal, healed.params, straight.params)


def test_no_label_that_counts_is_no_division_by_zero():
    setup = Setup()
    with jax.set_mesh(setup.mesh):
        batch = setup.batch() | {"labels": jnp.full_like(setup.batch()["labels"], -1)}
        _, metrics = jax.jit(setup.step.train)(jax.jit(setup.step.init)(jax.random.key(0)), batch)
    assert float(metrics.loss) == 0
    assert int(metrics.count) == 0


@pytest.mark.slow
def test_dropout_depends_on_seed_step_and_row_and_is_off_in_evaluation():
    model = cases.MODEL.model_copy(update={"dropout": 0.3})

    def loss(seed: int, step: int) -> float:
        setup = Setup("1x1x1", model, seed=seed)
        with jax.set_mesh(setup.mesh):
            params = jax.jit(setup.model.init)(jax.random.key(0))
            return float(jax.jit(setup.step.gradients)(params, {}, setup.batch(), step).loss)

    values = {(seed, step): loss(seed, step) for seed in (0, 1) for step in (0, 1)}
    assert len(set(values.values())) == 4

    plain, dropped = Setup("1x1x1"), Setup("1x1x1", model)
    with jax.set_mesh(plain.mesh):
        params = jax.jit(plain.model.init)(jax.random.key(0))
        assert float(plain.step.evaluate(params, {}, plain.batch())[0]) == float(
            dropped.step.evaluate(params, {}, dropped.batch())[0]
        )


def test_rows_have_masks_of_their_own():
    from jaxdist.models.dropout import dropout
    from jaxdist.sharding import ONE_DEVICE

    keys = jax.vmap(lambda i: jax.random.fold_in(jax.random.key(0), i))(jnp.arange(4))
    with jax.set_mesh(Setup("1x1x1").mesh):
        out = dropout(ONE_DEVICE, jnp.ones((4, 50, 40)), 0.25, keys, site=0)
    assert len({np.asarray(row).tobytes() for row in out}) == 4
    assert float(out.mean()) == pytest.approx(1, abs=0.05)
    assert float((out == 0).mean()) == pytest.approx(0.25, abs=0.02)


def test_layers_and_places_have_masks_of_their_own():
    """Dropout with one key for all layers would pass every test of parity."""
    setup = Setup("1x1x1", cases.MODEL.model_copy(update={"dropout": 0.5, "layers": 2}))
    seen = []

    def block(layer, x, inputs, kind=0):
        seen.append(np.asarray(jax.random.key_data(inputs.keys)))
        return x, {}

    forward = setup.forward
    embed = lambda w, tokens, inputs: block(None, jnp.zeros((2, 3, 4)), inputs)[0]
    forward.model = SimpleNamespace(
        stacks=[Stack("", 0, range(1), {})], block=block, embed=embed, cast=lambda params, *_, **__: params
    )
    with jax.disable_jit():
        tokens, keys = jnp.zeros((1, 2, 3), int), jax.random.split(jax.random.key(0))[None]
        forward.places = {"blocks": {"w": Placement(*4 * [jax.P()])}}
        forward.hidden({"blocks": {"w": jnp.zeros((2, 1))}}, None, tokens, BlockInputs(keys))
    assert len({row.tobytes() for keys in seen for row in keys}) == 3 * 2  # embedding and two layers, two rows each


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 0, 3])
def test_equal_micro_batches_add_up_to_one_under_bfloat16(stage):
    """To the rounding of a number. Gradients of tens of micro-batches, added up in bfloat16, would stop growing."""
    setup = Setup("1x1x1", dtype=jnp.bfloat16, stage=stage)
    tokens, labels = (a[:1] for a in cases.rows())
    with jax.set_mesh(setup.mesh):
        params = jax.jit(setup.model.init)(jax.random.key(0))

        @jax.jit
        def gradient(batch):
            return setup.step.gradients(setup.step.forward.weights(params), {}, batch).grads

        repeated = (np.repeat(a, 64, axis=0) for a in (tokens, labels))
        many = gradient(cases.on_mesh(setup.mesh, setup.layout, *repeated, 64))
        one = gradient(cases.on_mesh(setup.mesh, setup.layout, tokens, labels))
    for (path, a), b in zip(jax.tree.leaves_with_path(many), jax.tree.leaves(one), strict=True):
        assert np.linalg.norm(a - b) <= 5e-3 * np.linalg.norm(b), jax.tree_util.keystr(path)


def test_gradients_are_added_and_kept_in_f32_under_bfloat16():
    setup = Setup("2x1x1", dtype=jnp.bfloat16)
    with jax.set_mesh(setup.mesh):
        params = jax.eval_shape(setup.model.init, jax.random.key(0))
        step = setup.step
        program = jax.make_jaxpr(lambda params, batch: step.gradients(step.forward.weights(params), {}, batch))(
            params, setup.batch(4)
        )
    scans = [eqn for eqn in program.jaxpr.eqns if eqn.primitive.name == "scan"]
    carries = [v.aval for eqn in scans for v in eqn.outvars]  # they return nothing else
    leaves = jax.tree.leaves(params)
    assert {aval.shape for aval in carries} >= {leaf.shape for leaf in leaves}
    assert {aval.dtype for aval in carries} == {jnp.dtype("float32")}
    assert {aval.dtype for aval in program.out_avals[:-1]} == {jnp.dtype("float32")}


def carried(program) -> set:
    """(shape, dtype) of all that the scans of a program carry from turn to turn, and of those within them."""
    found = set()
    for eqn in program.eqns:
        if eqn.primitive.name == "scan":
            turn = eqn.params["jaxpr"].jaxpr.outvars  # what is not carried is stacked, over one more dim
            pairs = zip(eqn.outvars, turn, strict=True)
            found |= {(v.aval.shape, v.aval.dtype) for v, one in pairs if v.aval.shape == one.aval.shape}
        for inner in jaxprs_in_params(eqn.params):
            found |= carried(inner)
    return found


@pytest.mark.parametrize(("stage", "inside"), [(0, True), (1, True), (2, True), (2, False), (3, True), (3, False)])
def test_every_loop_adds_gradients_in_f32_under_bfloat16(stage, inside):
    """Over micro-batches, and from stage 2 on over those within each layer, whose sums end in a sink."""
    setup = Setup("2x1x1", dtype=jnp.bfloat16, stage=stage, inside=inside)
    step, forward = setup.step, setup.forward
    with jax.set_mesh(setup.mesh):
        params = jax.eval_shape(forward.init, jax.random.key(0))[0]
        gradients = lambda params, batch: step.gradients(forward.weights(params), {}, batch)
        program = jax.make_jaxpr(gradients)(params, setup.batch(4)).jaxpr
        sums = jax.eval_shape(lambda params: forward.accumulators(forward.weights(params)), params)
    layers = {leaf.shape[1:] for leaf in jax.tree.leaves(params["blocks"])}
    loops = carried(program)
    in_layers = stage >= 2 and inside
    wanted = {leaf.shape for leaf in jax.tree.leaves(params)} | (layers if in_layers else set())
    assert {shape for shape, _ in loops} >= wanted
    assert {dtype for shape, dtype in loops if shape in wanted} == {jnp.dtype("float32")}
    assert {leaf.dtype for leaf in jax.tree.leaves(sums)} == {jnp.dtype("float32")}
