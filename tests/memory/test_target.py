"""Temporary bytes of the program that a GPU would run, compiled for H100s that are not here: predicted within 15 %."""

from functools import cache

import pytest

from jaxdist.explain import explain
from jaxdist.planning import target
from jaxdist.planning.report import Report
from jaxdist.request import load

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not target.available(), reason="JAX's CUDA plug-in is not installed: jaxdist[target]"),
]


@pytest.mark.parametrize(
    ("zero", "remat", "accumulation"),
    [(0, "none", 1), (0, "block", 1), (1, "block", 4), (3, "none", 1), (3, "block", 1)],
)
def test_temporary_bytes_of_llama_1b_on_eight_h100s(zero, remat, accumulation):
    found = llama_1b(zero, remat, accumulation)
    assert found.program.argument_bytes == found.memory.arguments
    predicted = found.memory.total - found.memory.arguments
    assert 0.85 < predicted / found.program.temporary_bytes < 1.15


@cache
def llama_1b(zero: int, remat: str, accumulation: int) -> Report:
    """Two rows of 2048 tokens a micro-batch and device, in bfloat16."""
    asked = {
        "mesh": "8x1x1",
        "parallel.zero": str(zero),
        "model.remat": remat,
        "model.sequence": "2048",
        "train.accumulation": str(accumulation),
        "train.global_batch_size": str(16 * accumulation),
    }
    return explain(load("llama_1b", asked), "h100")
