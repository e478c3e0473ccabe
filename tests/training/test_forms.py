"""A run whose layers have different parameters: saved, continued to the bit, and exported layer by layer."""

import shutil
from functools import partial

import jax
import numpy as np
import pytest
from safetensors import safe_open

from jaxdist import checkpoints
from tests.kinds import moe_of_two_forms  # noqa: F401  # used by itself
from tests.training.curves import without_times
from tests.training.test_resume import saved

OPTIONS = (
    "--model.family=moe", "--model.layers=4", "--model.experts=4", "--model.expert-mlp=16", "--train.steps=6",
    "--checkpoint.every=3", "--validation.every=0", "--mesh=data=2,expert=2", "--parallel.zero=3",
)  # fmt: skip
PIPED = "--mesh=data=2,pipeline=2", "--parallel.zero=2", "--pipeline.microbatches=2"


@pytest.mark.exhaustive
def test_continued_equals_straight_and_layers_keep_their_numbers(run, capsys, tmp_path):
    straight = run("straight", *OPTIONS)
    shutil.copytree(straight, tmp_path / "continued")
    shutil.rmtree(tmp_path / "continued" / "checkpoints" / "6")
    capsys.readouterr()
    continued = run("continued", *OPTIONS)
    assert "from the checkpoint of step 3" in capsys.readouterr().err
    jax.tree.map(np.testing.assert_array_equal, saved(continued, 6), saved(straight, 6))
    assert without_times(continued) == without_times(straight)

    piped = run("piped", *OPTIONS, *PIPED)
    shutil.rmtree(piped / "checkpoints" / "6")
    moved = run("piped", *OPTIONS)
    assert "from the checkpoint of step 3" in capsys.readouterr().err
    same = partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)
    jax.tree.map(same, saved(moved, 6)["params"], saved(straight, 6)["params"])

    path = tmp_path / "weights.safetensors"
    assert checkpoints.main([str(straight), f"--export={path}"]) == 0
    blocks = saved(straight, 6)["params"]["blocks"]
    with safe_open(path, "np") as file:
        np.testing.assert_array_equal(file.get_tensor("blocks.1.mlp.gate_up"), blocks["dense"]["mlp"]["gate_up"][1])
        np.testing.assert_array_equal(file.get_tensor("blocks.2.mlp.router"), blocks["routed"]["mlp"]["router"][0])
