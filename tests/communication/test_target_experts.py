"""Promise 2 for the experts that GPUs would run: OLMoE compiled for eight H100s that are not here."""

from functools import cache

import pytest

from jaxdist.explain import explain
from jaxdist.explaining.report import Report
from jaxdist.explaining.text import lines as lines_of
from jaxdist.programs import target
from jaxdist.request import load

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not target.available(), reason="JAX's CUDA plug-in is not installed: jaxdist[target]"),
]


@cache
def olmoe() -> Report:
    """A row of 4096 tokens on each device, ZeRO 3, blocks recomputed."""
    asked = {
        "mesh": "expert=8",
        "precision": "bfloat16",
        "parallel.zero": "3",
        "model.remat": "block",
        "model.sequence": "4096",
        "train.global_batch_size": "8",
        "train.accumulation": "1",
    }
    return explain(load("olmoe_1b_7b", asked), "h100")


def test_every_collective_is_predicted_and_further_rounds_are_told_apart():
    found = olmoe()
    assert found.unknown == []
    assert set(found.repeated) == {(("expert",), "all-to-all")}
    (line,) = (line for line in lines_of(found) if "0 or more" in line)
    assert "further rounds of experts" in line


def test_arguments_are_predicted_to_the_byte_and_temporaries_about_right():
    found = olmoe()
    assert found.program.argument_bytes == found.memory.arguments
    predicted = found.memory.total - found.memory.arguments
    assert 0.85 < predicted / found.program.temporary_bytes < 1.15


def test_nothing_is_transposed_around_the_experts():
    """Of all bytes that kernels read and write, copies and transposes have at most 2 %."""
    kernels = olmoe().kernels
    assert kernels.copied <= 0.02 * kernels.bytes
