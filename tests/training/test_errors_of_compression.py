"""The residual of compression is state: it survives skips, kills and other meshes, and arrives without replicas."""

from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdist.config import RequestError
from jaxdist.request import load
from jaxdist.training.checkpoint.manager import Checkpoints
from jaxdist.training.preparing import check_new
from jaxdist.training.rounds import RoundRunner
from jaxdist.training.run import Run
from jaxdist.training.step_runner import StepRunner
from tests.tiers import exhaustive
from tests.training.curves import lines

SIZES = {
    "model.layers": "2", "model.embed": "64", "model.heads": "4", "model.vocab": "304", "model.sequence": "16",
    "train.steps": "10", "optimizer.warmup": "0", "parallel.gradient_compression": "int8",
}  # fmt: skip

PAIR = "replica=2,data=2"


@cache
def made(mesh: str, folder: Path | None = None, options: tuple[tuple[str, str], ...] = ()) -> Run:
    run = Run(load(None, SIZES | {"mesh": mesh} | ({"run_dir": str(folder)} if folder else {}) | dict(options)))
    run.steps = 10  # of the schedule; no data is read
    return run


def batch(run: Run, seed: int = 0) -> dict:
    rng = np.random.default_rng(seed)
    put = lambda a: jax.device_put(rng.integers(0, 304, a.shape, np.int32), a.sharding)
    return jax.tree.map(put, run.batch())


def residual(state):
    """The residual of each replica, of a state or of what a checkpoint holds of it."""
    return state.crossing["errors"] if set(state.crossing) == {"errors"} else state.crossing


def rounded(state) -> dict:
    """The residual of all replicas together."""
    return jax.tree.map(lambda e: np.asarray(e, np.float64).sum(-1), jax.device_get(residual(state)))


@pytest.fixture(scope="module")
def stepped():
    """(the run, its compiled step, its state after two steps)"""
    run = made(PAIR)
    with jax.set_mesh(run.mesh):
        take = jax.jit(run.step.train)
        state = run.engine.init()
        assert not any(np.any(e) for e in jax.tree.leaves(jax.device_get(residual(state))))
        for number in range(2):
            state, _ = take(state, batch(run, number))
    return run, take, state


def test_a_skipped_step_leaves_the_errors_as_they_are(stepped):
    run, take, state = stepped
    assert np.any(rounded(state)["table"])
    with jax.set_mesh(run.mesh):
        bad = state.params | {"table": state.params["table"].at[3].set(jnp.nan)}
        broken, metrics = take(state._replace(params=bad), batch(run, 2))
    assert int(metrics.skipped_in_a_row) == 1
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(broken.crossing), jax.device_get(residual(state)))


@pytest.fixture(scope="module")
def saved(stepped, tmp_path_factory):
    """The folder of a checkpoint with errors of two replicas."""
    run, _, state = stepped
    folder = tmp_path_factory.mktemp("errors")
    with jax.set_mesh(run.mesh), Checkpoints(folder, keep=1) as checkpoints:
        checkpoints.save(2, run.step.logical(state), {"step": 2})
    return folder


@pytest.mark.parametrize("mesh", [PAIR, "replica=4,data=2", "replica=2,pipeline=2", "2x1x1"])
def test_restored_on_another_mesh_the_residual_is_the_same_in_all(stepped, saved, mesh):
    _, _, before = stepped
    run = made(mesh)
    with jax.set_mesh(run.mesh), Checkpoints(saved, keep=None) as checkpoints:
        found = checkpoints.find()
        assert checkpoints.rounded_by(found) == 2
        state = run.step.resume(checkpoints.restore(run.engine.abstract_logical(), found))
        logical = run.step.logical(state)
    same = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-12)
    jax.tree.map(same, rounded(logical), rounded(before))
    if mesh == PAIR:
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(residual(state)), jax.device_get(before.crossing))
    if mesh == "replica=4,data=2":
        shares = jax.device_get(state.crossing["table"])
        assert shares.shape[-1] == 4
        assert np.array_equal(shares, np.repeat(shares[..., :1], 4, axis=-1))


@pytest.fixture
def compiled():
    """The names of the programs that are compiled, or found in the cache, during the test."""
    names = []

    def listen(event, seconds, fun_name="", **_):
        if event.endswith("backend_compile_duration"):
            names.append(fun_name)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield names
    jax.monitoring.unregister_event_duration_listener(listen)


@pytest.mark.slow
def test_without_replicas_the_first_gradient_gets_what_is_rounded(compiled):
    """And from then on there is none; a step that is skipped leaves it as it is, and none compiles anything."""
    run = made("1x1x1")
    metrics = []
    with jax.set_mesh(run.mesh):
        state = run.engine.init()
        assert state.crossing is None
        debt = jax.tree.map(lambda w: jnp.full((*w.shape, 1), 100.0), state.params)
        runner = StepRunner(run.engine, run.batch(), 0, report=lambda _, found: metrics.append(found))
        state = state._replace(crossing=debt)
        runner.compile(state)
        assert compiled.count("jit(train)") == 2
        poisoned = state.params | {"table": state.params["table"].at[3].set(jnp.nan)}
        good = jax.tree.map(jnp.array, state.params)
        state = runner.take(1, state._replace(params=poisoned), batch(run))
        assert float(state.crossing["table"].sum()) == pytest.approx(100.0 * good["table"].size)
        state = runner.take(2, state._replace(params=good), batch(run))
        assert state.crossing is None
        state = runner.take(3, state, batch(run))
    assert compiled.count("jit(train)") == 2
    size = sum(w.size for w in jax.tree.leaves(state.params))
    assert float(metrics[1].grad_norm) == pytest.approx(100 * np.sqrt(size), rel=0.01)
    assert float(metrics[2].grad_norm) < 100


