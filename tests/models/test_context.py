"""Attention where devices hold parts of rows, by itself: against a plain reading, in float64."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdist.mesh import make_mesh, parse_mesh
from jaxdist.mesh.context import zigzag
from jaxdist.models.ring_blocks import QueryBlocks
from jaxdist.models.scores import Scores
from jaxdist.parallel.context import Attended, Keys, Queries, Ring, join, ulysses
from jaxdist.sharding import Layout
from tests.models import rings

SEQUENCE = 32
DOCUMENTS = [[0, 4, 8, 20], [0, 1, 7, 9, 31]]
"""Where those of two rows start: at borders of chunks, and inside; over several, and of one token."""


def starts() -> np.ndarray:
    """For each position, where its document starts."""
    return np.stack([[max(s for s in row if s <= at) for at in range(SEQUENCE)] for row in DOCUMENTS])


def on_devices(ranks: int):
    """A mesh of so many devices along context, and the layout of one of them."""
    mesh = make_mesh(parse_mesh(f"context={ranks}"), jax.devices()[:ranks])
    return mesh, replace(Layout.on(mesh), manual=True)


def by_ring(ranks: int, heads: list, documents, scores: Scores, unroll: bool) -> list[np.ndarray]:
    """The output and the gradients of q, k and v, in the order of the row."""
    mesh, _ = on_devices(ranks)
    order = zigzag(np.arange(SEQUENCE), SEQUENCE, ranks)
    ring = Ring(ranks, QueryBlocks(scores, rows=2), unroll)

    def local(q, k, v, g, at, *documents):
        queries = Queries(q, at, *documents) if documents else Queries(q, at, None)
        keys = Keys(k, v, at)
        found = ring.attend(queries, keys)
        return found.out, *ring.gradients(queries, keys, found, g)

    with jax.set_mesh(mesh):
        of_rows = jax.P(None, "context")
        operands = [a[:, order] for a in heads] + [order] + [a[:, order] for a in documents]
        specs = (of_rows,) * 4 + (jax.P("context"),) + (of_rows,) * len(documents)
        placed = [jax.device_put(a, jax.NamedSharding(mesh, spec)) for a, spec in zip(operands, specs, strict=True)]
        found = jax.jit(jax.shard_map(local, in_specs=specs, out_specs=(of_rows,) * 4))(*placed)
    return [np.asarray(a)[:, np.argsort(order)] for a in found]


@pytest.mark.parametrize(
    ("ranks", "apart", "window", "unroll"),
    [
        (2, True, 0, True),
        pytest.param(4, True, 5, True, marks=pytest.mark.slow),
        pytest.param(4, False, 0, False, marks=pytest.mark.slow),
        pytest.param(8, False, 11, True, marks=pytest.mark.slow),
        pytest.param(8, True, 0, False, marks=pytest.mark.slow),
    ],
)
def test_a_ring_attends_as_one_device_does(ranks, apart, window, unroll):
    with jax.enable_x64(True):
        heads = rings.random_heads(SEQUENCE, dtype="float64")
        documents = [starts()] if apart else []
        scores = Scores.of(8, window)
        wanted = rings.by_hand(heads, *documents, scores=scores)
        rings.assert_same(by_ring(ranks, heads, documents, scores, unroll), wanted, tolerance=1e-12)


def attended(sums: list[float]) -> Attended:
    """What one query of one head finds with each of these sums; nothing where that is -inf."""
    sums = jnp.asarray(sums, jnp.float32)[None, :, None]
    seen = jnp.isfinite(sums)[..., None]
    return Attended(jnp.where(seen, jnp.arange(1.0, 1 + sums.size)[None, :, None, None], 0), sums)


def test_join_weighs_by_the_sums():
    both = join(attended([0.0, np.log(3.0)]), attended([np.log(3.0), 0.0]))
    np.testing.assert_allclose(both.sums.ravel(), np.log([4.0, 4.0]), rtol=1e-6)
    np.testing.assert_allclose(both.out.ravel(), [1.0, 2.0], rtol=1e-6)


def test_join_leaves_alone_what_has_seen_keys_where_the_other_has_seen_none():
    nothing = attended([-np.inf, -np.inf])
    some = attended([0.5, 90.0])
    for both in (join(some, nothing), join(nothing, some)):
        np.testing.assert_array_equal(both.out, some.out)
        np.testing.assert_array_equal(both.sums, some.sums)


def test_join_of_nothing_and_nothing_is_nothing():
    both = join(attended([-np.inf]), attended([-np.inf]))
    assert both.out.item() == 0
    assert both.sums.item() == -np.inf


@pytest.mark.parametrize("kv_heads", [6, *(pytest.param(heads, marks=pytest.mark.slow) for heads in (3, 12))])
def test_ulysses_repeats_key_value_heads_until_the_devices_divide_them(kv_heads):
    """Of 12 query heads over 4 devices; 6 and 3 key/value heads become 12."""
    mesh, _ = on_devices(4)

    def local(q, k, v, g, documents):
        attend = partial(ulysses, rings.plain, starts=documents, saved=lambda a: a)
        return rings.with_gradients(attend, q, k, v, g)

    with jax.enable_x64(True), jax.set_mesh(mesh), jax.numpy_rank_promotion("allow"):
        heads = rings.random_heads(SEQUENCE, 12, kv_heads, dtype="float64")
        of_rows = jax.P(None, "context")
        placed = [jax.device_put(a, jax.NamedSharding(mesh, of_rows)) for a in (*heads, starts())]
        got = jax.jit(jax.shard_map(local, in_specs=(of_rows,) * 5, out_specs=[of_rows] * 4))(*placed)
        wanted = rings.by_hand(heads, starts())
    rings.assert_same(got, wanted, tolerance=1e-12)
