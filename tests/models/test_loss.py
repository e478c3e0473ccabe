"""The fused, chunked cross-entropy against the plain one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdist.mesh import make_mesh, parse_mesh
from jaxdist.models import loss
from jaxdist.sharding import Layout

pytestmark = pytest.mark.smoke


@pytest.fixture
def layout():
    mesh = make_mesh(parse_mesh("1x1x1"), jax.devices()[:1])
    with jax.set_mesh(mesh):
        yield Layout.on(mesh)


def plain(x, table, labels):
    logits = jnp.einsum("bsd,vd->bsv", x, table)
    nll = jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, jnp.maximum(labels, 0)[..., None], -1)[..., 0]
    return jnp.sum(jnp.where(labels >= 0, nll, 0))


@pytest.mark.parametrize("chunk_rows", [1, 4, 12, 1000])
def test_equals_the_plain_form(layout, monkeypatch, chunk_rows):
    monkeypatch.setattr(loss, "CHUNK_ROWS", chunk_rows)
    x = jax.random.normal(jax.random.key(0), (4, 6, 8))
    table = jax.random.normal(jax.random.key(1), (10, 8))
    labels = jax.random.randint(jax.random.key(2), (4, 6), -1, 10)
    wanted = jax.value_and_grad(lambda *a: 3 * plain(*a, labels), (0, 1))(x, table)
    ours = lambda x, table: loss.cross_entropy(layout, x.reshape(2, 2, 6, 8), table, labels.reshape(2, 2, 6))
    got = jax.value_and_grad(lambda *a: 3 * ours(*a), (0, 1))(x, table)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), got, wanted)
    np.testing.assert_allclose(ours(x, table), wanted[0] / 3, rtol=1e-6)


def test_large_logits_do_not_overflow(layout):
    x, table = 100 * jnp.ones((1, 1, 2, 4)), 100 * jnp.eye(6, 4)
    value, grads = jax.value_and_grad(loss.cross_entropy, (1, 2))(layout, x, table, jnp.array([[[5, 0]]]))
    assert np.isfinite(value)
    assert all(np.isfinite(g).all() for g in grads)
