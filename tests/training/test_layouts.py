"""A checkpoint depends on no layout: saved with one mesh and ZeRO stage, it is restored with any other."""

from pathlib import Path

import jax
import numpy as np
import pytest

from jaxdist.request import load
from jaxdist.training.checkpoint.manager import Checkpoints
from jaxdist.training.forward.step import TrainState
from jaxdist.training.run import Run
from tests.tiers import thinned

pytestmark = pytest.mark.smoke

SIZES = {
    "model.layers": "2", "model.embed": "16", "model.heads": "4", "model.vocab": "304", "model.sequence": "16",
    "train.steps": "10",
}  # fmt: skip

BEFORE = {"mesh": "8x1x1", "parallel.zero": "3"}
AFTER = [
    {"mesh": "2x4x1", "parallel.zero": "0"},
    {"mesh": "replica=2,data=2,model=2", "parallel.zero": "2", "parallel.sequence": "true"},
    {"mesh": "replica=2,data=2,model=2", "parallel.zero": "1", "parallel.sequence": "true", "precision": "mixed"},
    {"mesh": "1x1x1"},
]


def laid_out(options: dict[str, str], folder: Path) -> Run:
    run = Run(load(None, SIZES | options | {"run_dir": str(folder)}))
    run.steps = 10  # of the schedule; no data is read
    return run


def with_values_of_its_own(state: TrainState) -> TrainState:
    """Every array, the optimizer's too, filled with numbers that tell an element from its neighbours."""
    number = lambda a: (np.arange(a.size) % 997).reshape(a.shape).astype(a.dtype)
    return jax.tree.map(lambda a: jax.device_put(number(a), a.sharding), state)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """(the folder of a checkpoint saved with ZeRO 3 on eight devices, what it holds)"""
    folder = tmp_path_factory.mktemp("layouts")
    run = laid_out(BEFORE, folder)
    with jax.set_mesh(run.mesh), Checkpoints(folder, keep=1) as checkpoints:
        state = with_values_of_its_own(run.engine.init())
        assert not state.params["table"].is_fully_replicated
        checkpoints.save(3, state, {"step": 3})
    return folder, jax.device_get(state)


@pytest.mark.parametrize("options", thinned(zip(AFTER), 2), ids=lambda options: "-".join(options.values()))
def test_restored_with_another_layout_it_is_the_same(saved, options):
    folder, wanted = saved
    run = laid_out(options, folder)
    with jax.set_mesh(run.mesh), Checkpoints(folder, keep=None) as checkpoints:
        abstract = run.engine.abstract()
        state = run.step.resume(checkpoints.restore(abstract))
    same = jax.tree.map(lambda a, b: a.sharding.is_equivalent_to(b.sharding, a.ndim), state, abstract)
    assert all(jax.tree.leaves(same))
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state._replace(weights=None)), wanted)
    if run.step.keep:
        in_bfloat16 = jax.tree.map(lambda w: np.asarray(w, state.weights["table"].dtype), wanted.params)
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(state.weights), in_bfloat16)
