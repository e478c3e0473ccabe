"""Promise 2 for LoRA on H100s that are not here: no gradient of a frozen weight moves, and none is computed."""

from functools import cache

import pytest

from jaxdist.config import Config, ModelConfig, ParallelConfig, PipelineConfig, TrainConfig
from jaxdist.explain import explain
from jaxdist.explaining.compared import PACKED
from jaxdist.explaining.report import Report
from jaxdist.mesh import parse_mesh
from jaxdist.programs import target
from tests.communication.arithmetic import product_flops
from tests.tiers import exhaustive

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not target.available(), reason="JAX's CUDA plug-in is not installed: jaxdist[target]"),
]

MODEL = ModelConfig(
    family="llama",
    layers=4,
    embed=128,
    heads=8,
    kv_heads=2,
    mlp=256,
    vocab=512,
    sequence=64,
    tied=False,
    lora_rank=8,
    lora_base="bfloat16",
)


@cache
def report(mesh: str, accumulation: int = 1, remat: str = "none", targets: str = "", **parallel) -> Report:
    """In bfloat16, at ZeRO 3 by default; a pipeline runs 1F1B."""
    model = MODEL.model_copy(update={"remat": remat, "lora_targets": targets})
    train = TrainConfig(global_batch_size=256, accumulation=accumulation)
    pipe = PipelineConfig(schedule="1f1b", microbatches=4) if parse_mesh(mesh)["pipeline"] > 1 else PipelineConfig()
    sharded = ParallelConfig(**{"zero": 3} | parallel)
    return explain(Config(mesh=mesh, model=model, parallel=sharded, train=train, pipeline=pipe), "h100")


@pytest.mark.parametrize(
    ("mesh", "of"),
    [
        ("8x1x1", dict()),
        *exhaustive(
            [
                ("2x4x1", dict(accumulation=4, remat="block", sequence=True)),
                ("2x2x1", dict(targets="o_proj,down_proj", zero=1, sequence=True)),
                ("2x2x2", dict(remat="stage", zero=1, sequence=True)),
                ("2x1x2", dict(remat="stage")),
            ]
        ),
    ],
    ids=str,
)
def test_bytes_of_collectives_and_of_arguments_are_predicted(mesh, of):
    found = report(mesh, **of)
    assert found.differences == []
    assert found.program.argument_bytes == found.memory.arguments


def test_only_gradients_of_adapters_are_reduced():
    """In f32, each once; of frozen weights nothing moves but the weights themselves, in bfloat16."""
    found = report("8x1x1")
    parameters = found.sharded.parameters
    adapters = sum(p.elements for p in parameters if ".lora." in p.name)
    gathered = sum((2 if p.stacked else 1) * p.elements for p in parameters)
    moved = {row.kind: row.payload_bytes for row in found.rows if row.elements > PACKED}
    assert moved == {"reduce-scatter": 4 * adapters, "all-gather": 2 * gathered}


def test_matmuls_are_those_of_values_of_their_inputs_gradients_and_of_adapters():
    """Two FLOPs for each parameter and token in the forward pass, and two for the gradient of what it multiplies.

    An adapter takes two more for its own gradient, and its first half two more to multiply again in the backward pass.
    """
    found = report("8x1x1")
    tokens = found.config.train.global_batch_size * MODEL.sequence // 8
    expected = 0
    for p in found.sharded.parameters:
        if p.name == "table" or "norm" in p.name:
            continue
        flops = 4
        if ".lora." in p.name:
            flops = 8 if p.name.endswith(".a") else 6
        expected += flops * tokens * p.elements
    assert product_flops(found.program.text) == expected
