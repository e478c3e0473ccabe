"""What `jaxdist.parallelize` sends where a loss may look at all rows, and XLA partitions the module: compiled for H100s
that are not here. For CPUs, XLA all-reduces whole gradients and keeps shards of them.
"""

from collections import Counter
from functools import partial

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import jaxdist
from jaxdist.mesh import abstract_mesh, parse_mesh
from jaxdist.programs import target
from jaxdist.programs.cross_compile import compile_apart
from jaxdist.programs.hlo import collectives
from tests.parity.modules import next_word
from tests.tiers import exhaustive

pytestmark = [
    pytest.mark.slow,  # 6 s each
    pytest.mark.skipif(not target.available(), reason="JAX's CUDA plug-in is not installed: jaxdist[target]"),
]

WORDS, WIDTH, LAYERS, ROWS = 512, 128, 3, {"x": jax.ShapeDtypeStruct((256, 17), jnp.int32)}
TABLE, STACK = WORDS * WIDTH, LAYERS * 2 * 4 * WIDTH**2


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.down(jnp.tanh(self.up(x)))


class Model(nnx.Module):
    """A tied table, which is used twice, and a stack of layers."""

    def __init__(self, rngs: nnx.Rngs):
        self.words = nnx.Embed(WORDS, WIDTH, rngs=rngs)
        self.blocks = jaxdist.stack(Block, LAYERS, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.words.attend(jaxdist.scan(self.blocks, self.words(x)))


def lower(mesh: str, zero: int, k: int, devices) -> jax.stages.Lowered:
    options = dict(mesh=mesh, zero=zero, accumulation=k, precision="bfloat16", devices=devices)
    return jaxdist.parallelize(Model, next_word, optax.adam(1e-3), **options).lower(ROWS)


def sent(mesh: str, zero: int, k: int) -> Counter:
    """Elements of one device by kind and axes, without scalars."""
    shape = parse_mesh(mesh)
    program = compile_apart(partial(lower, mesh, zero, k), "h100", 8)
    found = Counter()
    for one in collectives(program.text, abstract_mesh(shape)):
        found[(one.kind, *one.axes)] += one.count * one.array_elements if one.elements > WIDTH else 0
    return +found


@pytest.mark.parametrize(("zero", "k"), [(2, 1), (3, 2), *exhaustive([(1, 4), (2, 4), (3, 1)])])
def test_no_whole_gradient_is_all_reduced(zero, k):
    """Each use of a weight is a reduce-scatter in each micro-batch: half of an all-reduce. Stage 3 gathers weights in
    each micro-batch, and those of layers in both passes."""
    gathered = k * (TABLE + 2 * STACK) if zero == 3 else TABLE + STACK
    expected = {("all-gather", "data"): gathered, ("reduce-scatter", "data"): k * (2 * TABLE + STACK)}
    assert sent("8x1x1", zero, k) == expected


@pytest.mark.exhaustive
def test_replicas_add_up_shards():
    expected = {
        ("all-gather", "data"): TABLE + STACK,
        ("reduce-scatter", "data"): 2 * TABLE + STACK,
        ("all-reduce", "replica"): (2 * TABLE + STACK) // 4,
    }
    assert sent("replica=2,data=4", 2, 1) == expected
