"""Ring attention over the devices of a mesh, and the plain form of the same. Other processes lower some of it."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jaxdist.mesh import make_mesh, parse_mesh
from jaxdist.mesh.context import zigzag
from jaxdist.models.attention import causal_attention
from jaxdist.models.scores import Scores
from jaxdist.sharding import Layout, spread

SCORES = Scores.of(8)


def layout_of(devices, form: str = "ring", platform: str | None = None) -> tuple[jax.sharding.Mesh, Layout]:
    """A mesh of `devices` along context, and its layout; `platform` gpu is that of an H100."""
    mesh = make_mesh(parse_mesh(f"context={len(devices)}"), devices)
    layout = replace(Layout.on(mesh), zigzag=form == "ring")
    return mesh, replace(layout, platform="gpu", capability=(9, 0)) if platform == "gpu" else layout


def on_gpus(devices, form="ring", sequence=4096):
    """Attention forward and backward, as a model has it over all devices."""
    mesh, layout = layout_of(devices, form)
    place = jax.NamedSharding(mesh, layout.activation("BSNH"))
    q, kv = (jax.ShapeDtypeStruct((2, sequence, heads, 64), jnp.bfloat16, sharding=place) for heads in (8, 4))
    loss = lambda q, k, v: causal_attention(layout, Scores.of(64), q, k, v).astype(jnp.float32).sum()
    with jax.set_mesh(mesh):
        return jax.jit(jax.grad(loss, (0, 1, 2))).lower(q, kv, kv)


def plain(q, k, v, starts=None, scores=SCORES, sinks=None):
    """Attention with a mask, in the precision of q. A sink is the score of one more key, whose value is zero."""
    k, v = (jnp.repeat(a, q.shape[2] // k.shape[2], 2) for a in (k, v))
    products = jnp.einsum("bsnh,btnh->bnst", q, k) * scores.scale
    if scores.cap:
        products = scores.cap * jnp.tanh(products / scores.cap)
    at = np.arange(q.shape[1])
    seen = at <= at[:, None]
    if scores.window:
        seen &= at > at[:, None] - scores.window
    if starts is not None:
        seen = seen & (at >= jnp.asarray(starts)[:, None, :, None])
    products = jnp.where(seen, products, -jnp.inf)
    if sinks is not None:
        of_sinks = jnp.broadcast_to(sinks[:, None, None], (*products.shape[:3], 1))
        products = jnp.concatenate([products, of_sinks], -1)
        v = jnp.pad(v, [(0, 0), (0, 1), (0, 0), (0, 0)])
    return jnp.einsum("bnst,btnh->bsnh", jax.nn.softmax(products), v)


def attend(layout: Layout, scores: Scores, q, k, v, sinks=None, starts=None) -> jax.Array:
    """Attention of ours; there is one sink for each head."""
    shares = None if sinks is None else spread(sinks, q[..., 0])
    return causal_attention(layout, scores, q, k, v, starts, shares)


def random_heads(
    sequence: int, heads: int = 4, kv_heads: int = 2, rows: int = 2, dtype="float32", value_size: int = 8
) -> list[jax.Array]:
    """q, k, v and a gradient of the output; queries and keys are of size 8."""
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = [(heads, 8), (kv_heads, 8), (kv_heads, value_size), (heads, value_size)]
    return [jax.random.normal(key, (rows, sequence, *shape), dtype) for key, shape in zip(keys, shapes, strict=True)]


def with_gradients(f, *given: jax.Array) -> list[jax.Array]:
    """The output, and the gradients of q, k, v, and of sinks where these are given; the last one given is its own."""
    *operands, g = given
    out, pull = jax.vjp(f, *operands)
    return [out, *pull(g)]


def by_ring(heads: list[jax.Array], ranks: int, starts=None, scores=SCORES, form: str = "ring") -> list[np.ndarray]:
    """The same by a ring over so many devices, or by Ulysses, in the order of the row."""
    mesh, layout = layout_of(jax.devices()[:ranks], form)
    sequence = heads[0].shape[1]
    order = zigzag(np.arange(sequence), sequence, ranks) if form == "ring" else np.arange(sequence)
    with jax.set_mesh(mesh):
        own = layout.activation("BSNH")
        # Sinks are the same everywhere.
        placed = [jax.device_put(a[:, order], own) if a.ndim == 4 else a for a in heads]
        if starts is not None:
            starts = jax.device_put(jnp.asarray(starts)[:, order], layout.activation("BS"))
        ours = partial(attend, layout, scores, starts=starts)
        found = jax.jit(partial(with_gradients, ours))(*placed)
    back = np.argsort(order)
    return [np.asarray(a)[:, back] if a.ndim == 4 else np.asarray(a) for a in found]


def by_hand(heads: list[jax.Array], starts=None, scores=SCORES) -> list[np.ndarray]:
    """The same by the plain form."""

    def theirs(q, k, v, sinks=None):
        return plain(q, k, v, starts, scores, sinks)

    with jax.numpy_rank_promotion("allow"):
        return [np.asarray(a) for a in jax.jit(partial(with_gradients, theirs))(*heads)]


def assert_same(got: list[np.ndarray], wanted: list[np.ndarray], tolerance: float = 1e-5) -> None:
    """By the largest value of each."""
    assert len(got) == len(wanted)
    for name, a, b in zip(("out", "dq", "dk", "dv", "dsinks"), got, wanted, strict=False):
        np.testing.assert_allclose(a, b, atol=tolerance * np.abs(b).max(), rtol=0, err_msg=name)


def scores_of(scale, q, k, causal):
    k = jnp.repeat(k, q.shape[2] // k.shape[2], 2)
    scores = jnp.einsum("bsnh,btnh->bnst", q, k) * scale
    return jnp.where(jnp.tri(q.shape[1], k.shape[1], dtype=bool), scores, -jnp.inf) if causal else scores


def cudnn_forward(scale, q, k, v, causal):
    """What `ring_blocks_cudnn._forward` computes, in f32, and in the dtype of q."""
    dtype = q.dtype
    q, k, v = (a.astype(jnp.float32) for a in (q, k, v))
    scores = scores_of(scale, q, k, causal)
    v = jnp.repeat(v, q.shape[2] // v.shape[2], 2)
    out = jnp.einsum("bnst,btnh->bsnh", jax.nn.softmax(scores), v)
    return out.astype(dtype), jax.nn.logsumexp(scores, -1)


def cudnn_backward(scale, q, k, v, out, sums, g, causal):
    """What `ring_blocks_cudnn._backward` computes: the gradients of a softmax whose log sum exp is `sums`."""
    dtype = q.dtype
    q, k, v, out, g = (a.astype(jnp.float32) for a in (q, k, v, out, g))
    group = q.shape[2] // k.shape[2]
    p = jnp.exp(scores_of(scale, q, k, causal) - sums[..., None])
    dp = jnp.einsum("bsnh,btnh->bnst", g, jnp.repeat(v, group, 2))
    ds = p * (dp - jnp.einsum("bsnh,bsnh->bns", g, out)[..., None]) * scale
    add_up = lambda a: a.reshape(*a.shape[:2], -1, group, a.shape[3]).sum(3)
    dq = jnp.einsum("bnst,btnh->bsnh", ds, jnp.repeat(k, group, 2))
    dk = add_up(jnp.einsum("bnst,bsnh->btnh", ds, q))
    dv = add_up(jnp.einsum("bnst,bsnh->btnh", p, g))
    return dq.astype(dtype), dk.astype(dtype), dv.astype(dtype)
