"""Precision `mixed`: bfloat16 weights kept in use beside f32 masters. The masters alone are saved."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdist import evaluate
from tests.parity import cases
from tests.tiers import exhaustive, thinned
from tests.training.curves import lines, without_times
from tests.training.test_resume import saved

pytestmark = pytest.mark.smoke


@cache
def one_device() -> cases.Outcome:
    return cases.train("1x1x1", dtype=jnp.bfloat16, keep=True)


@pytest.mark.parametrize(
    ("mesh", "accumulation", "stage", "sequence"),
    [
        *thinned(
            [("2x2x1", 2, 3, True), ("1x1x1", 4, 0, False), ("4x1x1", 1, 1, False), ("data=2,replica=2", 2, 2, False)],
            4,
        ),
        *exhaustive([("data=2,context=2", 2, 3, False)]),
    ],
)
def test_equals_one_device_in_mixed(mesh, accumulation, stage, sequence):
    """To what rounding to bfloat16 leaves, as for `bfloat16`."""
    got = cases.train(mesh, accumulation, dtype=jnp.bfloat16, stage=stage, sequence=sequence, keep=True)
    cases.assert_equal(got, one_device(), tolerance=2e-2)
    assert {leaf.dtype for leaf in jax.tree.leaves(got.after)} == {np.dtype("float32")}


def test_equals_bfloat16():
    """Weights that are kept are those that would be cast at the start of the step."""
    cases.assert_equal(cases.train("1x1x1", dtype=jnp.bfloat16), one_device(), tolerance=1e-2)


def losses(folder) -> list[float]:
    return [line["loss"] for line in lines(folder) if "loss" in line]


@pytest.mark.slow
def test_trains_as_bfloat16_does(run):
    mixed, wanted = (losses(run(name, f"--precision={name}", "--mesh=2x1x1")) for name in ("mixed", "bfloat16"))
    assert mixed[-1] < mixed[0] - 0.2
    np.testing.assert_allclose(mixed, wanted, rtol=5e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [("--mesh=2x2x1", "--parallel.zero=3"), *exhaustive([(("--mesh=4x1x1", "--parallel.zero=1"),)])]
)
def test_killed_and_resumed_equals_straight_to_the_bit(run, killed, options):
    options = (*options, "--precision=mixed", "--checkpoint.every=7", "--train.accumulation=2")
    straight = run("straight", *options)
    killed("killed", 7, 7, *options)
    resumed = run("killed", *options)
    jax.tree.map(np.testing.assert_array_equal, saved(resumed), saved(straight))
    assert without_times(resumed) == without_times(straight)


@pytest.mark.slow
def test_a_checkpoint_holds_f32_masters_only(run, capsys):
    folder = run("masters", "--precision=mixed", "--mesh=2x1x1", "--parallel.zero=1")
    found = saved(folder)
    assert "weights" not in found["training"]
    assert {leaf.dtype for leaf in jax.tree.leaves(found["params"])} == {np.dtype("float32")}
    capsys.readouterr()
    assert evaluate.main([str(folder), "--mesh=1x1x1", "--precision=float32"]) == 0
    wanted = [line["validation_loss"] for line in lines(folder) if "validation_loss" in line][-1]
    assert float(capsys.readouterr().out.split()[4]) == pytest.approx(wanted, rel=0.2)
