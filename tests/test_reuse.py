"""Which weights a loop uses again, read off a jaxpr."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from jaxdist.parallel.reuse import reused


def recurrent(w, x):
    return jax.lax.scan(lambda h, row: (jnp.tanh(h @ w["cell"] + row @ w["in"]), None), jnp.zeros(3), x @ w["once"])[0]


def layers(w, x):
    """The stack is taken one by one, the table is used outside, and the loop reads activations and a mask."""
    scale = x @ w["table"]
    mask = jnp.arange(4) < 2
    layer = lambda x, own: (jnp.where(mask[:, None], x @ own, x * scale), None)
    return jax.lax.scan(jax.checkpoint(layer), x @ w["table"], w["stack"])[0]


def within_layers(w, x):
    layer = lambda x, own: (jax.lax.fori_loop(0, 2, lambda _, x: x @ own, x), None)
    return jax.lax.scan(layer, x, w["stack"])[0]


def in_a_branch(w, x):
    loop = jax.jit(lambda x, w: jax.lax.while_loop(lambda x: x.sum() < 1, lambda x: x @ (2 * w), x))
    return jax.lax.cond(x.sum() > 0, loop, lambda x, w: x @ w, x @ w["once"], w["cell"])


SIZES = {"cell": (3, 3), "in": (3, 3), "once": (3, 3), "table": (3, 3), "stack": (2, 3, 3)}


@pytest.mark.parametrize(
    ("f", "names", "again"),
    [
        (recurrent, ("cell", "in", "once"), {"cell", "in"}),
        (layers, ("table", "stack"), set()),
        (within_layers, ("stack",), {"stack"}),
        (in_a_branch, ("cell", "once"), {"cell"}),
    ],
)
def test_what_a_loop_reads_in_each_turn_is_used_again(f, names, again):
    found = reused(f, {name: jnp.ones(SIZES[name]) for name in names}, jnp.ones((4, 3)))
    assert {name for name, is_used in found.items() if is_used} == again


def test_a_cell_of_flax_is_used_again_and_the_head_is_not():
    class Reader(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.body = nnx.RNN(nnx.OptimizedLSTMCell(3, 3, rngs=rngs), rngs=rngs)
            self.head = nnx.Linear(3, 3, rngs=rngs)

    graph, params, rest = nnx.split(Reader(nnx.Rngs(0)), nnx.Param, ...)

    def call(w, x):
        made = nnx.merge(graph, w, rest, copy=True)
        return made.head(made.body(x))

    found = reused(call, nnx.to_pure_dict(params), jnp.ones((2, 4, 3)))
    assert all(jax.tree.leaves(found["body"]))
    assert not any(jax.tree.leaves(found["head"]))
