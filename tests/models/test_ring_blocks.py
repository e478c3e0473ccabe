"""The kernel of a ring by matmuls in blocks of queries: documents, a window, odd lengths, and what it holds."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdist.models.attention import causal_attention
from jaxdist.models.ring_blocks import QueryBlocks, block_count
from jaxdist.models.scores import Scores
from jaxdist.parallel.context import Attended, Gradients, Keys, Queries, join
from tests.models import rings

BORDERS = [[0, 5, 8, 21, 32], [0, 1, 16, 32]]
"""Where documents begin in two rows of 32, over four ranks with chunks of 4: inside of chunks, and at borders."""


@pytest.mark.slow
@pytest.mark.parametrize(("documents", "window"), [(True, 6), (True, 0), (False, 6)])
def test_documents_and_a_window_hide_what_a_mask_hides(documents, window):
    heads = rings.random_heads(sequence=32)
    starts = None
    if documents:
        starts = np.stack([np.repeat(ends[:-1], np.diff(ends)) for ends in BORDERS]).astype(np.int32)
    scores = Scores.of(8, window)
    rings.assert_same(rings.by_ring(heads, 4, starts, scores), rings.by_hand(heads, starts, scores))


def visited(kernel: QueryBlocks, length: int, starts: list) -> tuple[Attended, Gradients]:
    """What two chunks, of so many tokens together, find among as many earlier keys, and the gradients of that.

    `starts` are those of the tokens of two rows. The earlier keys end at position 0.
    """
    q, k, v, g = rings.random_heads(length)
    at = jnp.arange(length)
    queries = Queries(q, at, jnp.asarray(starts))
    earlier = Keys(k[:, ::-1], v[:, ::-1], at - length)

    def both(queries: Queries, earlier: Keys) -> tuple[Attended, Gradients]:
        found = kernel.visit(queries, earlier)
        # Each query sees itself too.
        known = join(kernel.own(queries, Keys(k, v, at)), found)
        return found, kernel.visit_gradients(queries, earlier, known, g)

    return jax.jit(both)(queries, earlier)


@pytest.mark.parametrize("rows", [3, 64])
def test_queries_that_see_no_key_find_nothing_and_no_nan(rows):
    """All visiting keys are of another document for the first row, and for the last queries of the second."""
    found, gradients = visited(QueryBlocks(Scores.of(8), rows=rows), 16, [[0] * 16, [-16] * 8 + [8] * 8])
    for hidden in (found.sums[0], found.sums[1, 8:]):
        assert np.all(hidden == -np.inf)
    empty = (found.out[0], found.out[1, 8:], gradients.q[0], gradients.q[1, 8:], gradients.k[0], gradients.v[0])
    for a in empty:
        assert np.all(a == 0)
    for a in (found.sums[1, :8], found.out, *gradients):
        assert np.all(np.isfinite(a))
    assert np.all(np.any(gradients.q[1, :8] != 0, (1, 2)))


def test_a_part_of_twice_a_prime_is_cut_into_few_blocks_that_change_no_number():
    """The last block is filled up."""
    kernel = QueryBlocks(Scores.of(8), rows=7)
    assert block_count(26, kernel.rows) == 4
    starts = [[-3] * 26, [-26] * 10 + [10] * 16]
    got, wanted = (jax.tree.leaves(visited(one, 26, starts)) for one in (kernel, QueryBlocks(Scores.of(8), rows=26)))
    for a, b in zip(got, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_memory_grows_as_a_chunk_and_not_as_its_square():
    """Temporaries of a device with documents, of a part of 4k, 8k and 16k tokens."""
    sizes = [temporary(part) for part in (4096, 8192, 16384)]
    assert max(b / a for a, b in itertools.pairwise(sizes)) <= 2.1


def temporary(part: int) -> int:
    """Bytes that two layers on a ring of two devices need beside arguments and results, forwards and backwards."""
    mesh, layout = rings.layout_of(jax.devices()[:2])
    place = lambda letters: jax.NamedSharding(mesh, layout.activation(letters))
    heads = [jax.ShapeDtypeStruct((1, 2 * part, n, 8), jnp.float32, sharding=place("BSNH")) for n in (2, 1, 1, 2)]
    starts = jax.ShapeDtypeStruct((1, 2 * part), jnp.int32, sharding=place("BS"))

    def both(q, k, v, g, starts):
        layer = lambda q, _: (causal_attention(layout, Scores.of(8), q, k, v, starts), None)
        return rings.with_gradients(lambda q, k, v: jax.lax.scan(layer, q, length=2)[0], q, k, v, g)

    with jax.set_mesh(mesh):
        return jax.jit(both).lower(*heads, starts).compile().memory_analysis().temp_size_in_bytes
