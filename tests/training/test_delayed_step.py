"""Gradients that cross the replicas one step late: equal to one device that applies them late, and independent of now.

The reference takes the gradient of each batch on one device, and applies it after the gradient of the next is taken.
"""

import math
import re
from collections import Counter
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxdist.config import RequestError
from jaxdist.planning import communication, memory
from jaxdist.programs import hlo_text
from jaxdist.request import load
from jaxdist.training.preparing import check_new
from jaxdist.training.run import Run
from jaxdist.training.step_runner import StepRunner, without_labels
from tests.communication.reading import collectives
from tests.tiers import exhaustive, thinned
from tests.training.curves import lines, without_times
from tests.training.test_resume import saved

SIZES = {
    "model.layers": "2", "model.embed": "16", "model.heads": "2", "model.vocab": "272", "model.sequence": "8",
    "train.steps": "10", "train.global_batch_size": "8", "optimizer.warmup": "0", "optimizer.name": "sgd",
    "optimizer.learning_rate": "0.1", "optimizer.clip": "0.5",
}  # fmt: skip

LATE = {"parallel.delayed_gradients": "true"}
K2 = {"train.accumulation": "2"}
STAGES = {"pipeline.microbatches": "2"}

LAYOUTS = {
    "zero0": {"mesh": "replica=2,data=2", "parallel.zero": "0", **K2},
    "zero1": {"mesh": "replica=2,data=2", "parallel.zero": "1", **K2},
    "zero3": {"mesh": "replica=2,data=2", "parallel.zero": "3", **K2},
    "stages": {"mesh": "replica=2,data=2,pipeline=2", "parallel.zero": "1", **STAGES},
}

EACH = thinned([(name,) for name in LAYOUTS], 4, first=1)

LAYOUTS["ring"] = {"mesh": "replica=2,context=2", "parallel.zero": "1", "parallel.context": "ring", **K2}

BATCHES = 5
DRAINED_AFTER = (3, 5)
"""Steps after which nothing is in flight, as before a validation or a save."""


@cache
def made(**knobs: str) -> Run:
    run = Run(load(None, SIZES | {name.replace("__", "."): value for name, value in knobs.items()}))
    run.steps = 10  # of the schedule; no data is read
    return run


def asked(layout: dict, **more: str) -> Run:
    return made(**{name.replace(".", "__"): value for name, value in (layout | more).items()})


@cache
def late(name: str) -> tuple[Run, jax.stages.Compiled]:
    run = asked(LAYOUTS[name] | LATE)
    with jax.set_mesh(run.mesh):
        return run, run.compile()


def batch(run: Run, seed: int) -> dict:
    """The same rows on every mesh, of which each has labels of another number of its positions."""
    rng = np.random.default_rng(seed)
    text = rng.integers(0, 272, (8, 9), dtype=np.int32)
    labels = text[:, 1:].copy()
    labels[np.arange(8) >= rng.integers(1, 9, (8, 1))] = -1
    order = run.layout.order(np.arange(8), 8)
    arrays = {"tokens": text[:, order], "labels": labels[:, order], "rows": np.arange(8, dtype=np.int32)}
    return {name: jax.device_put(arrays[name].reshape(a.shape), a.sharding) for name, a in run.batch().items()}


@cache
def on_one_device() -> tuple[list[float], list[float], dict]:
    """(losses, gradient norms, parameters after the last drain) with updates by hand that come one step late."""
    run = asked({"mesh": "1x1x1"})
    with jax.set_mesh(run.mesh):
        state = jax.device_get(run.engine.init())

        @jax.jit
        def gradient(params, rows):
            weights = run.forward.weights(params)
            found = run.step.gradients(weights, {}, rows)
            return found.loss, found.grads

        @jax.jit
        def apply(params, momenta, g):
            scale = jnp.minimum(1, 0.5 / optax.tree.norm(g))
            updates, momenta = run.step.optimizer.update(jax.tree.map(lambda a: a * scale, g), momenta, params)
            return optax.apply_updates(params, updates), momenta

        params, momenta = state.params, state.optimizer
        waiting, losses, norms = None, [], []
        for step in range(1, BATCHES + 1):
            loss, g = gradient(params, batch(run, step))
            losses.append(float(loss))
            norms.append(float(optax.tree.norm(g)))
            if waiting is not None:
                params, momenta = apply(params, momenta, waiting)
            waiting = g
            if step in DRAINED_AFTER:
                params, momenta = apply(params, momenta, waiting)
                waiting = None
    return losses, norms, jax.device_get(params)


@cache
def trained(name: str):
    """(metrics by step, the state after the last drain) of the program itself."""
    run, program = late(name)
    told = {}
    with jax.set_mesh(run.mesh):
        state = run.engine.init()
        runner = StepRunner(
            run.engine, run.batch(), 0, report=lambda step, metrics: told.update({step: jax.device_get(metrics)})
        )
        runner.program = program
        for step in range(1, BATCHES + 1):
            state = runner.take(step, state, batch(run, step))
            if step in DRAINED_AFTER:
                state = runner.drain(step, state)
                assert list(told) == list(range(1, step + 1))
    return told, state


