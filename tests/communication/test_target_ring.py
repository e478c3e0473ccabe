"""Ring attention on GPUs, compiled for H100s that are not here: what it sends, what hides that, and what it holds."""

from functools import cache

import pytest

from jaxdist.config import Config, ModelConfig, ParallelConfig, TrainConfig
from jaxdist.explain import explain
from jaxdist.explaining.report import Report
from jaxdist.mesh.context import ring_bytes
from jaxdist.planning.predicted_collectives import PERMUTE
from jaxdist.programs import target
from jaxdist.programs.overlap import by_axes
from tests.tiers import exhaustive

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not target.available(), reason="JAX's CUDA plug-in is not installed: jaxdist[target]"),
]

TOKENS = {"joined": 16384, "apart": 1024}
"""Those of a device. XLA joins permutes of few keys and values, and sends those of many side by side."""

LLAMA = ModelConfig(family="llama", layers=3, embed=256, heads=8, kv_heads=4, head_dim=128, mlp=512, vocab=512)

ROWS = [
    (4, 0, "joined"),
    (4, 3, "apart"),
    *exhaustive([(2, 0, "joined"), (4, 3, "joined"), (8, 3, "apart"), (2, 3, "apart")]),
]
"""Documents apart are attended to by matmuls, others by cuDNN. A ring of 2 has no loop; one of 4 has."""


@cache
def report(ranks: int, zero: int, documents: str) -> Report:
    """One row, in bfloat16."""
    config = Config(
        mesh=f"context={ranks}",
        precision="bfloat16",
        model=LLAMA.model_copy(update=dict(documents=documents, sequence=TOKENS[documents] * ranks)),
        parallel=ParallelConfig(zero=zero, context="ring"),
        train=TrainConfig(global_batch_size=1, accumulation=1),
    )
    return explain(config, "h100")


@pytest.mark.parametrize(("ranks", "zero", "documents"), ROWS)
def test_matmuls_hide_every_permute_of_a_ring(ranks, zero, documents):
    permutes = [one for one in report(ranks, zero, documents).collectives if one.kind == PERMUTE]
    over = by_axes(permutes)["context"]
    keys_and_values = 2 * TOKENS[documents] * LLAMA.kv_heads * LLAMA.head_dim
    assert over.products == over.total == LLAMA.layers * ring_bytes(keys_and_values, ranks, width=2)


@pytest.mark.parametrize(("ranks", "zero", "documents"), ROWS)
def test_every_collective_and_every_byte_of_the_arguments_is_predicted(ranks, zero, documents):
    found = report(ranks, zero, documents)
    assert found.differences == []
    assert found.program.argument_bytes == found.memory.arguments


def test_temporaries_do_not_grow_with_the_ring():
    """Where each device has as many tokens. A ring of two has no loop, and needs less."""
    four, eight = (report(ranks, 0, "joined").program.temporary_bytes for ranks in (4, 8))
    assert four == eight
