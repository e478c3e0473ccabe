"""The ring, drawn step by step: what its devices compute is the past of every token, once."""

import numpy as np
import pytest

from jaxdist.lab import ring

pytestmark = pytest.mark.slow  # a program is compiled


@pytest.fixture(scope="module")
def done() -> ring.Run:
    return ring.run(3)


def test_every_pair_is_computed_once(done):
    tokens = ring.length(done.ranks)
    times = np.zeros((tokens, tokens), int)
    for block in done.blocks:
        later = block.own & (block.keys[None] > block.queries[:, None])
        times[np.ix_(block.queries, block.keys)] += ~later
    np.testing.assert_array_equal(times, np.tri(tokens))


def test_a_visitor_is_met_in_two_half_blocks(done):
    for device in range(done.ranks):
        for step in range(1, done.ranks):
            met = done.at(device, step)
            assert [(len(one.queries), len(one.keys)) for one in met] == [(ring.CHUNK, ring.CHUNK)] * 2


def test_the_ring_computes_what_the_order_needs(done):
    steps = [(device, step) for device in range(done.ranks) for step in range(done.ranks)]
    counted = [ring.work(done, *one) for one in steps]
    assert counted == [ring.needed(done.ranks, ring.zigzag, *one) for one in steps]


def test_contiguous_order_takes_nearly_twice_the_time():
    assert [ring.time(n, ring.contiguous) / ring.time(n, ring.zigzag) for n in (2, 4, 16)] == [1.5, 1.75, 1.9375]


def test_the_picture_is_drawn(done, tmp_path):
    ring.picture(tmp_path / "ring.png", done)
    assert (tmp_path / "ring.png").read_bytes().startswith(b"\x89PNG")
