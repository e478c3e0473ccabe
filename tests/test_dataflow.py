"""What is read off a jaxpr: which outputs are inputs, and what the others need."""

import jax
import jax.numpy as jnp
import pytest

from jaxdist.parallel.dataflow import Dataflow, returned


def call(w, count, x):
    return w, count + 1, count + x.shape[0], count + (x > 0).sum(dtype=jnp.int32), jnp.tanh(x @ w).sum()


TRANSFORMED = {
    "plain": call,
    "jit": jax.jit(call),
    "checkpoint": jax.checkpoint(call),
    "both": jax.jit(jax.checkpoint(call)),
}


def traced(f, rows: int) -> Dataflow:
    return Dataflow(f, jnp.ones((3, 3)), jnp.zeros((), jnp.int32), jnp.ones((rows, 3)))


@pytest.mark.parametrize("name", TRANSFORMED)
def test_inputs_that_an_output_is_or_needs(name):
    few, many = traced(TRANSFORMED[name], 4), traced(TRANSFORMED[name], 8)
    assert [few.keeps(i, 0) for i in range(5)] == [True, False, False, False, False]
    assert not any(few.keeps(i, given) for i in range(5) for given in (1, 2))
    assert [sorted(few.program(i).inputs) for i in range(5)] == [[0], [1], [1], [1, 2], [0, 2]]
    assert [few.program(i).equals(many.program(i)) for i in range(5)] == [True, True, False, False, False]


def test_constants_tell_programs_apart():
    def of(constant):
        return Dataflow(lambda x: x + jnp.asarray(constant), jnp.ones(3)).program(0)

    assert of(jnp.arange(3.0)).equals(of(jnp.arange(3.0)))
    assert not of(jnp.arange(3.0)).equals(of(jnp.arange(1.0, 4.0)))


def layers(x, ws, counts, shift, state):
    """Stacked weights and counts go through; the carry is (stream, a number that stays)."""

    def layer(carry, arrays):
        x, state = carry
        w, count = arrays
        return (jnp.tanh(x @ w) + shift, state), (w, count + 1, shift)

    (x, state), (ws, counts, shifts) = jax.lax.scan(jax.checkpoint(layer), (x, state), (ws, counts))
    return x, state, ws, counts, shifts


def test_loops_hand_on_stacked_inputs_and_carries():
    flow = Dataflow(
        layers, jnp.ones((4, 3)), jnp.ones((2, 3, 3)), jnp.zeros(2, jnp.int32), jnp.ones((4, 3)), jnp.zeros((4, 3))
    )
    kept = {(i, given) for i in range(5) for given in range(5) if flow.keeps(i, given)}
    assert kept == {(1, 4), (2, 1)}
    assert flow.program(3).inputs == {2}


def test_a_carry_that_changes_places_is_another():
    def swapped(a, b):
        return jax.lax.fori_loop(0, 3, lambda _, carry: (carry[1], carry[0]), (a, b))

    flow = Dataflow(swapped, jnp.zeros(2), jnp.ones(2))
    assert not any(flow.keeps(i, given) for i in range(2) for given in range(2))


def test_traced_values_that_a_function_closes_over():
    found = []

    @jax.jit
    def outer(a, b, c):
        def f():
            kept, changed = jax.checkpoint(lambda a, b: (a, b + 1))(a, b)
            return [kept, changed, a]

        found.extend(returned(f, [a, b, c]))
        return a

    outer(1.0, 2.0, 3.0)
    assert found == [True, False, False]
