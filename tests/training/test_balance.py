"""What a step does with the sums of routers: the balance moves in whole tokens, and nothing else moves it."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P

from jaxdist.config import Config, ParallelConfig
from jaxdist.mesh import make_mesh, parse_mesh
from jaxdist.mesh.split import Split
from jaxdist.models.experts import direction
from jaxdist.parallel import placing
from jaxdist.request import load
from jaxdist.sharding import Layout, name_of
from jaxdist.training.forward.balance import REPORTED, collapsed
from jaxdist.training.rounds import RoundRunner
from jaxdist.training.run import Run
from jaxdist.training.step_runner import StepRunner

SIZES = {
    "model.family": "moe", "model.layers": "2", "model.embed": "16", "model.heads": "2", "model.vocab": "272",
    "model.sequence": "8", "model.experts": "4", "model.expert_mlp": "8", "train.steps": "10",
    "train.global_batch_size": "8", "optimizer.warmup": "0", "optimizer.clip": "1e-3", "model.balance_loss": "0.1",
    "model.z_loss": "0.01", "parallel.zero": "1",
}  # fmt: skip


@cache
def made(**knobs: str) -> Run:
    run = Run(load(None, SIZES | {name.replace("__", "."): value for name, value in knobs.items()}))
    run.steps = 10  # of the schedule; no data is read
    return run


@cache
def program(run: Run):
    return run.compile()


def batch(run: Run, padded: bool = True, seed: int = 0) -> dict:
    """The same rows on every mesh; where they are padded, each has labels at another number of its positions."""
    text = np.random.default_rng(seed).integers(0, 272, (8, 9), dtype=np.int32)
    labels = text[:, 1:].copy()
    if padded:
        labels[np.arange(8) >= np.arange(1, 9)[:, None]] = -1
    arrays = {"tokens": text[:, :-1], "labels": labels, "rows": np.arange(8, dtype=np.int32)}
    return {name: jax.device_put(arrays[name].reshape(a.shape), a.sharding) for name, a in run.batch().items()}


def first_step(run: Run, **changed):
    """(parameters before, (gradient, aux), state after, metrics) of one step."""
    with jax.set_mesh(run.mesh):
        state = run.engine.init()._replace(**changed)
        before = jax.device_get(run.step.logical(state).params)
        weights = run.forward.weights(state.params)
        sums = jax.device_get(jax.jit(partial(sums_of, run))(weights, batch(run)))
        after, metrics = program(run)(state, batch(run))
        logical = jax.device_get(run.step.logical(after))
    return before, sums, logical, jax.device_get(metrics)


def sums_of(run: Run, weights, rows):
    """(gradient, aux) of a batch, in a run without replicas."""
    *_, aux = run.forward.gradients(weights, {}, rows, jnp.asarray(0))
    return run.step.gradients(weights, {}, rows).grads, aux


@cache
def on_one_device():
    return first_step(made(mesh="1x1x1"))


@pytest.mark.parametrize(
    ("load", "wanted"),
    [
        ([3, 1, 2, 2], [1, -1, 0, 0]),
        ([3, 1, 2, 3], [1, -1, -1, 1]),  # the mean is 2.25
        ([8, 0, 0, 0], [1, -1, -1, -1]),
        ([0, 0, 0, 0], [0, 0, 0, 0]),  # padding of a stage
        ([2**24 - 1, 2**24 - 3, 2**24 - 2], [1, -1, 0]),  # their sum is no float32
    ],
)
def test_a_load_is_compared_with_the_mean_in_whole_tokens(load, wanted):
    np.testing.assert_array_equal(direction(jnp.asarray(load, jnp.float32)), wanted)


def test_the_balance_has_no_gradient_and_no_optimizer_state():
    run = made(mesh="1x1x1")
    gradient, _ = on_one_device()[1]
    assert "balance" not in gradient["blocks"]["mlp"]
    with jax.set_mesh(run.mesh):
        state = jax.eval_shape(run.engine.traced_init)
    moments = {name_of(path) for path, _ in jax.tree.leaves_with_path(state.optimizer)}
    assert not any("balance" in name for name in moments)
    assert any("router" in name for name in moments)


def test_a_step_moves_the_balance_by_its_rate_whatever_clip_and_decay_do():
    before, (_, aux), after, _ = on_one_device()
    load = aux["load"]
    assert load.sum(-1).tolist() == [8 * 8 * 2] * 2  # whole tokens, those without a label too
    moved = after.params["blocks"]["mlp"]["balance"] - before["blocks"]["mlp"]["balance"]
    np.testing.assert_array_equal(moved, -np.float32(1e-3) * np.sign(4 * load - load.sum(-1, keepdims=True)))


def test_the_norm_is_that_of_the_gradient_alone():
    _, (gradient, _), _, metrics = on_one_device()
    wanted = np.sqrt(sum(np.sum(np.square(g, dtype=np.float64)) for g in jax.tree.leaves(gradient)))
    assert metrics.grad_norm == pytest.approx(wanted, rel=1e-6)


def test_a_step_reports_means_over_tokens_and_layers_and_the_fullest_expert():
    _, (_, aux), _, metrics = on_one_device()
    told = aux["meter"].sum(0) / (2 * 8 * 8)
    load = aux["load"]
    assert set(metrics.further) == set(REPORTED)
    for name, wanted in zip(REPORTED, (*told, (load.max(-1) / load.mean(-1)).max()), strict=True):
        assert metrics.further[name] == pytest.approx(wanted, rel=1e-6)
    assert 1 <= metrics.further["balance_loss"] < 1.5  # an even load has 1
    assert metrics.further["z_loss"] == pytest.approx(np.log(4) ** 2, rel=0.1)  # scores of a new router
    assert metrics.further["dispatch_rounds"] >= 1


@pytest.mark.slow
def test_the_padding_of_a_stage_is_no_part_of_what_a_step_reports():
    """Of three layers on two stages: the second has padding in place of another one."""
    reports = []
    for knobs in (dict(mesh="1x1x1"), dict(mesh="1x1x2", pipeline__microbatches="2")):
        run = made(model__layers="3", **knobs)
        with jax.set_mesh(run.mesh):
            _, metrics = program(run)(run.engine.init(), batch(run))
        reports.append({name: float(metrics.further[name]) for name in REPORTED if name != "dispatch_rounds"})
    assert reports[1] == pytest.approx(reports[0], rel=1e-5)


def test_the_loss_of_a_step_and_of_an_evaluation_is_the_cross_entropy_alone():
    run = made(mesh="1x1x1")
    *_, metrics = on_one_device()
    with jax.set_mesh(run.mesh):
        loss, count, further = jax.jit(run.step.evaluate)(run.engine.init().params, {}, batch(run))
    assert further == {}
    assert metrics.loss == pytest.approx(float(loss / count), rel=1e-6)


def test_a_step_that_is_not_finite_leaves_the_balance():
    run = made(mesh="1x1x1")
    with jax.set_mesh(run.mesh):
        params = run.engine.init().params
        params["norm"]["scale"] = params["norm"]["scale"].at[3].set(jnp.nan)
    _, (_, aux), after, metrics = first_step(run, params=params)
    assert aux["load"].sum() == 2 * 8 * 8 * 2  # the load was counted
    assert metrics.skipped == 1
    np.testing.assert_array_equal(after.params["blocks"]["mlp"]["balance"], 0)


@pytest.mark.slow
def test_the_losses_of_the_router_are_means_over_positions_whichever_have_labels():
    """What they add to the gradient is the same with and without padding; the cross-entropy's part is not."""
    added, plain = [], []
    for padded in (True, False):
        found = []
        for knobs in ({}, {"model__balance_loss": "0", "model__z_loss": "0"}):
            run = made(mesh="1x1x1", **knobs)
            with jax.set_mesh(run.mesh):
                weights = run.forward.weights(run.engine.init().params)
                found.append(jax.device_get(jax.jit(run.step.gradients)(weights, {}, batch(run, padded)).grads))
        with_losses, without = (gradient["blocks"]["mlp"]["router"] for gradient in found)
        added.append(with_losses - without)
        plain.append(without)
    scale = np.linalg.norm(added[1])
    assert np.linalg.norm(added[0] - added[1]) < 1e-4 * scale
    assert np.linalg.norm(plain[0] - plain[1]) > 1e-2 * np.linalg.norm(plain[1])
    assert scale > 0


