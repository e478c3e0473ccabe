"""What waits in the host's memory is the same as what waits on the device, bit by bit; checkpoints do not tell."""

import jax
import numpy as np
import pytest

from jaxdist.request import load
from jaxdist.sharding import HOST
from jaxdist.training.checkpoint.manager import Checkpoints
from jaxdist.training.forward.step import Metrics, TrainState
from jaxdist.training.run import Run
from tests.tiers import exhaustive, thinned

SIZES = {
    "model.layers": "2", "model.embed": "16", "model.heads": "4", "model.vocab": "304", "model.sequence": "16",
    "train.steps": "10", "optimizer.warmup": "0",
}  # fmt: skip

ROWS = [
    ("2x1x1", "3", "mixed", "offload", "1", "adamw"),
    ("1x1x1", "0", "bfloat16", "offload", "2", "adamw"),
    ("1x1x2", "1", "mixed", "block", "1", "adamw"),
    ("2x1x1", "1", "float32", "block", "1", "muon"),
]
"""Mesh, ZeRO stage, precision, remat, micro-batches, update rule; the moments of Muon are in blocks of codes."""

OTHERS = [
    ("2x1x1", "2", "float16", "block", "1", "adamw"),
    ("2x1x1", "2", "float32", "offload", "2", "adafactor"),
    ("data=2,context=2,model=1", "1", "mixed", "block", "1", "adamw"),
]


def run_with(mesh: str, zero: str, precision: str, remat: str, micro: str, rule: str, offload: str) -> Run:
    options = {"mesh": mesh, "parallel.zero": zero, "precision": precision, "model.remat": remat}
    options |= {"optimizer.name": rule} | ({"optimizer.moments": "int8"} if rule == "muon" else {})
    options |= {"pipeline.microbatches" if mesh.endswith("2") else "train.accumulation": micro}
    run = Run(load(None, SIZES | options | {"parallel.offload": offload}))
    run.steps = 10  # of the schedule; no data is read
    return run


def three_steps(run: Run) -> tuple[TrainState, list[Metrics]]:
    rng, told = np.random.default_rng(0), []
    state, step = run.engine.init(), run.compile()
    ids = lambda a: rng.integers(0, 304, a.shape).astype(a.dtype)
    for _ in range(3):
        state, metrics = step(state, jax.tree.map(lambda a: jax.device_put(ids(a), a.sharding), run.batch()))
        told.append(jax.device_get(metrics))
    return state, told


def memories(tree) -> set[str]:
    return {a.sharding.memory_kind for a in jax.tree.leaves(tree) if a.ndim}


@pytest.mark.parametrize(
    ("mesh", "zero", "precision", "remat", "micro", "rule"), [*thinned(ROWS, len(ROWS)), *exhaustive(OTHERS)]
)
def test_steps_from_the_hosts_memory_are_the_same_and_go_on_from_either(
    mesh, zero, precision, remat, micro, rule, tmp_path
):
    plain = run_with(mesh, zero, precision, remat.replace("offload", "block"), micro, rule, "none")
    moved = run_with(mesh, zero, precision, remat, micro, rule, "optimizer")
    with jax.set_mesh(plain.mesh):
        (wanted, wanted_metrics), (state, metrics) = three_steps(plain), three_steps(moved)
        same(metrics, wanted_metrics)
        same(state, wanted)
        assert memories(wanted.optimizer) == {"device"}
        assert memories(state.optimizer) == {HOST}
        assert memories(state.params) == ({HOST} if precision == "mixed" else {"device"})
        assert memories(state.weights) <= {"device"}
        for run, held, other in (plain, wanted, moved), (moved, state, plain):
            folder = tmp_path / run.config.parallel.offload
            with Checkpoints(folder, keep=1) as checkpoints:
                checkpoints.save(3, run.step.logical(held), {"step": 3})
            with Checkpoints(folder, keep=None) as checkpoints:
                restored = other.step.resume(checkpoints.restore(other.engine.abstract_logical()))
            same(restored, wanted)
            assert jax.tree.map(kind, restored) == jax.tree.map(kind, other.engine.abstract())


def same(a, b) -> None:
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(a), jax.device_get(b))


def kind(a) -> str:
    return a.sharding.memory_kind or "device"