@pytest.mark.slow
def test_without_replicas_the_first_outer_step_gets_what_is_rounded(compiled):
    """And all programs are compiled before the first step."""
    run = made("1x1x1", options=(("train.local_steps", "2"),))

    def rounds(debt: float) -> list[np.ndarray]:
        """The table after each of two rounds, which begin with a residual of `debt` for each weight."""
        state = run.engine.init()
        if debt:
            sums = jax.tree.map(lambda w: jnp.full((*w.shape, 1), debt), state.params)
            state = state._replace(crossing=state.crossing._replace(sums=sums))
        runner = RoundRunner(run, 0, report=lambda *_: None)
        runner.compile(state)
        before = [*compiled]
        tables = []
        for step in (1, 2, 3, 4):
            state = runner.take(step, state, batch(run, step))
            if step % 2 == 0:
                tables.append(np.asarray(state.params["table"]))
        assert state.crossing.sums is None
        named = {"jit(replicas_of)", "jit(begin)", "jit(take)", "jit(outer_step)"}
        assert named <= {*before}
        assert not named & {*compiled[len(before) :]}
        return tables

    with jax.set_mesh(run.mesh):
        without, (first, second) = rounds(0.0), rounds(0.01)
    np.testing.assert_allclose(first, without[0] - 0.01, rtol=1e-5, atol=1e-6)
    assert not np.array_equal(second, first)


KEPT = {"mixed": {"precision": "mixed"}, "offload": {"parallel.offload": "optimizer"}}
"""What is kept beside, or apart from, the weights in use."""


@pytest.mark.slow
@pytest.mark.parametrize(("name", "zero"), [("mixed", 3), *exhaustive([("mixed", 1), ("offload", 1), ("offload", 3)])])
def test_errors_go_with_mixed_precision_and_with_offloading(tmp_path, name, zero):
    """Three steps are close to exact ones, and the third is the same to the bit from a checkpoint of the second."""
    options = KEPT[name] | {"parallel.zero": str(zero)}

    def steps(run: Run, state, numbers: range):
        take = jax.jit(run.step.train)
        for number in numbers:
            state, metrics = take(state, batch(run, number))
        return state, float(metrics.loss)

    exact = made(PAIR, options=tuple((options | {"parallel.gradient_compression": "exact"}).items()))
    with jax.set_mesh(exact.mesh):
        _, wanted = steps(exact, exact.engine.init(), range(3))
    run = made(PAIR, options=tuple(options.items()))
    with jax.set_mesh(run.mesh), Checkpoints(tmp_path, keep=1) as checkpoints:
        second, _ = steps(run, run.engine.init(), range(2))
        assert np.any(rounded(second)["table"])
        checkpoints.save(2, run.step.logical(second), {"step": 2})
        third, loss = steps(run, second, range(2, 3))
        again = run.step.resume(checkpoints.restore(run.engine.abstract_logical(), checkpoints.find()))
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(again.crossing), jax.device_get(second.crossing))
        again, same = steps(run, again, range(2, 3))
    assert loss == pytest.approx(wanted, rel=1e-2)
    assert loss == same
    assert loss != wanted
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(again), jax.device_get(third))


def test_a_new_run_without_replicas_is_refused():
    check_new(made(PAIR))
    with pytest.raises(RequestError, match="gradient_compression is int8, but mesh 1x1x1 has no replicas"):
        check_new(made("1x1x1"))


RULE = ("--parallel.gradient-compression=int8", "--model.embed=64", "--optimizer.learning-rate=1e-3")
"""At four times this rate one batch has a gradient of norm 30, where a rounding changes the loss by some per cent."""


@pytest.mark.slow
def test_killed_and_resumed_on_the_same_mesh_equals_straight_to_the_bit(run, straight, killed):
    killed("killed", 7, 5, f"--mesh={PAIR}", *RULE)
    resumed = run("killed", f"--mesh={PAIR}", *RULE)
    whole = straight(f"--mesh={PAIR}", *RULE)
    figures = [[(line["loss"], line["grad_norm"]) for line in lines(one) if "loss" in line] for one in (resumed, whole)]
    assert len(figures[0]) == 20
    assert figures[0] == figures[1]


@pytest.mark.exhaustive
@pytest.mark.parametrize("after", ["replica=4", "1x1x1"])
def test_killed_and_resumed_with_other_replicas_the_loss_is_close(run, straight, killed, capsys, after):
    whole = straight(f"--mesh={PAIR}", *RULE)
    killed("moved", 7, 5, f"--mesh={PAIR}", *RULE)
    moved = run("moved", f"--mesh={after}", *RULE)
    said = capsys.readouterr().err
    assert ("dealt out evenly to 4" if after == "replica=4" else "is added to the first gradient") in said
    a, b = ([line["loss"] for line in lines(one) if "loss" in line] for one in (moved, whole))
    np.testing.assert_allclose(a, b, rtol=5e-3)