@pytest.mark.parametrize(
    "name", [*(one for one in EACH if one.values != ("zero0",)), *exhaustive([("zero0",), ("ring",)])]
)
def test_equals_one_device_that_applies_gradients_late(name):
    losses, norms, params = on_one_device()
    told, state = trained(name)
    assert list(told) == [1, 2, 3, 4, 5]
    np.testing.assert_allclose([one.loss for one in told.values()], losses, rtol=1e-5)
    np.testing.assert_allclose([one.grad_norm for one in told.values()], norms, rtol=1e-5)
    assert int(state.step) == BATCHES
    assert int(state.skipped) == 0
    run, _ = late(name)
    with jax.set_mesh(run.mesh):
        found = jax.device_get(run.step.logical(state).params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found, params)
    # The rows tell late gradients from those on time.
    assert not np.allclose(losses[1:3], [losses[0]] * 2, rtol=1e-3)


@pytest.mark.parametrize("name", EACH)
def test_replicas_have_the_same_weights_to_the_bit(name):
    _, state = trained(name)
    for leaf in jax.tree.leaves(state.params):
        parts = {}
        for shard in leaf.addressable_shards:
            parts.setdefault(str(shard.index), []).append(np.asarray(shard.data))
        for first, *others in parts.values():
            assert others
            assert all(np.array_equal(first, other) for other in others)


def moved(run: Run, program: jax.stages.Compiled) -> Counter:
    """(kind, axes) -> bytes of one step, scalars left out."""
    found = Counter()
    for one in collectives(program.as_text(), run.mesh):
        found[one.kind, one.axes] += one.array_bytes * one.count
    return +found


@pytest.mark.parametrize("name", EACH)
def test_bytes_sent_and_held_are_predicted_exactly(name):
    run, program = late(name)
    predicted = Counter()
    for one in communication.predict(run.sharded):
        predicted[one.kind, one.axes] += one.payload_bytes
    assert moved(run, program) == predicted
    held = memory.predict(run.sharded)
    assert program.memory_analysis().argument_size_in_bytes == held.arguments
    # What crosses is held once more, in f32, and three numbers with it.
    crossing = sum(count for (_, axes), count in predicted.items() if axes == ("replica",))
    assert held.in_flight == crossing + 12


def test_as_many_bytes_as_on_time():
    run, program = late("zero1")
    on_time = asked(LAYOUTS["zero1"], **{"parallel.replica_zero": "false"})
    with jax.set_mesh(on_time.mesh):
        assert moved(run, program) == moved(on_time, on_time.compile())


def waits_for(body: list[hlo_text.Instruction], name: str) -> set[str]:
    """Names of all instructions in `body` that `name` needs, directly or not."""
    operands = {one.name: set(hlo_text.NAME.findall(one.rest)) for one in body}
    found, new = set(), {name}
    while new:
        found |= new
        new = {operand for one in new for operand in operands[one] if operand in operands} - found
    return found


@pytest.mark.parametrize("name", EACH)
def test_what_crosses_does_not_wait_for_the_batch(name):
    """In the compiled program no tokens or labels are among what the one large all-reduce over the replicas needs."""
    run, program = late(name)
    parsed = hlo_text.parse(program.as_text())
    body = parsed.computations[parsed.entry]
    inputs = {one.name for one in body if one.opcode == "parameter"}
    rows = {one.name for one in body if one.name in inputs and re.search(r'op_name="batch\[', one.rest)}
    # The numbers of rows are for dropout alone.
    assert len(rows) == 2
    size = sum(math.prod(p.shard) for p in run.sharded.parameters)
    (crossing,) = (one for one in body if one.opcode == "all-reduce" and f"f32[{size}]" in one.type)
    needed = waits_for(body, crossing.name)
    assert len(needed & inputs) == len(jax.tree.leaves(run.model.abstract))
    assert not needed & rows
    # The loss, which does wait for them, shows that they would be seen.
    scalars = [one.name for one in body if one.opcode == "all-reduce" and one.type.startswith("s32[]")]
    assert any(waits_for(body, scalar) & rows for scalar in scalars)


def test_another_batch_gives_the_same_parameters():
    run, program = late("zero1")
    after = []
    for seed in (7, 8):
        with jax.set_mesh(run.mesh):
            state, _ = program(run.engine.init(), batch(run, 1))
            state, _ = program(state, batch(run, seed))
        after.append(jax.device_get(state))
    jax.tree.map(np.testing.assert_array_equal, after[0].params, after[1].params)
    assert float(after[0].crossing.loss) != float(after[1].crossing.loss)


def test_a_batch_without_labels_changes_nothing_when_nothing_is_in_flight():
    run, program = late("zero1")
    with jax.set_mesh(run.mesh):
        before = jax.device_get(run.engine.init())
        state, metrics = program(run.engine.init(), without_labels(run.batch()))
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state), before)
    assert int(metrics.skipped) == 0