def test_the_balance_lies_whole_on_every_device():
    shape = parse_mesh("replica=2,data=2")
    layout = Layout.on(make_mesh(shape, jax.devices()[:4]))
    abstract = {"balance": jax.ShapeDtypeStruct((2, 4096), jnp.float32)}
    axes = {"balance": ("layers", "steered")}
    place = placing.placements(layout, axes, abstract, placing.ZeroOptions(3, replica_zero=True))["balance"]
    assert (place.rest, place.held, place.role.differentiated) == (P(None, None), P(None, None), False)


@pytest.mark.parametrize(("sequence", "further"), [(False, set()), (True, {"model"})])
def test_loads_are_summed_over_all_devices_that_have_tokens_of_their_own(sequence, further):
    """Where the sequence is split, each device of the model axis has some."""
    mesh = make_mesh(parse_mesh("data=2,expert=2,model=2"), jax.devices()[:8])
    layout = Layout.of(Split(Config(parallel=ParallelConfig(sequence=sequence)), mesh.shape), mesh)
    load = placing.of_sums(layout, {"load": (4,)}, ("layers",))["load"]
    assert (load.rest, load.use.reduced) == (P(None, None), {"data", "expert"} | further)


@pytest.mark.parametrize("precision", ["mixed", "bfloat16"])
def test_router_and_balance_are_float32_in_every_precision(precision):
    run = made(mesh="1x1x1", precision=precision)
    with jax.set_mesh(run.mesh):
        weights = jax.eval_shape(lambda: run.forward.weights(run.engine.traced_init().params))["blocks"]["mlp"]
    assert {name: weights[name].dtype for name in ("router", "balance")} == dict.fromkeys(
        ("router", "balance"), jnp.float32
    )
    assert weights["gate_up"].dtype == weights["down"].dtype == jnp.bfloat16


