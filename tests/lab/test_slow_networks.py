"""The parts of the claims about slow networks: texts, rules, what is sent of a tensor, servers and timelines."""

from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdist.lab.slow_networks import byte_model, compressed, picture, replicas, server, timeline, top_k
from jaxdist.programs.hlo import Collective


def test_private_rows_come_from_a_text_of_their_own():
    train, held_out = byte_model.text()
    share = len(train) // 4
    rows = byte_model.batches(2, 4, 3, private=True)
    assert rows.shape == (2, 4, 3, byte_model.CONTEXT + 1)
    for worker in range(4):
        own = train[worker * share : (worker + 1) * share].tobytes()
        assert all(row.astype(np.uint8).tobytes() in own for row in rows[:, worker].reshape(-1, rows.shape[-1]))
    assert len(held_out) > byte_model.HELD_OUT_ROWS


def test_a_weight_is_where_its_part_says():
    vector = byte_model.start()
    for name, weight in byte_model.weights(vector)._asdict().items():
        np.testing.assert_array_equal(vector[byte_model.part(name)], weight.ravel())


@pytest.mark.parametrize(("rule", "delay"), [("delayed averaging", 2), ("stale", 1)])
def test_late_gradients_equal_a_loop_over_workers(rule, delay):
    """The loop keeps the history of all gradients, and takes from it what the rule names."""
    batches = byte_model.batches(4, 2, 4, private=False)
    rate = 0.5
    gradient = jax.jit(jax.grad(byte_model.loss))
    weights = [jnp.asarray(byte_model.start())] * 2
    history = []
    for step, rows in enumerate(batches):
        history.append([gradient(weights[worker], rows[worker]) for worker in range(2)])
        old = history[step - delay] if step >= delay else [jnp.zeros_like(weights[0])] * 2
        mean = (old[0] + old[1]) / 2
        for worker in range(2):
            change = mean if rule == "stale" else history[-1][worker] + mean - old[worker]
            weights[worker] = weights[worker] - rate * change
    (trained,) = replicas.train(rule, [rate], batches, delay)
    np.testing.assert_allclose(trained.weights, np.stack(weights), atol=1e-6)
    # One gradient crosses in each step: as many bytes as a replica has parameters, in float32.
    assert trained.crossed == 4
    assert trained.bytes == 4 * 4 * byte_model.start().size


@pytest.mark.parametrize("bits", [16, 32])
def test_what_is_sent_arrives_at_its_place(bits):
    form = top_k.Form(top_k.FORMS[bits].place, 4)
    x = jnp.array([0.1, -3.0, 0.2, 1.0, 5.0, 4.0, -6.0, 0.0])
    sent = top_k.unpacked(top_k.packed(*top_k.largest(x, 0.5, form), form), x.size, form)
    np.testing.assert_array_equal(sent, [0, -3, 0, 1, 5, 0, -6, 0])


def test_the_rest_is_added_to_the_next_gradient():
    """Of four elements one is sent; replica 1 has other ones."""
    gradients = np.array([[[4, 3, 0, 0], [0, 0, 1, 2]], [[0, 3, 0, 1], [0, 0, 1, 1]]], np.float32)
    found = top_k.cross(gradients, density=0.25, bits=32)
    np.testing.assert_array_equal(found.arrived, [[2, 0, 0, 1], [0, 3, 1, 0]])
    np.testing.assert_array_equal(found.waiting, [[[0, 3, 0, 0], [0, 0, 1, 0]], [[0, 0, 0, 1], [0, 0, 0, 1]]])
    # A value of 4 bytes and a place of 4 bytes, for one of four elements.
    assert found.bytes_in == 2
    forgotten = top_k.cross(gradients, density=0.25, bits=32, feedback=False)
    np.testing.assert_array_equal(forgotten.arrived, [[2, 0, 0, 1], [0, 1.5, 0.5, 0]])


def test_exact_sums_array_by_array_are_those_of_one_vector():
    batches = byte_model.batches(3, 2, 4, private=False)
    found = compressed.train("exact", 0.5, batches)
    (wanted,) = replicas.train("on time", [0.5], batches)
    np.testing.assert_allclose(found.weights, wanted.weights, atol=1e-6)
    assert found.bytes == wanted.bytes


def test_what_two_replicas_send_for_an_element():
    """In INT8: 1 byte, and 4 for the scale of 256."""
    own = np.random.default_rng(0).normal(size=(2, 64, 128)).astype(np.float32)
    found = compressed.once(own, "int8")
    assert found.bytes == found.bytes_of("s8") == 1 + 4 / 256
    np.testing.assert_allclose(found.total + found.errors.sum(axis=0), own.sum(axis=0), atol=1e-5)
    # A step of the rounding is 1/127 of the largest of a block.
    assert 0 < np.abs(found.errors).max() < np.abs(own).max() / 127 * 2


def test_rows_have_to_divide_among_workers():
    with pytest.raises(ValueError, match="12 rows do not divide among 5 workers"):
        server.run(5)


def test_timelines():
    """Steps of 1 and 2, a crossing of 1."""
    durations = [Fraction(1), Fraction(2)]
    synchronous = timeline.simulate(durations, [1, 1], 3, Fraction(1))
    assert [bar.start for bar in synchronous.steps[0]] == [0, 3, 6]
    assert synchronous.time == 9
    assert synchronous.idle == Fraction(1, 2)
    # Two steps of the fast worker for one of the slow: nobody waits but for the network.
    local = timeline.simulate(durations, [2, 1], 3, Fraction(1))
    assert local.time == 9
    assert local.idle == Fraction(1, 3)
    # The network works while the next step is made; the last crossing has nothing to hide behind.
    late = timeline.simulate(durations, [1, 1], 3, Fraction(1), delay=1)
    assert [bar.start for bar in late.steps[1]] == [0, 2, 4]
    assert [bar.start for bar in late.crossings] == [2, 4, 6]
    assert late.time == 7


def test_a_slow_network_holds_late_steps_up():
    """It crosses one gradient after the other; a step waits for that of two steps before."""
    late = timeline.simulate([Fraction(1)], [1], 4, Fraction(3), delay=1)
    assert [bar.start for bar in late.crossings] == [1, 4, 7, 10]
    assert [bar.start for bar in late.steps[0]] == [0, 1, 4, 7]


def test_pictures(tmp_path):
    picture.timelines(tmp_path / "timelines.png")
    gradients = np.random.default_rng(0).normal(size=(6, 2, 6400)).astype(np.float32)
    picture.feedback(gradients, 0.01, tmp_path / "feedback.png")
    nothing = np.zeros((20, 2, 0))
    moves = [Collective("all-reduce", ("replica",), 2, (("f32", 100),), count=20)]
    one = replicas.Trained(np.stack([byte_model.start()] * 2), np.ones((20, 2)), nothing, moves)
    picture.bytes_and_loss({"exact": one, "int8": one}, tmp_path / "rules.png")
    for path in tmp_path.iterdir():
        assert path.read_bytes().startswith(b"\x89PNG")
