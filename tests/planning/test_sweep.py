"""`explain` exits with 0 for every shipped model, on CPUs and for H100s: no difference that is not known."""

import pytest

from jaxdist.explain import explain
from jaxdist.programs import target
from jaxdist.request import load

GPUS = pytest.param(
    "h100",
    marks=pytest.mark.skipif(not target.available(), reason="JAX's CUDA plug-in is not installed: jaxdist[target]"),
)

SHARDED = {"parallel.zero": "3", "train.accumulation": "4"}
OUTSIDE = SHARDED | {"parallel.micro_batches": "outside"}
TENSOR = {"parallel.zero": "1", "parallel.sequence": "true"}

ROWS = {"llama_70b": "256"}
"""Rows of a step: as many as the devices of `SWEEP` hold. XLA:GPU gathers again what it cannot hold."""

SWEEP = [
    ("cnn_digits", "8x1x1", {"parallel.zero": "3"}),
    *(
        (name, mesh, options)
        for name in ("gpt_tiny", "gpt2_124m", "llama_1b", "llama_3b", "llama_8b")
        for mesh, options in [("8x1x1", SHARDED), ("replica=2,data=4", OUTSIDE), ("2x2x2", TENSOR)]
    ),
    # On eight GPUs its state alone does not fit.
    *(
        ("llama_70b", mesh, options)
        for mesh, options in [("64x1x1", SHARDED), ("replica=2,data=32", OUTSIDE), ("4x8x2", TENSOR)]
    ),
]


@pytest.mark.exhaustive
@pytest.mark.parametrize("gpu", [None, GPUS])
@pytest.mark.parametrize(("name", "mesh", "options"), SWEEP, ids=str)
def test_every_difference_of_a_shipped_model_is_known(name, mesh, options, gpu):
    found = explain(load(name, options | {"mesh": mesh, "train.global_batch_size": ROWS.get(name, "64")}), gpu)
    assert found.unknown == []
