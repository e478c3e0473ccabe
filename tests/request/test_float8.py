"""fp8 is refused before anything compiles: on GPUs without it, and for matmuls that are not written for it."""

import pytest

import jaxdist
from jaxdist.config import Config, RequestError
from jaxdist.mesh import parse_mesh
from jaxdist.mesh.split import Split
from jaxdist.planning.hardware import GPUS
from jaxdist.request import load
from jaxdist.training.run import Run
from jaxdist.training.verifying_runs import comparable

FP8 = Config(mesh="1x1x1", precision="fp8")


def test_matmuls_that_are_not_written_for_it_are_refused():
    with pytest.raises(RequestError) as caught:
        load("cnn_digits", {"precision": "fp8"})
    (problem,) = (one for one in caught.value.problems if "precision is fp8" in one)
    assert problem == (
        "precision is fp8, but model.family is cnn, and the matmuls of a network for images are not written for it; "
        "set precision to bfloat16"
    )


def test_gpus_without_it_are_refused():
    assert [Run(FP8, dry=True, gpu=GPUS[name]).layout.float8 for name in ("l4", "h100", "b200")] == [True] * 3
    assert Run(FP8, dry=True).layout.float8
    assert not Run(FP8.model_copy(update={"precision": "bfloat16"}), dry=True, gpu=GPUS["h100"]).layout.float8
    with pytest.raises(RequestError, match="precision is fp8, but these GPUs have no fp8; set precision to"):
        Run(FP8, dry=True, gpu=GPUS["a100"])
    # AMD's, whose formats are others.
    with pytest.raises(RequestError, match="these GPUs have no fp8"):
        FP8.with_precision(cpu=False, capability=())


def test_a_step_of_it_is_not_verified():
    with pytest.raises(RequestError, match=r"precision is fp8, .* as much as a fault; verify with precision bfloat16"):
        comparable(Split(FP8, parse_mesh("1x1x1")))


def test_it_is_no_precision_of_modules():
    with pytest.raises(ValueError, match=r"precision is 'fp8', .* its matmuls are its own; use 'bfloat16'"):
        jaxdist.parallelize(lambda rngs: None, lambda module, batch: 0.0, None, "1x1x1", precision="fp8")
