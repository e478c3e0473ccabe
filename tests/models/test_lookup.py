"""Rows of a table: an id that is not one is told by its numbers, and moves no other row."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdist.mesh import make_mesh, parse_mesh
from jaxdist.parallel.tensor import lookup
from jaxdist.sharding import RULES, Layout

VOCAB, EMBED = 8, 4


@pytest.mark.parametrize(("mesh", "added"), [("1x1x1", 0), ("1x4x1", 0), ("2x2x1", 0), ("1x4x1", 4)])
def test_rows_of_ids_that_are_none_are_nan(mesh, added):
    """The rows that a mesh adds to a table belong to no id."""
    shape = parse_mesh(mesh)
    mesh = make_mesh(shape, jax.devices()[: int(np.prod(list(shape.values())))])
    layout = Layout.on(mesh, RULES)
    table = np.arange((VOCAB + added) * EMBED, dtype=np.float32).reshape(-1, EMBED)
    ids = np.array([[0, 3, VOCAB - 1], [VOCAB, 5, -1]], np.int32)
    there = (ids >= 0) & (ids < VOCAB)
    with jax.set_mesh(mesh):
        place = lambda a, dims: jax.device_put(a, jax.NamedSharding(mesh, layout.spec(dims)))
        arrays = place(table, ["vocab", "embed"]), place(ids, ["batch", "sequence"])
        rows = np.asarray(jax.jit(lambda table, ids: lookup(layout, table, ids, size=VOCAB))(*arrays))
        summed = lambda table, ids: jnp.sum(jnp.where(there[..., None], lookup(layout, table, ids, size=VOCAB), 0))
        gradient = np.asarray(jax.jit(jax.grad(summed))(*arrays))
    np.testing.assert_array_equal(rows[there], table[ids[there]])
    assert np.isnan(rows[~there]).all()
    np.testing.assert_array_equal(gradient, np.isin(np.arange(VOCAB + added), ids[there])[:, None] * np.ones(EMBED))
