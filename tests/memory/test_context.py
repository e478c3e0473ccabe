"""Memory of context parallelism: temporary arrays grow as the part of a row that a device has, and no faster."""

import math
import re

import jax
import pytest

from jaxdist.config import Config, ModelConfig, ParallelConfig, TrainConfig
from jaxdist.training.run import Run
from tests.tiers import thinned

MODEL = ModelConfig(family="llama", layers=2, embed=16, heads=2, kv_heads=1, mlp=32, vocab=32, documents="apart")


def largest(tokens: int, remat: str) -> int:
    """Values of the largest array of a step, as traced, of a ring of two devices with so many tokens each."""
    config = Config(
        mesh="context=2",
        precision="float32",
        model=MODEL.model_copy(update=dict(sequence=2 * tokens, remat=remat)),
        parallel=ParallelConfig(zero=0, context="ring"),
        train=TrainConfig(global_batch_size=1, accumulation=1),
    )
    run = Run(config, devices=jax.devices()[:2])
    with jax.set_mesh(run.mesh):
        text = run.lower().as_text()
    return max(math.prod(map(int, dims.split("x"))) for dims in re.findall(r"tensor<([\dx]+)x[a-z]", text))


@pytest.mark.parametrize("remat", thinned([("none",), ("block",)], 2))
def test_the_largest_array_of_a_ring_with_documents_grows_as_the_row_does(remat):
    """Blocks of 256 queries see half of a device's keys. No mask of all blocks is kept for all layers."""
    assert largest(2048, remat) == 2 * largest(1024, remat)
