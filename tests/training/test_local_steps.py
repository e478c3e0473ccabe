"""Local steps: equal to a reference of one device that plays all replicas, on any mesh, kept and resumed anywhere."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from functools import cache
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdist.config import RequestError
from jaxdist.mesh import devices_asked, parse_mesh
from jaxdist.parallel.crossing.replicas import mesh_of, part
from jaxdist.planning import communication, memory
from jaxdist.programs.compiled import text_of
from jaxdist.programs.hlo import collectives
from jaxdist.request import load
from jaxdist.training.checkpoint.manager import Checkpoints
from jaxdist.training.intervals import round_until, rounds
from jaxdist.training.preparing import check_new
from jaxdist.training.rounds import RoundRunner
from jaxdist.training.run import Run
from tests.tiers import exhaustive, thinned
from tests.training.conftest import over
from tests.training.curves import lines

SIZES = {
    "model.layers": "2", "model.embed": "32", "model.heads": "4", "model.vocab": "304", "model.sequence": "16",
    "train.steps": "10", "optimizer.warmup": "0", "train.global_batch_size": "16",
}  # fmt: skip

SGD = {"optimizer.name": "sgd", "optimizer.beta1": "0", "optimizer.clip": "0", "optimizer.learning_rate": "0.1"}
DILOCO = {"optimizer.outer_rate": "0.7", "optimizer.outer_momentum": "0.9", "optimizer.learning_rate": "1e-3"}
PAIR = "replica=2,data=2"


@cache
def made(mesh: str, local_steps: int, **knobs: str) -> Run:
    asked = {name.replace("__", "."): value for name, value in knobs.items()}
    config = load(None, SIZES | {"mesh": mesh, "train.local_steps": str(local_steps)} | asked)
    run = Run(config, devices=jax.devices()[: devices_asked(parse_mesh(mesh))])
    run.steps = config.train.steps  # of the schedule; no data is read
    return run


def knobs(*of: dict) -> dict[str, str]:
    return {name.replace(".", "__"): value for one in of for name, value in one.items()}


def batch(run: Run, step: int) -> dict:
    """The rows of a step, the same on every mesh, with unequal numbers of labels that count."""
    rng = np.random.default_rng(step)
    tokens, labels = rng.integers(0, 304, (2, 16, 16), dtype=np.int32)
    labels[np.arange(16) >= rng.integers(1, 17, (16, 1))] = -1
    order = run.layout.order(np.arange(16), 16)
    arrays = dict(tokens=tokens[:, order], labels=labels[:, order], rows=np.arange(16, dtype=np.int32))
    return {name: jax.device_put(arrays[name].reshape(a.shape), a.sharding) for name, a in run.batch().items()}


def taken(run: Run, steps: int, first: int = 0, state=None):
    """(the state after these steps, the metrics of each round by its last step)"""
    found = {}
    with jax.set_mesh(run.mesh):
        runner = RoundRunner(run, first, report=lambda step, metrics: found.update({step: jax.device_get(metrics)}))
        state = run.engine.init() if state is None else state
        runner.compile(state)
        for step in range(first + 1, steps + 1):
            state = runner.take(step, state, batch(run, step))
        assert not runner.unfinished
        return runner, state, found


def logical(run: Run, state):
    with jax.set_mesh(run.mesh):
        return jax.device_get(run.step.logical(state))


def close(a, b, rtol=1e-5, atol=1e-6):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=atol), a, b)


@cache
def synchronous():
    """(losses, parameters) of three steps of one device."""
    run = made("1x1x1", 0, **knobs(SGD))
    losses = []
    with jax.set_mesh(run.mesh):
        state, take = run.engine.init(), jax.jit(run.step.train)
        for step in (1, 2, 3):
            state, metrics = take(state, batch(run, step))
            losses.append(float(metrics.loss))
    return losses, jax.device_get(state.params)


@pytest.mark.parametrize(
    ("mesh", "zero"),
    [
        pytest.param(PAIR, 3, marks=pytest.mark.slow),
        *exhaustive([("replica=2,pipeline=2", 1), ("replica=2,context=2", 1), ("replica=4", 1), (PAIR, 0)]),
    ],
)
def test_one_local_step_with_sgd_is_the_synchronous_step(mesh, zero):
    """The changes are weighted by labels, of which the replicas have unequal numbers."""
    ring = {"parallel.context": "ring"} if "context" in mesh else {}
    run = made(mesh, 1, parallel__zero=str(zero), **knobs(SGD, ring))
    _, state, found = taken(run, 3)
    losses, params = synchronous()
    np.testing.assert_allclose([found[step].loss for step in (1, 2, 3)], losses, rtol=1e-5)
    close(logical(run, state).params, params)


def rows_of(run: Run, steps: int) -> dict[int, list[dict]]:
    """The rows that each of two replicas has on this mesh, by step."""
    meshes = [mesh_of(run.mesh, number) for number in (0, 1)]
    return {step: [jax.device_get(part(batch(run, step), mesh)) for mesh in meshes] for step in range(1, steps + 1)}


def nesterov(common, velocity, own, weight):
    """An outer step of DiLoCo with two replicas."""
    delta = jax.tree.map(lambda w, a, b: weight[0] * (w - a) + weight[1] * (w - b), common, *own)
    velocity = jax.tree.map(lambda v, d: 0.9 * v + d, velocity, delta)
    common = jax.tree.map(lambda w, v, d: np.float32(w - 0.7 * (0.9 * v + d)), common, velocity, delta)
    return common, velocity


def reference(rows: dict, rounds_of: tuple[tuple[int, ...], ...], **options: str):
    """Play two replicas on one device: (losses of each round's last step, parameters, moments [..., 2])."""
    run = made("1x1x1", 0, train__global_batch_size="8", **options)
    losses = []
    with jax.set_mesh(run.mesh):
        states = [run.engine.init(), run.engine.init()]
        take = jax.jit(run.step.train)
        common = jax.device_get(states[0].params)
        velocity = jax.tree.map(np.zeros_like, common)
        for steps in rounds_of:
            learned = np.zeros(2)
            for step in steps:
                counts, step_losses = [], []
                for number in (0, 1):
                    states[number], metrics = take(states[number], rows[step][number])
                    counts.append(int(metrics.count))
                    step_losses.append(float(metrics.loss))
                learned += counts
            losses.append(float(np.dot(step_losses, counts) / sum(counts)))
            own = [jax.device_get(state.params) for state in states]
            common, velocity = nesterov(common, velocity, own, learned / learned.sum())
            states = [state._replace(params=jax.tree.map(jnp.asarray, common)) for state in states]
        moments = jax.tree.map(lambda *of: np.stack(of, -1), *[jax.device_get(state.optimizer) for state in states])
    return losses, common, moments


@pytest.fixture(scope="module")
def diloco():
    """(run, runner, state, metrics) of DiLoCo with AdamW in rounds of 3, 3 and 1 steps."""
    run = made(PAIR, 3, train__steps="7", parallel__zero="1", **knobs(DILOCO))
    runner, state, found = taken(run, 7)
    return run, runner, state, found


def test_rounds_are_those_of_a_reference_on_one_device(diloco):
    run, _, state, found = diloco
    losses, common, moments = reference(
        rows_of(run, 7), ((1, 2, 3), (4, 5, 6), (7,)), train__steps="7", **knobs({"optimizer.learning_rate": "1e-3"})
    )
    assert list(found) == [3, 6, 7]
    np.testing.assert_allclose([one.loss for one in found.values()], losses, rtol=1e-5)
    got = logical(run, state)
    same_parameters(got.params, common)
    close(got.optimizer, moments, rtol=1e-4, atol=1e-6)
    assert int(got.step) == 7


def same_parameters(got: dict, wanted: dict) -> None:
    for params in (got, wanted):
        attention = params["blocks"]["attention"]
        if "qkv_bias" in attention:
            # That of the keys has no gradient but rounding, by which AdamW moves it; how far, the processor decides.
            bias = attention["qkv_bias"] = np.array(attention["qkv_bias"])
            bias[:, 1] = 0
    close(got, wanted, atol=3e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["muon", *exhaustive([("adafactor",)])])
def test_a_rule_that_reads_whole_parameters_takes_rounds_too(name):
    """Replicas make matrices whole, and take means, over their own devices: two of them split each parameter here."""
    # Adafactor limits the biases of queries, keys and values together; that of keys is rounding, and Llama has none.
    family = "llama" if name == "adafactor" else "gpt"
    options = knobs({"optimizer.name": name, "optimizer.learning_rate": "1e-3", "model.family": family})
    run = made(PAIR, 2, train__steps="4", parallel__zero="1", **knobs(DILOCO) | options)
    _, state, found = taken(run, 4)
    losses, common, _ = reference(rows_of(run, 4), ((1, 2), (3, 4)), train__steps="4", **options)
    np.testing.assert_allclose([one.loss for one in found.values()], losses, rtol=1e-5)
    same_parameters(logical(run, state).params, common)


def test_after_an_outer_step_all_replicas_have_the_same_weights_to_the_bit(diloco):
    _, runner, state, _ = diloco
    own = runner._next.params
    for name, w in {"table": own["table"], "common": state.params["table"]}.items():
        for shard in w.addressable_shards:
            same = [other for other in w.addressable_shards if other.index[:2] == shard.index[:2]]
            assert len(same) >= 2, name
            assert all(np.array_equal(np.squeeze(shard.data), np.squeeze(other.data)) for other in same), name


def test_rounds_end_with_the_multiples_and_with_the_run():
    assert [list(steps) for steps in rounds(0, 7, 3)] == [[1, 2, 3], [4, 5, 6], [7]]
    assert [list(steps) for steps in rounds(7, 12, 3)] == [[8, 9], [10, 11, 12]]
    assert [list(steps) for steps in rounds(2, 4, 1)] == [[3], [4]]
    assert [list(round_until(step, 3)) for step in (3, 7, 9)] == [[1, 2, 3], [7], [7, 8, 9]]
    assert list(round_until(5, 1)) == [5]


@pytest.mark.parametrize(
    ("mesh", "more"),
    [
        pytest.param(
            "replica=2,pipeline=2",
            {"parallel.zero": "1", "parallel.gradient_compression": "int8"},
            marks=pytest.mark.slow,
        ),
        *exhaustive(
            [
                (PAIR, {"parallel.zero": "0", "optimizer.outer_momentum": "0.9"}),
                (PAIR, {"parallel.zero": "3", "precision": "mixed", "parallel.offload": "optimizer"}),
            ]
        ),
    ],
)
def test_bytes_at_rest_and_over_replicas_are_as_predicted(mesh, more):
    run = made(mesh, 2, train__steps="4", **knobs(more))
    runner, state, _ = taken(run, 4)
    device = run.mesh.devices.flat[0]
    rest = {"device": 0, "pinned_host": 0}
    common = state.params, state.crossing, state.step
    own = runner._next.params, state.optimizer, state.skipped, state.skipped_in_a_row
    for a in jax.tree.leaves((common, own)):
        rest[a.sharding.memory_kind] += sum(s.data.nbytes for s in a.addressable_shards if s.device == device)
    held = memory.predict(run.sharded)
    assert rest == {"device": held.arguments - held.batch - held.copy, "pinned_host": held.host}

    def moved(found) -> dict:
        """Bytes by (axes, kind), without scalars."""
        by: dict = {}
        for axes, kind, count in found:
            by[axes, kind] = by.get((axes, kind), 0) + count
        return {key: count for key, count in by.items() if count}

    outer = collectives(text_of(runner._outer), run.mesh)
    predicted = [(one.axes, one.kind, one.payload_bytes) for one in communication.outer(run.sharded)]
    assert moved((one.axes, one.kind, one.array_bytes * one.count) for one in outer) == moved(predicted)
    inner = collectives(text_of(runner.program), runner.replicas[0].mesh)
    assert not any("replica" in one.axes for one in inner)
    predicted = [(one.axes, one.kind, one.elements) for one in communication.predict(run.sharded)]
    assert moved((one.axes, one.kind, one.array_elements * one.count) for one in inner) == moved(predicted)


@pytest.fixture(scope="module")
def saved(diloco, tmp_path_factory):
    """The folder of a checkpoint after a round of two replicas."""
    run, _, state, _ = diloco
    folder = tmp_path_factory.mktemp("rounds")
    with jax.set_mesh(run.mesh), Checkpoints(folder, keep=1) as checkpoints:
        checkpoints.save(7, run.step.logical(state), {"step": 7})
    return folder


@pytest.mark.parametrize("mesh", thinned([("replica=4,data=2",), ("1x1x1",), ("replica=2,pipeline=2",)], 3))
def test_on_other_replicas_each_gets_the_mean_of_the_moments(diloco, saved, mesh):
    before = logical(diloco[0], diloco[2])
    run = made(mesh, 3, train__steps="7", parallel__zero="1", **knobs(DILOCO))
    with jax.set_mesh(run.mesh), Checkpoints(saved, keep=None) as checkpoints:
        state = run.step.resume(checkpoints.restore(run.engine.abstract_logical()))
        after = jax.device_get(run.step.logical(state))
    same = lambda a, b: np.testing.assert_array_equal(a, b)
    jax.tree.map(same, (after.params, after.crossing, after.step), (before.params, before.crossing, before.step))
    replicas = run.mesh.shape["replica"]
    mean = lambda a: a.mean(-1, keepdims=True) if a.dtype.kind == "f" else a.max(-1, keepdims=True)
    wanted = before.optimizer
    if replicas != 2:
        wanted = jax.tree.map(lambda a: np.broadcast_to(mean(a), (*a.shape[:-1], replicas)), wanted)
    close(after.optimizer, wanted, rtol=1e-6, atol=1e-12)
    assert after.skipped.shape == (replicas,)


def test_from_a_step_that_is_skipped_nothing_is_learned(diloco):
    _, runner, _, _ = diloco
    runner._learned = [0, 0]
    of = lambda count, in_a_row: SimpleNamespace(count=jnp.asarray([count]), skipped_in_a_row=jnp.asarray([in_a_row]))
    runner._count((of(5, 0), of(7, 1)))
    runner._count((of(2, 2), of(3, 0)))
    assert runner._learned == [5, 3]


def test_a_new_run_without_replicas_is_refused():
    with pytest.raises(RequestError, match="local_steps is 3, but mesh 1x1x1 has no replicas"):
        check_new(made("1x1x1", 3, train__steps="7", parallel__zero="1", **knobs(DILOCO)))


ROUNDS = (f"--mesh={PAIR}", "--train.local-steps=3", "--optimizer.outer-momentum=0.5", "--checkpoint.every=5")


@pytest.mark.slow
def test_killed_within_a_round_and_resumed_equals_straight_to_the_bit(run, straight, killed):
    whole = straight(*ROUNDS)
    killed("killed", 11, 6, *ROUNDS)
    resumed = run("killed", *ROUNDS)
    figures = [
        [(line["step"], line["loss"], line["grad_norm"]) for line in lines(one) if "loss" in line]
        for one in (resumed, whole)
    ]
    assert [step for step, *_ in figures[1]] == [3, 6, 9, 12, 15, 18, 20]
    assert figures[0] == figures[1]
    validated = [[line["step"] for line in lines(one) if "validation_loss" in line] for one in (resumed, whole)]
    assert validated == [[12, 20], [12, 20]]


@pytest.mark.exhaustive
@pytest.mark.parametrize("after", ["replica=4", "1x1x1"])
def test_killed_and_resumed_with_other_replicas_the_loss_is_close(run, straight, killed, capsys, after):
    whole = straight(*ROUNDS)
    killed("moved", 11, 6, *ROUNDS)
    moved = run("moved", *over(list(ROUNDS), f"--mesh={after}"))
    assert f"of which each of {4 if after == 'replica=4' else 1} gets the mean" in capsys.readouterr().err
    a, b = ([line["loss"] for line in lines(one) if "loss" in line] for one in (moved, whole))
    np.testing.assert_allclose(a, b, rtol=2e-2)


@pytest.mark.exhaustive
def test_out_of_time_in_a_round_it_says_what_is_lost(request_of):
    """A stop waits for the end of the round; where grace_seconds are over before, its steps are lost."""
    options = ("--train.local-steps=10000", "--train.steps=20000", "--checkpoint.grace-seconds=1")
    argv = request_of("slow", *over(list(ROUNDS), *options))
    one = subprocess.Popen([sys.executable, "-m", "jaxdist.train", *argv], stderr=subprocess.PIPE, text=True)
    for line in one.stderr:
        if line.startswith("compiled"):
            break
    time.sleep(2)
    one.send_signal(signal.SIGTERM)
    _, said = one.communicate(timeout=60)
    assert one.returncode == 85, said
    assert re.search(r"the round after the outer step 0 is not finished, which loses \d+ local steps?; ", said)
