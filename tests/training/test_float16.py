"""A run in float16: its scale of the loss is told, saved, and goes on to the bit."""

import numpy as np
import pytest

from jaxdist.training.forward import loss_scale
from tests.training.curves import lines, parameters

pytestmark = pytest.mark.exhaustive

FIGURES = ("step", "loss", "grad_norm", "loss_scale", "skipped")


def test_a_run_goes_back_and_takes_the_same_steps_to_the_bit(run, monkeypatch):
    """Its scale is too large at first, and is doubled so soon that it is too large again."""
    monkeypatch.setattr(loss_scale, "FIRST", 2.0**26)
    monkeypatch.setattr(loss_scale, "PATIENCE", 2)
    options = (
        *("--precision=float16", "--mesh=2x2x1", "--parallel.zero=2", "--train.steps=16"),
        *("--checkpoint.every=4", "--checkpoint.keep=4", "--validation.every=0", "--model.layers=1"),
    )
    folder = run("run", *options)

    def told() -> list[tuple]:
        return [tuple(line[name] for name in FIGURES) for line in lines(folder) if "loss" in line]

    before, at_end = told(), parameters(folder, 16)
    scales = [line[3] for line in before]
    skipped = [line[4] for line in before]
    assert scales[0] == 2.0**26
    assert skipped[0] == 1
    for step in range(1, 16):
        overflowed = skipped[step - 1] > (skipped[step - 2] if step > 1 else 0)
        assert scales[step] == scales[step - 1] / 2 if overflowed else scales[step] >= scales[step - 1]
    assert max(np.diff(scales)) > 0
    run("run", *options, "--resume=8")
    assert told() == before
    np.testing.assert_array_equal(parameters(folder, 16), at_end)