def test_a_step_that_is_not_finite_is_dropped_when_its_gradient_has_crossed():
    """Its own step changes nothing but the counts; those before and after it are applied."""
    run, program = late("zero1")
    told = []
    with jax.set_mesh(run.mesh):
        state, _ = program(run.engine.init(), batch(run, 1))
        params = jax.device_get(state.params)
        # What is in flight of step 1 is spoilt, as by an overflow of its backward pass.
        table = state.crossing.parts["table"] * jnp.nan
        spoilt = state.crossing._replace(parts=state.crossing.parts | {"table": table})
        for seed in (2, 3):
            state, metrics = program(state._replace(crossing=spoilt) if seed == 2 else state, batch(run, seed))
            told.append(jax.device_get((metrics, state.params, state.optimizer)))
    (first, after, momenta), (second, later, _) = told
    assert (int(first.skipped), int(first.skipped_in_a_row)) == (1, 1)
    jax.tree.map(np.testing.assert_array_equal, after, params)
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(momenta))
    assert (int(second.skipped), int(second.skipped_in_a_row)) == (1, 0)
    assert np.isfinite(second.grad_norm)
    assert not np.array_equal(later["table"], after["table"])


WIDE = {"mesh": "replica=2,data=2", "model.embed": "64", "model.vocab": "304", "parallel.gradient_compression": "int8"}


@pytest.mark.exhaustive
def test_compressed_gradients_are_rounded_when_they_cross():
    """And what a step that is not finite would have left of the residual is dropped with it."""
    run = asked(WIDE | LATE | {"parallel.zero": "2", "precision": "mixed", "model.dropout": "0.1"})
    residual = lambda state: np.asarray(jax.device_get(state.crossing.sums["table"]))
    with jax.set_mesh(run.mesh):
        program = run.compile()
        predicted = memory.predict(run.sharded)
        assert program.memory_analysis().argument_size_in_bytes == predicted.arguments
        rng = np.random.default_rng(0)
        state = run.engine.init()
        losses, residuals = [], []
        for step in range(4):
            put = lambda a: jax.device_put(rng.integers(0, 304, a.shape, np.int32), a.sharding)
            state, metrics = program(state, jax.tree.map(put, run.batch()))
            losses.append(float(metrics.loss))
            residuals.append(residual(state))
            if step == 2:
                before = residual(state)
                parts = state.crossing.parts
                parts = parts | {"table": parts["table"] * jnp.nan}
                state = state._replace(crossing=state.crossing._replace(parts=parts))
    assert not residuals[0].any()
    assert residuals[1].any()
    np.testing.assert_array_equal(residuals[3], before)
    assert int(metrics.skipped) == 1
    assert losses[0] == 0
    assert np.isfinite(losses).all()


def test_a_new_run_without_replicas_is_refused():
    check_new(asked({"mesh": "replica=2"} | LATE))
    with pytest.raises(RequestError, match="delayed_gradients is true, but mesh 2x1x1 has no replicas"):
        check_new(asked({"mesh": "2x1x1"} | LATE))


REPLICAS = ("--parallel.delayed-gradients=true", "--model.dropout=0.1", "--parallel.zero=1")


@pytest.mark.slow
def test_killed_and_resumed_equals_straight_to_the_bit(run, straight, killed):
    """A save leaves nothing in flight: what goes on after it is what is read from it."""
    options = ("--mesh=replica=2,data=2", "--checkpoint.every=7", *REPLICAS)
    whole = straight(*options)
    killed("killed", 7, 7, *options)
    resumed = run("killed", *options)
    jax.tree.map(np.testing.assert_array_equal, saved(resumed), saved(whole))
    assert without_times(resumed) == without_times(whole)
    assert [line["step"] for line in lines(whole) if "loss" in line] == list(range(1, 21))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("after", "told"),
    [
        ("1x1x1", "from here on gradients are on time, because replica is 1"),
        *exhaustive([("replica=4", "")]),
    ],
)
def test_resumed_on_another_mesh(run, straight, killed, capsys, after, told):
    """With replicas, the late gradients are the same on any mesh; without, a note says that they are on time."""
    options = ("--checkpoint.every=7", *REPLICAS)
    whole = straight("--mesh=replica=2,data=2", *options)
    killed("moved", 7, 7, "--mesh=replica=2,data=2", *options)
    capsys.readouterr()
    moved = run("moved", f"--mesh={after}", *options)
    said = capsys.readouterr().err
    assert told in said
    assert ("gradients cross one step late" in said) == (not told)
    a, b = ([line["loss"] for line in lines(one) if "loss" in line] for one in (moved, whole))
    if told:
        # The first step after the save has the same weights, and the second has those of a gradient that is on time.
        np.testing.assert_allclose(a[:8], b[:8], rtol=1e-5)
        assert a[8] != pytest.approx(b[8], rel=1e-4)
    else:
        np.testing.assert_allclose(a, b, rtol=1e-5)