def drained(run: Run, batches: int) -> dict:
    """The parameters after so many batches, with nothing in flight."""
    with jax.set_mesh(run.mesh):
        runner = StepRunner(run.engine, run.batch(), 0, report=lambda step, metrics: None)
        state = run.engine.init()
        runner.compile(state)
        for step in range(1, batches + 1):
            state = runner.take(step, state, batch(run, seed=step))
        return jax.device_get(run.step.logical(runner.drain(batches, state)).params)


@pytest.mark.slow
@pytest.mark.parametrize(
    "knobs",
    [
        pytest.param(
            {"mesh": "expert=2,pipeline=2", "pipeline__schedule": "pipedream"},
            marks=pytest.mark.exhaustive,
            id="pipedream",
        ),
        pytest.param({"mesh": "replica=2,expert=2", "parallel__delayed_gradients": "true"}, id="delayed"),
    ],
)
def test_one_batch_of_a_step_that_comes_late_is_that_of_one_device(knobs):
    sgd = {"optimizer__name": "sgd", "optimizer__clip": "0", "optimizer__learning_rate": "0.1"}
    wanted = drained(made(mesh="1x1x1", **sgd), 1)
    got = drained(made(**sgd | knobs), 1)
    np.testing.assert_array_equal(got["blocks"]["mlp"]["balance"], wanted["blocks"]["mlp"]["balance"])
    assert np.any(got["blocks"]["mlp"]["balance"])
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), got, wanted)


@pytest.mark.exhaustive
def test_an_outer_step_makes_the_balance_the_mean_of_the_replicas():
    """Neither its rate nor its momentum applies: the balance follows no gradient."""
    outer = {"optimizer__outer_rate": "0.5", "optimizer__outer_momentum": "0.9"}
    run = made(mesh="replica=2", train__local_steps="2", model__experts="5", **outer)
    own, reported = [], []
    with jax.set_mesh(run.mesh):
        runner = RoundRunner(run, 0, report=lambda step, metrics: reported.append(jax.device_get(metrics)))
        state = run.engine.init()
        runner.compile(state)
        for step in (1, 2, 3, 4):
            # Of the same labels in both replicas, so that both weigh the same.
            state = runner.take(step, state, batch(run, padded=False, seed=step))
            if step == 3:
                own = [jax.device_get(one.params["blocks"]["mlp"]["balance"]) for one in state.replicas]
                loads = state.metrics
            if step == 2:
                after_first = jax.device_get(state.params["blocks"]["mlp"]["balance"])
        balance = jax.device_get(state.params["blocks"]["mlp"]["balance"])
    assert len(loads) == 2
    # Each replica has moved each expert by one rate or not at all in a step; the mean is in halves of it.
    assert not np.array_equal(own[0], own[1])
    steps = (balance - after_first) / 1e-3
    np.testing.assert_allclose(steps, np.round(2 * steps) / 2, atol=1e-3)
    assert np.abs(steps).max() == pytest.approx(2, abs=1e-3)
    assert "balance" not in state.crossing.velocity["blocks"]["mlp"]
    assert set(reported[-1].further) == set(REPORTED)


def test_a_router_has_collapsed_where_nearly_all_tokens_choose_the_same_experts():
    assert not collapsed(1.0, most=8 / 2)
    assert not collapsed(3.6, most=8 / 2)
    assert collapsed(3.8, most=8 / 2)
    assert collapsed(8.0, most=64 / 8)
    assert not collapsed(1.0, most=4 / 4)  # every token goes to all
