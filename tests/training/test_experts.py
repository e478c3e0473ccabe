"""A run with experts that is killed goes on: same mesh, same bits; another number of devices for them, to 1e-5."""

import shutil

import jax
import numpy as np
import pytest

from tests.training.curves import alike, without_times
from tests.training.kills import kill_after
from tests.training.test_resume import saved

OPTIONS = (
    "--model.family=moe", "--model.experts=4", "--model.expert-mlp=16", "--model.shared-experts=1",
    "--model.balance-loss=0.01", "--model.capacity-factor=0.5", "--checkpoint.every=7",
)  # fmt: skip


@pytest.mark.slow
def test_killed_and_resumed_equals_straight_and_on_another_mesh_to_1e5(run, request_of):
    own = (*OPTIONS, "--mesh=data=2,expert=2", "--parallel.zero=3")
    straight = run("straight", *own)
    kill_after(7, 7, request_of("killed", *own))
    killed = straight.parent / "killed"
    shutil.copytree(killed, straight.parent / "moved")

    resumed = run("killed", *own)
    jax.tree.map(np.testing.assert_array_equal, saved(resumed), saved(straight))
    assert without_times(resumed) == without_times(straight)
    balance = saved(straight)["params"]["blocks"]["mlp"]["balance"]
    assert np.abs(balance).max() > 2e-3  # it moves, by 1e-3 a step

    moved = run("moved", *OPTIONS, "--mesh=expert=4,model=2")
    alike(moved, straight, 20)
    np.testing.assert_array_equal(saved(moved)["params"]["blocks"]["mlp"]["balance"], balance)
