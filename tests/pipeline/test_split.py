"""B and W of a function's backward pass: together they are all of it, and each runs its own part only."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdist import models
from jaxdist.config import ModelConfig
from jaxdist.mesh import make_mesh, parse_mesh
from jaxdist.parallel.pipeline.schedules import make
from jaxdist.parallel.pipeline.split import halves
from jaxdist.parallel.pipeline.table import make_table
from jaxdist.training.forward.remat import recompute
from tests.pipeline.toy import Piped, count, loops

D, F, B = 4, 12, 6
PRODUCTS, MOVES = ("dot_general",), ("psum", "psum_invariant", "all_gather", "reduce_scatter", "all_gather_invariant")


def mlp(w, x, activation=jnp.tanh):
    y = jnp.einsum("bd,df->bf", x * w["scale"][None], w["up"])
    return x + jnp.einsum("bf,fd->bd", activation(y + w["bias"][None]), w["down"])


def arrays():
    rng = np.random.default_rng(0)
    shapes = dict(scale=(D,), up=(D, F), bias=(F,), down=(F, D))
    new = lambda shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    return {name: new(shape) for name, shape in shapes.items()}, new((B, D)), new((B, D))


def cut(f, w, x, dy, *more):
    """Halves of the VJP of `f(w, x, *more)`: that of x is needed at once, weights and `more` are there again."""
    leaves, structure = jax.tree.flatten(w)

    def backward(*flat):
        w = structure.unflatten(flat[: len(leaves)])
        more, (x, dy) = flat[len(leaves) : -2], flat[-2:]
        dw, dx = jax.vjp(lambda w, x: f(w, x, *more), w, x)[1](dy)
        return [dx, *jax.tree.leaves(dw)]

    return halves(backward, [*leaves, *more], [x, dy], now=1), [*leaves, *more], [x, dy], backward


def shapes(made) -> list[tuple[int, ...]]:
    return sorted(a.shape for a in made)


@pytest.mark.parametrize(
    "wrap",
    [lambda f: f, jax.jit, jax.checkpoint, lambda f: jax.jit(jax.checkpoint(jax.jit(f)))],
    ids=["as it is", "jit", "checkpoint", "all"],
)
def test_both_halves_are_the_whole(wrap):
    parts, again, once, whole = cut(wrap(mlp), *arrays())
    (dx,), stash = parts.at_once(again, once)
    for got, wanted in zip([dx, *parts.later(again, stash)], whole(*again, *once), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)
    assert count(parts.first.jaxpr, *PRODUCTS) == 1 + 2  # the activation's input again, and two of dx
    assert count(parts.second.jaxpr, *PRODUCTS) == 2
    assert count(parts.first.jaxpr, "jit", "pjit", "checkpoint", "remat2") == 0


@pytest.mark.parametrize(("activation", "again_"), [(jnp.tanh, 0), (lambda y: jnp.tanh(y) * jnp.sin(y), 1)])
def test_the_stash_is_the_smallest(activation, again_):
    """One array for an activation: its output, or its input where B has no use for the output; and no weight.

    The gradient of the scale, sum(x * dx), is made with B: it is smaller than its second factor.
    """
    parts, again, once, _ = cut(lambda w, x: mlp(w, x, activation), *arrays())
    stash = parts.at_once(again, once)[1]
    assert shapes(stash) == sorted([(D,), (B, D), (B, D), (B, F), (B, F)])  # and x * scale, dy, gradient before `up`
    assert count(parts.second.jaxpr, "tanh") == again_


def test_what_only_the_weights_need_is_handed_on():
    """x is kept for W alone; what is there again, like `mask`, is not stashed, nor what follows from it."""
    w, x, dy = arrays()
    linear = lambda w, x, mask: jnp.where(jnp.sin(mask) > 0, x @ w["up"] @ w["down"], 0)
    parts, again, once, _ = cut(linear, w, x, dy, jnp.ones((B, D)))
    stash = parts.at_once(again, once)[1]
    assert shapes(stash) == sorted([(B, D), (B, D), (B, F)])  # x, dy, that of the first product
    assert any(a is x or (a == x).all() for a in stash if a.shape == x.shape)
    assert count(parts.first.jaxpr, *PRODUCTS) == 2
    assert count(parts.second.jaxpr, *PRODUCTS) == 3  # x @ up again, which dx does not need


def test_what_is_not_known_to_be_cheap_runs_once():
    slow = lambda w, x: jnp.cumsum(jnp.tanh(x) @ w["up"], axis=1) @ w["down"] + jax.lax.sort(x)
    parts, *_ = cut(slow, *arrays())
    for name, runs in (("cumsum", 2), ("sort", 1), ("dot_general", 5), ("scatter-add", 1)):
        assert count(parts.first.jaxpr, name) + count(parts.second.jaxpr, name) == runs, name


def test_a_traced_value_must_be_an_argument():
    with pytest.raises(AssertionError, match="closes over a traced value"):
        jax.jit(lambda a: halves(lambda x, y: [x * a, y], [a], [a], 1).now)(jnp.ones(3))


@pytest.mark.parametrize("family", ["gpt", "llama"])
@pytest.mark.parametrize("remat", ["named", "dots", "block"])
def test_the_products_of_the_models(family, remat):
    """W of a layer has one product for each of four matrices, B has all others, and the stash holds no weight."""
    model = models.build(ModelConfig(family=family, vocab=32, embed=32, heads=4, layers=1, sequence=16))
    struct = lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype)
    w = jax.tree.map(struct, model.abstract["blocks"])
    x = jax.ShapeDtypeStruct((3, 16, 32), jnp.float32)
    layer = recompute(remat)(lambda w, x: model.block(w, x)[0])
    found = []
    with jax.set_mesh(make_mesh(parse_mesh("1x1x1"), jax.devices()[:1])):
        jax.eval_shape(lambda w, x, dy: found.append(cut(layer, w, x, dy)[0]), w, x, x)
    assert count(found[0].second.jaxpr, *PRODUCTS) == 4
    stash = found[0].second.jaxpr.invars[len(found[0].constants) + len(jax.tree.leaves(w)) :]
    assert max(v.aval.ndim for v in stash) > 2
    assert not {v.aval.shape for v in stash} & {a.shape for a in jax.tree.leaves(w) if len(a.shape) > 1}


@pytest.mark.parametrize("zero", [0, 2, 3])
def test_collectives_and_products_of_a_tick(zero):
    """Those of a tick with B and W are those of a whole backward pass: none twice. B has half of the products.

    W moves the layer's input, split along the sequence, which B does not need, and from ZeRO 2 on the gradients; at
    stage 3 it gathers no weights.
    """
    whole, parts = (bodies(Piped("2x2x2", schedule, zero=zero, sequence=True)) for schedule in ("1f1b", "zb-u"))
    for names in (PRODUCTS, *((name,) for name in MOVES)):
        assert count(whole["BFH"], *names) == count(parts["BFHW"], *names), names
    of_w = lambda name: count(parts["BFHW"], name) - count(parts["BFH"], name)
    assert of_w("dot_general") == 2
    assert count(whole["B"], "dot_general") == 4
    assert count(parts["BW"], "dot_general") == 4
    assert of_w("all_gather") == 1
    assert of_w("reduce_scatter") == (4 if zero >= 2 else 0)  # the bias, which the model axis splits, stays whole


def bodies(piped):
    """Slots -> the body of the loop over ticks that have them."""
    schedule = make(piped.forward.schedule, piped.stages.ranks, piped.micro, piped.stages.virtual)
    segments = make_table(schedule).segments
    return {
        "".join(sorted(slots)): body for (*_, slots), (_, body) in zip(segments, loops(piped.program()), strict=True)
    }


@pytest.mark.parametrize(("wide", "narrow"), [(jnp.float32, jnp.bfloat16), (jnp.bfloat16, jnp.float32)])
def test_the_stash_is_the_smallest_in_bytes_and_not_in_elements(wide, narrow):
    """B makes `a`, and W needs it converted: whichever of the two has fewer bytes is handed on."""

    def f(w, x):
        a = jax.lax.sort(x)
        return [a, jnp.einsum("bd,bf->df", a.astype(narrow), w)]

    parts = halves(f, [jnp.ones((B, F), narrow)], [jnp.ones((B, D), wide)], now=1)
    stash = parts.second.jaxpr.invars[len(parts.constants) + 1 :]
    assert [(v.aval.shape, v.aval.dtype) for v in stash] == [((B, D), jnp.bfloat16)]
