"""Gradients that cross the replicas one step late: equal to one device that applies them late, and independent of now.

The reference takes the gradient of each batch on one device, and applies it after the gradient of the next is taken.
"""

import re
from collections import Counter
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxdist.config import RequestError
from jaxdist.planning import communication, hlo_text, memory
from jaxdist.request import load
from jaxdist.training.run import Run
from jaxdist.training.step_runner import StepRunner
from jaxdist.training.trainer import check_new
from tests.communication.reading import collectives
from tests.tiers import thinned
from tests.training.curves import lines
from tests.training.test_resume import kill_after, saved, without_times

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
    "stages": {"mesh": "replica=2,pipeline=2", "parallel.zero": "1", **STAGES},
    "mixed": {"mesh": "replica=4", "parallel.offload": "optimizer", "precision": "mixed"},
}

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
    arrays = {"tokens": text[:, :-1], "labels": labels, "rows": np.arange(8, dtype=np.int32)}
    return {name: jax.device_put(arrays[name].reshape(a.shape), a.sharding) for name, a in run.batch().items()}


@cache
def on_one_device() -> tuple[list[float], list[float], dict]:
    """(losses, gradient norms, parameters after the last drain) with updates by hand that come one step late."""
    run = asked({"mesh": "1x1x1"})
    with jax.set_mesh(run.mesh):
        state = jax.device_get(run.init())

        @jax.jit
        def gradient(params, rows):
            weights = run.forward.weights(params)
            return run.step.gradients(weights, {}, rows)[:2]

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
        state = run.init()
        runner = StepRunner(run, program, 0, report=lambda step, metrics: told.update({step: jax.device_get(metrics)}))
        for step in range(1, BATCHES + 1):
            state = runner.take(step, state, batch(run, step))
            if step in DRAINED_AFTER:
                state = runner.drain(step, state)
                assert list(told) == list(range(1, step + 1))
    return told, state


@pytest.mark.parametrize("name", ["zero0", "zero1", "zero3", "stages"])
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


@pytest.mark.parametrize("name", ["zero0", "zero1", "zero3", "stages"])
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


@pytest.mark.parametrize("name", ["zero0", "zero1", "zero3", "stages"])
def test_bytes_sent_and_held_are_predicted_exactly(name):
    run, program = late(name)
    predicted = Counter()
    for one in communication.predict(run.config, run.model, run.layout):
        predicted[one.kind, one.axes] += one.payload_bytes
    assert moved(run, program) == predicted
    held = memory.predict(run.config, run.model, run.layout)
    assert program.memory_analysis().argument_size_in_bytes == held.arguments
    # What crosses is held once more, in f32, and three numbers with it.
    crossing = sum(count for (_, axes), count in predicted.items() if axes == ("replica",))
    assert held.in_flight == crossing + 12


def test_as_many_bytes_as_on_time():
    run, program = late("zero1")
    on_time = asked(LAYOUTS["zero1"], **{"parallel.replica_zero": "false"})
    with jax.set_mesh(on_time.mesh):
        assert moved(run, program) == moved(on_time, on_time.compile())


def depends_on(body: list[hlo_text.Instruction], name: str) -> set[str]:
    """Names of all instructions in `body` that `name` waits for."""
    operands = {one.name: set(hlo_text.NAME.findall(one.rest)) for one in body}
    found, new = set(), {name}
    while new:
        found |= new
        new = {operand for one in new for operand in operands[one] if operand in operands} - found
    return found


@pytest.mark.parametrize("name", ["zero0", "zero1", "zero3", "stages"])
def test_what_crosses_does_not_wait_for_the_batch(name):
    """In the compiled program, no input of a collective over the replicas follows from this step's batch."""
    run, program = late(name)
    parsed = hlo_text.parse(program.as_text())
    body = parsed.computations[parsed.entry]
    # The numbers of rows are for dropout alone.
    rows = {one.name for one in body if one.opcode == "parameter" and re.search(r'op_name="batch\[', one.rest)}
    assert len(rows) == 2
    for one in body:
        if "all-reduce" in one.opcode:
            print(one)
    assert 0


def test_another_batch_gives_the_same_parameters():
    run, program = late("zero1")
    after = []
    for seed in (7, 8):
        with jax.set_mesh(run.mesh):
            state, _ = program(run.init(), batch(run, 1))
            state, _ = program(state, batch(run, seed))
        after.append(jax.device_get(state))
    jax.tree.map(np.testing.assert_array_equal, after[0].params, after[1].params)
    assert float(after[0].in_flight.loss) != float(after[1].in_flight.loss)


def test_a_batch_without_labels_changes_nothing_when_nothing_is_in_flight():
    run, program = late("zero1")
    with jax.set_mesh(run.mesh):
        before = jax.device_get(run.init())
        state, metrics = program(run.init(), run.empty_batch())
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state), before)
    assert int(metrics.skipped) == 0
