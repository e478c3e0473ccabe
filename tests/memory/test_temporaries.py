"""What ZeRO saves inside a step, seen in the temporary memory and the arrays of the compiled program."""

import re
from functools import cache

import jax
import numpy as np
import pytest

from jaxdist.config import ParallelConfig
from tests.communication.steps import compiled, parameters, run
from tests.parity import cases
from tests.tiers import thinned

MESH, WAYS, LAYERS = "8x1x1", 8, (2, 6)


def deep(layers: int):
    return cases.MODEL.model_copy(update={"layers": layers, "embed": 128, "vocab": 64})


def program(layers: int, stage: int, accumulation: int):
    return compiled(MESH, accumulation, deep(layers), ParallelConfig(zero=stage))


@cache
def bytes_per_parameter(stage: int, accumulation: int) -> float:
    """Those that one more parameter of a layer costs: the difference between 6 layers and 2."""
    few, many = (program(n, stage, accumulation).memory_analysis().temp_size_in_bytes for n in LAYERS)
    return (many - few) / (parameters(deep(LAYERS[1])) - parameters(deep(LAYERS[0])))


def holds(stage: int, accumulation: int, width: int) -> bool:
    """Whether the program has an array that stacks all layers of the MLP's first weight, `width` rows of it."""
    text = program(LAYERS[1], stage, accumulation).as_text()
    return bool(re.search(rf"f32\[{LAYERS[1]},{width},{deep(2).mlp_size}\]", text))


@pytest.mark.slow
def test_stage_2_holds_a_shard_of_the_gradients_and_stage_1_all():
    """With 4 micro-batches, an f32 accumulator: 4 bytes a parameter, or 4/8."""
    assert bytes_per_parameter(1, 4) - bytes_per_parameter(2, 4) > 4 * (1 - 1 / WAYS)
    assert holds(2, 4, 128 // WAYS)


@pytest.mark.slow
@pytest.mark.parametrize("accumulation", [1, 4])
def test_stage_3_holds_no_stack_of_whole_weights_nor_of_whole_gradients(accumulation):
    """Gathered weights are not kept for the backward pass."""
    assert not holds(3, accumulation, 128)
    assert holds(3, accumulation, 128 // WAYS)
    assert bytes_per_parameter(3, accumulation) < 4


@pytest.mark.slow
def test_the_reader_sees_whole_stacks():
    """So that the tests above cannot pass by not seeing."""
    assert holds(1, 4, 128)
    assert holds(2, 4, 128)  # the weights, which stage 2 gathers all at once
    assert bytes_per_parameter(2, 4) > 4


def initial(mesh: str, parallel: ParallelConfig):
    """(parameters, temporary bytes of a device while they are made)"""
    asked = run(mesh, 1, deep(2), parallel)
    with jax.set_mesh(asked.mesh):
        init = jax.jit(asked.step.init).lower(jax.random.key(7)).compile()
        return jax.device_get(init(jax.random.key(7)).params), init.memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize(
    ("mesh", "parallel"),
    thinned([("8x1x1", ParallelConfig(zero=3)), ("2x4x1", ParallelConfig(zero=1, sequence=True))], 2),
)
def test_each_device_makes_its_own_shards_of_the_same_initial_parameters(mesh, parallel):
    wanted, whole = initial("1x1x1", ParallelConfig())
    got, shard = initial(mesh, parallel)
    assert jax.tree.all(jax.tree.map(np.array_equal, got, wanted))
    assert shard < 1.1 * whole / WAYS
