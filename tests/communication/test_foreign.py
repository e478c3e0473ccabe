"""What `jaxdist.parallelize` sends, read off the program: elements per parameter, times (N-1)/N."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxdist
from jaxdist.api import Parallel
from tests.parity.modules import CASES, Deep, Tied, next_word

ROWS = {"x": np.zeros((32, 9), np.int32)}


def make(mesh: str, loss=next_word, model=Tied, **options) -> Parallel:
    return jaxdist.parallelize(model, loss, optax.adam(1e-3), mesh=mesh, **options)


def sent(on_mesh: Parallel, batch=ROWS) -> float:
    """Scalars left out."""
    parameters = sum(a.size for a in jax.tree.leaves(on_mesh.model.abstract))
    ranks = on_mesh.layout.ranks
    total = sum(one.wire * one.array_elements / one.elements for one in on_mesh.collectives(batch))
    return total / parameters * ranks / (ranks - 1)


@pytest.mark.parametrize(
    ("zero", "accumulation", "expected"), [(0, 1, 2), (0, 4, 2), (1, 4, 2), (2, 1, 2), (2, 4, 5), (3, 1, 2)]
)
def test_devices_apart_reduce_a_tied_table_and_micro_batches_once(zero, accumulation, expected):
    """Stage 2 reduces after every micro-batch, since it keeps shards only. All parameters here divide by 8."""
    assert sent(make("8x1x1", zero=zero, accumulation=accumulation, scope="rows")) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize(("accumulation", "expected"), [(1, 1), (4, 4)])
def test_devices_together_reduce_every_use_of_a_weight_in_every_micro_batch(accumulation, expected):
    """What a loss costs that may look at all rows: the tied table is used twice."""
    on_mesh = make("8x1x1", accumulation=accumulation)
    sizes = [a.size for a in jax.tree.leaves(on_mesh.model.abstract)]
    uses = (sum(sizes) + max(sizes)) / sum(sizes)
    assert sent(on_mesh) == pytest.approx(2 * expected * uses, rel=1e-3)


def test_replicas_reduce_shards():
    """Each of them holds its own copy of the user's optimizer state."""
    found = make("replica=2,data=4", zero=3, scope="rows").collectives(ROWS)
    assert {(one.kind, one.axes) for one in found if one.array_elements} == {
        ("all-gather", ("data",)),
        ("reduce-scatter", ("data",)),
        ("all-reduce", ("replica",)),
    }


class Wide(nnx.Module):
    """Two matrices whose dims are named."""

    def __init__(self, rngs: nnx.Rngs):
        normal = lambda *shape: 0.1 * rngs.params.normal(shape)
        self.up = nnx.Param(normal(12, 64), axes=("embed", "mlp"))
        self.down = nnx.Param(normal(64, 8), axes=("mlp", None))

    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.tanh(x @ self.up[...]) @ self.down[...]


def test_logical_axes_make_tensor_parallelism():
    """Column, then row (Shoeybi et al. 2019, section 3): one all-reduce of the outputs over `model`, and no weight."""
    _, loss, batch = CASES["mlp"]
    rules = {"mlp": ("model",)}
    on_mesh, alone = make("2x4x1", loss, Wide, rules=rules), make("1x1x1", loss, Wide)
    assert on_mesh.shardings.params["up"].spec == jax.P(None, "model")
    rows = batch(np.random.default_rng(0))
    over_model = [one for one in on_mesh.collectives(rows) if "model" in one.axes and one.array_elements]
    assert [(one.kind, one.array_elements) for one in over_model] == [("all-reduce", 16 // 2 * 8)]
    states = on_mesh.init(0), alone.init(0)
    for _ in range(3):
        rows = batch(np.random.default_rng(1))
        (a, one), (b, other) = on_mesh.step(states[0], rows), alone.step(states[1], rows)
        states = a, b
        np.testing.assert_allclose([one.loss, one.grad_norm], [other.loss, other.grad_norm], rtol=1e-5)
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
    jax.tree.map(close, *(jax.device_get(state.params) for state in states))


def test_stacked_layers_are_whole_one_at_a_time():
    """FSDP's order: a layer's weights are gathered in the forward and in the backward pass, and never all at once."""
    _, loss, batch = CASES["stacked"]
    on_mesh = make("4x1x1", loss, Deep, zero=3)
    rows = batch(np.random.default_rng(0))
    text = on_mesh.lower(rows).compile().as_text()
    assert "f32[3,12,32]" not in text
    assert "f32[3,12,32]" in make("4x1x1", loss, Deep, zero=3, scope="rows").lower(rows).compile().as_text()
    matrix = 12 * 32
    gathered = [one for one in on_mesh.collectives(rows) if one.kind == "all-gather" and one.array_elements == matrix]
    assert sum(one.count for one in gathered) == 2 * 2 * 3  # twice each of two matrices in three layers
