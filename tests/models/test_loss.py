"""The fused, chunked cross-entropy against the plain one."""

import dataclasses
import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from jaxdist.mesh import make_mesh, parse_mesh
from jaxdist.models import loss
from jaxdist.sharding import Layout
from tests.tiers import thinned

pytestmark = pytest.mark.smoke


@pytest.fixture
def layout():
    mesh = make_mesh(parse_mesh("1x1x1"), jax.devices()[:1])
    with jax.set_mesh(mesh):
        yield Layout.on(mesh)


def plain(x, table, labels, cap=0.0):
    logits = jnp.einsum("bsd,vd->bsv", x, table)
    if cap:
        logits = cap * jnp.tanh(logits / cap)
    nll = jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, jnp.maximum(labels, 0)[..., None], -1)[..., 0]
    return jnp.sum(jnp.where(labels >= 0, nll, 0))


@pytest.mark.parametrize(("chunk_rows", "platform"), thinned(itertools.product([4, 1, 12, 1000], ["cpu", "gpu"]), 5))
def test_equals_the_plain_form(layout, monkeypatch, chunk_rows, platform):
    """With a soft cap of the logits in half of the rows."""
    cap = 3.0 if platform == "cpu" else 0.0
    monkeypatch.setitem(loss.CHUNK_ROWS, platform, chunk_rows)
    layout = dataclasses.replace(layout, platform=platform)
    x = jax.random.normal(jax.random.key(0), (4, 6, 8))
    table = jax.random.normal(jax.random.key(1), (10, 8))
    labels = jax.random.randint(jax.random.key(2), (4, 6), -1, 10)
    wanted = jax.value_and_grad(lambda *a: 3 * plain(*a, labels, cap), (0, 1))(x, table)
    ours = lambda x, table: loss.cross_entropy(layout, x.reshape(2, 2, 6, 8), table, labels.reshape(2, 2, 6), cap=cap)
    got = jax.value_and_grad(lambda *a: 3 * ours(*a), (0, 1))(x, table)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), got, wanted)
    np.testing.assert_allclose(ours(x, table), wanted[0] / 3, rtol=1e-6)


def test_on_a_gpu_logits_are_rounded_and_sums_are_not(layout):
    """As if there were one. Of 512 tokens that are hard to tell apart, bfloat16 sums would lose the small change."""
    gpu = dataclasses.replace(layout, platform="gpu")
    x = jax.random.normal(jax.random.key(0), (1, 2, 256, 32), jnp.bfloat16)
    table = jax.random.normal(jax.random.key(1), (400, 32), jnp.bfloat16) / 4
    labels = jax.random.randint(jax.random.key(2), (1, 2, 256), 0, 400)
    exact = [a.astype(jnp.float32) for a in (x[0], table)]
    wanted = jax.value_and_grad(lambda *a: plain(*a, labels[0]), (0, 1))(*exact)
    value, (dx, d_table) = jax.value_and_grad(loss.cross_entropy, (1, 2))(gpu, x, table, labels)
    assert abs(value - wanted[0]) < 1e-4 * wanted[0]
    for got, right in ((dx[0], wanted[1][0]), (d_table, wanted[1][1])):
        assert jnp.linalg.norm(got.astype(jnp.float32) - right) < 0.01 * jnp.linalg.norm(right)
    arrays = str(jax.make_jaxpr(partial(loss.cross_entropy, gpu))(x, table, labels))
    assert "bf16[2,256,400] = dot_general" in arrays


def test_on_a_gpu_logits_are_read_once_for_the_loss_and_once_for_the_gradient(layout):
    """A pass over them is a reduction to rows, or what makes the operand of the two matmuls of the gradient."""
    gpu = dataclasses.replace(layout, platform="gpu")
    x = jnp.ones((1, 2, 6, 8), jnp.bfloat16)
    table = jnp.ones((10, 8), jnp.bfloat16)
    labels = jnp.zeros((1, 2, 6), jnp.int32)
    step = jax.make_jaxpr(jax.value_and_grad(partial(loss.cross_entropy, gpu), (0, 1)))(x, table, labels)
    whole = [one for one in equations(step.jaxpr) if one.invars and one.invars[0].aval.shape == (2, 6, 10)]
    assert [one.primitive.name for one in whole if one.outvars[0].aval.shape == (2, 6)] == ["reduce"]
    assert sum(one.primitive.name == "dot_general" for one in whole) == 2


def equations(jaxpr):
    """All operations of a jaxpr, also those in loops and regions."""
    for one in jaxpr.eqns:
        yield one
        for inner in jaxprs_in_params(one.params):
            yield from equations(inner)


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_added_rows_have_no_part_in_the_loss_and_no_gradient(platform):
    """Even where they are large. Ten tokens on eight devices: three of them hold added rows alone."""
    cap = 3.0 if platform == "gpu" else 0.0
    mesh = make_mesh(parse_mesh("1x8x1"), jax.devices())
    layout = dataclasses.replace(Layout.on(mesh), platform=platform)
    x = jax.random.normal(jax.random.key(0), (1, 4, 6, 8))
    table = jax.random.normal(jax.random.key(1), (10, 8))
    labels = jax.random.randint(jax.random.key(2), (1, 4, 6), -1, 10)
    wanted = jax.value_and_grad(lambda *a: plain(*a, labels[0], cap), (0, 1))(x[0], table)
    padded = jnp.concatenate([table, jnp.full((6, 8), 50.0)])
    with jax.set_mesh(mesh):
        arrays = jax.device_put((x, padded), (layout.spec((None,) * 4), layout.spec(("vocab", None))))
        ours = jax.value_and_grad(lambda x, table: loss.cross_entropy(layout, x, table, labels, 10, cap), (0, 1))
        value, (dx, d_table) = jax.device_get(jax.jit(ours)(*arrays))
    np.testing.assert_allclose(value, wanted[0], rtol=1e-6)
    np.testing.assert_allclose(dx[0], wanted[1][0], atol=1e-5)
    np.testing.assert_allclose(d_table[:10], wanted[1][1], atol=1e-5)
    assert not d_table[10:].any()


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_large_logits_do_not_overflow(layout, platform):
    layout = dataclasses.replace(layout, platform=platform)
    x, table = 100 * jnp.ones((1, 1, 2, 4)), 100 * jnp.eye(6, 4)
    value, grads = jax.value_and_grad(loss.cross_entropy, (1, 2))(layout, x, table, jnp.array([[[5, 0]]]))
    assert np.isfinite(value)
    assert all(np.isfinite(g).all() for g in grads)
