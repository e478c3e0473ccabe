"""A run with PipeDream's pipeline: each step's line once, in order, and a resumed run equal to the bit."""

import jax
import numpy as np
import pytest

from jaxdist import evaluate
from tests.training.conftest import over
from tests.training.curves import close, lines, without_times
from tests.training.test_resume import saved

PIPELINE = (
    "--mesh=1x1x3", "--model.layers=3", "--pipeline.schedule=pipedream", "--optimizer.clip=0", "--model.dropout=0.1",
    "--train.steps=12", "--checkpoint.every=5", "--validation.every=8", "--validation.batches=0",
)  # fmt: skip


@pytest.mark.exhaustive
def test_each_step_has_its_line(run, capsys):
    folder = run("straight", *PIPELINE)
    told = lines(folder)
    assert [line["step"] for line in told if "loss" in line] == list(range(1, 13))
    assert [line["step"] for line in told if "validation_loss" in line] == [8, 12]
    losses = [line["loss"] for line in told if "loss" in line]
    assert np.isfinite(losses).all()
    assert losses[-1] < losses[0]
    state = saved(folder, 12)["training"]
    assert int(state["step"]) == 12
    assert int(state["skipped"]) == 0
    assert evaluate.main([str(folder), "--mesh=1x1x1"]) == 0
    assert f"{told[-1]['validation_loss']:.4f}" in capsys.readouterr().out


@pytest.mark.slow
def test_killed_after_a_save_and_resumed_equals_straight_to_the_bit(run, killed):
    """A save empties the pipeline: what goes on after it is what is read from it."""
    straight = run("straight", *PIPELINE)
    killed("killed", 5, 5, *PIPELINE)
    resumed = run("killed", *PIPELINE)
    jax.tree.map(np.testing.assert_array_equal, saved(resumed, 12), saved(straight, 12))
    assert without_times(resumed) == without_times(straight)


@pytest.mark.exhaustive
def test_devices_that_share_each_row_change_nothing(run):
    """Heads are exchanged for them (Ulysses), because a ring must not lie in a branch."""
    shared, whole = (run(name, *over(list(PIPELINE), f"--mesh={name}")) for name in ("context=2,pipeline=3", "1x1x3"))
    close(lines(shared), lines(whole))


@pytest.mark.exhaustive
def test_going_on_without_a_delay_is_told(run, capsys):
    run("moved", *PIPELINE)
    moved = ["--mesh=1x1x1", *(word for word in PIPELINE if not word.startswith(("--mesh", "--pipeline")))]
    run("moved", *moved, "--resume=10")
    assert "PipeDream's gradient delay in the first stage changes from 2 steps to 0" in capsys.readouterr().err
