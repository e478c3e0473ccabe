"""Key/value heads dealt to more devices than there are heads, weight by weight."""

import jax
import numpy as np
import pytest

from jaxdist.parallel import heads, placing
from jaxdist.parallel.heads import HeadDeal
from jaxdist.sharding import Layout

K, G, H = 2, 4, 3


@pytest.mark.parametrize("n", [1, 2, 4])
def test_a_device_has_its_queries_in_order_and_the_key_and_value_that_serve_them(n):
    w = np.arange(5 * K * (G + 2) * H, dtype=np.float32).reshape(5, K, G + 2, H)
    queries, keys, values = w[:, :, :G].reshape(5, K * G, H), w[:, :, G], w[:, :, G + 1]
    of = HeadDeal(1, n)
    got = heads.deal(w, of)
    assert got.shape == heads.dealt(w.shape, of) == (5, n * K, G // n + 2, H)
    for device in range(n * K):
        q, k, v = np.split(np.asarray(got[:, device]), (-2, -1), axis=1)
        own = np.arange(G // n) + device * G // n
        np.testing.assert_array_equal(q, queries[:, own])
        np.testing.assert_array_equal(k[:, 0], keys[:, own[0] // G])
        np.testing.assert_array_equal(v[:, 0], values[:, own[-1] // G])


@pytest.mark.parametrize("n", [2, 4])
def test_collect_is_the_transpose_of_deal(n):
    of = HeadDeal(1, n)
    w, g = np.zeros((7, K, G + 2, H), np.float32), np.random.default_rng(0).normal(size=(7, n * K, G // n + 2, H))
    transposed = jax.linear_transpose(lambda w: heads.deal(w, of), w)
    wanted = transposed(g.astype(np.float32))[0]
    np.testing.assert_allclose(heads.collect(g.astype(np.float32), of), wanted, rtol=1e-6)


def test_a_scale_without_values_is_dealt_likewise():
    """[K, G + 1, H]: the key alone is on several devices."""
    scale = np.arange(K * (G + 1) * H, dtype=np.float32).reshape(K, G + 1, H)
    of = HeadDeal(0, 2, repeated=1)
    got = np.asarray(heads.deal(scale, of))
    assert got.shape == heads.dealt(scale.shape, of) == (2 * K, G // 2 + 1, H)
    for device in range(2 * K):
        first = device % 2 * G // 2
        np.testing.assert_array_equal(got[device, :-1], scale[device // 2, first : first + G // 2])
        np.testing.assert_array_equal(got[device, -1], scale[device // 2, G])
    twice = np.asarray(heads.collect(got, of))
    np.testing.assert_array_equal(twice[:, :G], scale[:, :G])
    np.testing.assert_array_equal(twice[:, G], 2 * scale[:, G])


@pytest.mark.parametrize(("queries", "repeated"), [(G, 0), (0, 1)], ids=["queries alone", "a key alone"])
def test_what_lies_alone_is_dealt_as_it_is_beside_the_others(queries, repeated):
    """B of an adapter: [r, K, G, H] of queries, or [r, K, 1, H] of a key or a value; `collect` transposes it."""
    n = 2
    whole = np.random.default_rng(0).normal(size=(3, K, G + 1, H)).astype(np.float32)
    both = np.asarray(heads.deal(whole, HeadDeal(1, n, repeated=1)))
    alone = whole[:, :, :G] if queries else whole[:, :, G:]
    of = HeadDeal(1, n, repeated)
    got = heads.deal(alone, of)
    assert got.shape == heads.dealt(alone.shape, of)
    np.testing.assert_array_equal(got, both[:, :, : G // n] if queries else both[:, :, G // n :])
    g = np.random.default_rng(1).normal(size=got.shape).astype(np.float32)
    (wanted,) = jax.linear_transpose(lambda w: heads.deal(w, of), alone)(g)
    np.testing.assert_allclose(heads.collect(g, of), wanted, rtol=1e-6)


def test_the_halves_of_adapters_say_how_many_heads_they_share():
    layout = Layout((("model", 4),), rules=(("heads", ("model",)),))
    queries = heads.deal_of(layout, ("rank", "kv_heads_of_queries", None, None), (3, K, G, H))
    alone = heads.deal_of(layout, ("layers", "rank", "kv_heads_alone", None, None), (5, 3, K, 1, H))
    assert queries == HeadDeal(1, 2, 0)
    assert alone == HeadDeal(2, 2, 1)


@pytest.mark.parametrize(
    ("data", "model", "shape", "rest"),
    [
        (4, 4, (64, 2, 6, 8), ("data", None, None, "model")),
        (4, 2, (64, 2, 6, 8), ("data", "model", None, None)),  # enough heads: nothing is dealt
        (4, 4, (64, 2, 6, 6), ("data", None, None, None)),  # the size of a head does not divide
        (6, 4, (64, 2, 6, 8), (None, None, None, "model")),  # data does not divide the first, and no other is free
    ],
)
def test_what_splits_a_weight_at_rest(data, model, shape, rest):
    layout = Layout((("data", data), ("model", model)), rules=(("batch", ("data",)), ("heads", ("model",))))
    axes, abstract = ("embed", "kv_heads", None, None), jax.ShapeDtypeStruct(shape, np.float32)
    found = placing.placements(layout, {"qkv": axes}, {"qkv": abstract}, placing.ZeroOptions(1))["qkv"]
    assert tuple(found.rest.partitions) == rest
    assert tuple(found.use.partitions) == (None, "model", None, None)
    assert found.in_use(shape) == ((64, 4, 4, shape[3]) if model == 4 else shape)
    assert found.exchanged == (found.deal is not None and rest[3] == "model")
