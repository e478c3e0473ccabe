"""Promise 2 for the program that a GPU would run: compiled for H100s that are not here, and held against theory."""

from functools import cache

import jax
import pytest

from jaxdist.config import Config, ModelConfig, ParallelConfig, TrainConfig
from jaxdist.explain import explain
from jaxdist.explaining.compared import PACKED
from jaxdist.explaining.report import Report
from jaxdist.programs import target
from jaxdist.programs.overlap import by_axes
from jaxdist.request import load
from tests.memory.test_target import llama_1b
from tests.tiers import exhaustive

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not target.available(), reason="JAX's CUDA plug-in is not installed: jaxdist[target]"),
]

GPT = ModelConfig(layers=3, embed=128, heads=4, vocab=512, sequence=64)
LLAMA = GPT.model_copy(update=dict(family="llama", heads=8, kv_heads=2, mlp=256, tied=False, remat="block"))
OLMO = LLAMA.model_copy(update=dict(head_dim=32, qkv_bias=True, qk_norm="full", window=16))


@cache
def report(
    mesh: str, accumulation: int = 1, model: ModelConfig = GPT, deterministic: bool = False, **parallel
) -> Report:
    """In bfloat16."""
    train = TrainConfig(global_batch_size=256, accumulation=accumulation, deterministic=deterministic)
    return explain(Config(mesh=mesh, model=model, parallel=ParallelConfig(**parallel), train=train), "h100")


def sent_over_data(found: Report) -> float:
    """Elements of one device, scalars left out as far as they are not packed into vectors."""
    over = [one for one in found.collectives if one.axes == ("data",)]
    return sum(one.wire * one.array_elements / one.elements for one in over)


@pytest.mark.parametrize(
    ("zero", "accumulation", "devices"),  # 64 devices at stage 3, where some parameters do not divide
    [(3, 1, 64), (3, 4, 8), *exhaustive([(1, 1, 4), (0, 4, 8), (1, 4, 64), (2, 4, 8)])],
)
def test_elements_over_data_are_those_of_the_zero_paper(zero, accumulation, devices):
    """Rajbhandari et al. 2020, section 7: 2 a parameter, and at stage 3 3 for those of the layers, times (N-1)/N."""
    found = report(f"{devices}x1x1", accumulation, zero=zero)
    parameters = found.sharded.parameters
    layers = sum(p.elements for p in parameters if p.stacked and p.name != "blocks.mlp.down_bias")
    expected = 2 * sum(p.elements for p in parameters) + (layers if zero == 3 else 0)
    # what has no dim that splits over 64 devices is all-reduced: it counts 2 at any stage
    whole = sum(p.elements for p in parameters if p.stacked and p.whole) if zero == 3 else 0
    expected = (expected - whole) * (devices - 1) / devices
    assert expected <= sent_over_data(found) <= expected + 2 * PACKED


@pytest.mark.parametrize(("zero", "accumulation"), [(0, 1), (1, 4), (3, 1)])
def test_only_scalars_and_the_last_reductions_are_waited_for(zero, accumulation):
    """Of Llama 1B over `data`: stages 0 and 1 reduce after the last of k micro-batches, when nothing is left to run
    beside; jax 0.11 reduces a layer's gradients at the end of its turn. What tensor and sequence parallelism wait for
    is told in docs/explanation/communication.md.
    """
    of_turn = zero == 3 and jax.__version_info__ >= (0, 11)
    at_the_end = lambda one: (
        one.kind != "all-gather" and one.depth == of_turn and (of_turn or (zero < 2 and accumulation > 1))
    )
    found = llama_1b(zero, "block", accumulation).collectives
    waited_for = [one for one in found if one.sync and one.elements > PACKED]
    assert all(map(at_the_end, waited_for)), waited_for


@pytest.mark.parametrize("zero", [1, 3])
def test_weights_are_gathered_in_bfloat16_and_gradients_reduced_in_float32(zero):
    found = report("8x1x1", 4, zero=3) if zero == 3 else report("4x1x1", 1, zero=1, deterministic=True)
    dtypes = {one.kind: one.dtypes for one in found.collectives if one.array_elements > PACKED}
    assert dtypes == {"all-gather": ("bf16",), "reduce-scatter": ("f32",)}


def test_a_deterministic_step_adds_no_two_numbers_to_one_place_at_once():
    """The rows of a token that occurs several times are added up before they are written; without the knob, atomically.

    What cuDNN does in its backward pass the program does not show: it follows from the same option.
    """
    written = lambda found: [line for line in found.program.text.splitlines() if " scatter(" in line]
    asked = report("4x1x1", 1, zero=1, deterministic=True)
    assert written(asked)
    assert all("unique_indices=true" in line for line in written(asked))
    assert not all("unique_indices=true" in line for line in written(report("8x1x1", 4, zero=3)))
    assert any("xla_gpu_exclude_nondeterministic_ops=true" in note for note in asked.notes)


@pytest.mark.parametrize(
    ("mesh", "accumulation", "model", "parallel"),
    [
        ("replica=2,data=2,model=2", 4, GPT, dict(zero=2)),
        ("4x2x1", 1, GPT, dict(zero=0, sequence=True)),
        ("2x4x1", 4, LLAMA, dict(zero=3, sequence=True)),
        ("8x2x1", 4, LLAMA, dict(zero=3, sequence=True)),  # data goes from host to host
        ("2x4x1", 1, OLMO, dict(zero=1, sequence=True)),
        *exhaustive(
            [
                ("replica=2,data=4", 4, LLAMA, dict(zero=1)),
                ("1x8x1", 1, LLAMA, dict(zero=0)),
                ("1x8x1", 4, LLAMA, dict(zero=0)),
            ]
        ),
    ],  # every axis, stage, model, accumulation and sequence parallelism; the other pairs are proved on CPU
    ids=str,
)
def test_every_collective_is_predicted(mesh, accumulation, model, parallel):
    found = report(mesh, accumulation, model, **parallel)
    assert found.differences == []
    assert all(abs(row.payload_bytes - row.predicted_bytes) <= 4 * PACKED for row in found.rows)
    assert found.program.argument_bytes == found.memory.arguments


@pytest.mark.parametrize("zero", [0, 3])
def test_delayed_gradients_cross_beside_matmuls(zero):
    """All of them, of two hosts of 8 GPUs, even where a loop of matmuls has all-gathers of its own."""
    asked = {"mesh": "replica=2,data=8", "model.layers": "8", "parallel.zero": str(zero)}
    asked |= {"model.unroll_layers": "false", "parallel.delayed_gradients": "true"}
    found = explain(load("llama_1b", asked), "h100")
    over = by_axes(found.collectives)["replica"]
    assert over.products == over.total > 0
