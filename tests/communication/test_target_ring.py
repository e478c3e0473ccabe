"""Overlap of ring attention on GPUs: compiled for H100s that are not here, whether matmuls hide what the ring sends."""

import pytest

from jaxdist.config import Config, ModelConfig, ParallelConfig, TrainConfig
from jaxdist.context import ring_bytes
from jaxdist.explain import explain
from jaxdist.planning import target
from jaxdist.planning.overlap import by_axes
from jaxdist.planning.predicted_collectives import PERMUTE
from tests.tiers import exhaustive

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not target.available(), reason="JAX's CUDA plug-in is not installed: jaxdist[target]"),
]

LLAMA = ModelConfig(
    family="llama", layers=3, embed=256, heads=8, kv_heads=2, head_dim=64, mlp=512, vocab=512, sequence=4096
)


@pytest.mark.parametrize(
    ("ranks", "zero", "documents"),
    [
        (2, 0, "joined"),
        (4, 3, "apart"),
        *exhaustive([(4, 0, "joined"), (4, 3, "joined"), (8, 3, "apart"), (2, 3, "apart")]),
    ],
)
def test_matmuls_hide_every_permute_of_a_ring(ranks, zero, documents):
    """Documents apart are attended to by matmuls, others by cuDNN. A ring of 2 has no loop; one of 4 has."""
    config = Config(
        mesh=f"context={ranks}",
        precision="bfloat16",
        model=LLAMA.model_copy(update=dict(documents=documents)),
        parallel=ParallelConfig(zero=zero, context="ring"),
        train=TrainConfig(global_batch_size=1, accumulation=1),
    )
    permutes = [one for one in explain(config, "h100").collectives if one.kind == PERMUTE]
    over = by_axes(permutes)["context"]
    keys_and_values = 2 * LLAMA.sequence // ranks * LLAMA.kv_heads * LLAMA.head_dim
    assert over.products == over.total == LLAMA.layers * ring_bytes(keys_and_values, ranks, width=2)
