"""Compare each fast form of what a model computes, and its gradients, with the plain form on the same device.

A kernel that is wrong on one kind of device, with one version of its library, is silently wrong: the loss still falls.
So these comparisons run where the model is going to run, with the same kernels, on small arrays of normal numbers.
The plain form runs in float32 at least.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from jaxdist.config import ModelConfig
from jaxdist.config.rope_scaling import RopeScaling
from jaxdist.mesh import CONTEXT, make_mesh, parse_mesh
from jaxdist.mesh.context import zigzag
from jaxdist.models.attention import causal_attention
from jaxdist.models.layers import GatedMLP
from jaxdist.models.loss import cross_entropy
from jaxdist.models.norms import RMSNorm
from jaxdist.models.positions import rotary
from jaxdist.models.ring_blocks_cudnn import CudnnBlocks
from jaxdist.models.scores import Scores
from jaxdist.parallel.context import Attended, Keys, Queries, Ring
from jaxdist.sharding import RULES, Layout

BOUNDS = {"bfloat16": 2**-5, "float16": 2**-8, "float32": 2**-8, "float64": 1e-10}
"""How far a result may be from the plain form, as a share of the latter's largest value: eight times what rounding it
once can do. GPUs multiply float32 with the significand of float16 (TF32). float64 is for the tests."""

THETA = 10_000.0
"""Base of the rotary positions here."""

RANKS = 4
"""Ranks of the ring here: the least with which both kinds of visitors come to some rank, in the loop and after it."""

EPS = 1e-5
"""What the norm here adds to the mean square."""


class Difference(NamedTuple):
    """How far one result of a fast form is from that of the plain form."""

    what: str
    error: float
    """Largest difference, as a share of the largest value of the plain form."""
    bound: float

    @property
    def fine(self) -> bool:
        """Whether the error is within the bound; NaN is not."""
        return self.error <= self.bound


@dataclass(frozen=True)
class Sizes:
    """Sizes of the arrays that are compared."""

    rows: int = 1
    sequence: int = 256
    heads: int = 2
    kv_heads: int = 1
    size: int = 64
    """Of a head."""
    window: int = 0
    """Tokens that a query sees; 0: all before it."""
    mlp: int = 256
    vocab: int = 512

    @property
    def embed(self) -> int:
        """Width of the residual stream."""
        return self.heads * self.size


def attention_of(layout: Layout, sizes: Sizes, dtype: jnp.dtype, device: jax.Device) -> list[Difference]:
    """Compare what runs on a device of `layout`: half-blocks of a ring, or attention to whole rows."""
    if layout.zigzag:
        return ring_of_cudnn(sizes, dtype, device)
    return attention(sizes, dtype, device)


def attention(sizes: Sizes, dtype: jnp.dtype, device: jax.Device) -> list[Difference]:
    """Compare the attention that `models.attention` chooses on this device."""
    q = (sizes.rows, sizes.sequence, sizes.heads, sizes.size)
    kv = (sizes.rows, sizes.sequence, sizes.kv_heads, sizes.size)
    scores = Scores.of(sizes.size, sizes.window)

    def fast(layout: Layout, *heads: jax.Array) -> jax.Array:
        return causal_attention(layout, scores, *heads)

    return _compare("attention", "qkv", fast, partial(_plain_attention, scores), (q, kv, kv), dtype, device)


def ring_of_cudnn(sizes: Sizes, dtype: jnp.dtype, device: jax.Device) -> list[Difference]:
    """Compare a ring of cuDNN's half-blocks, all of whose ranks this one device plays."""
    q = (sizes.rows, sizes.sequence, sizes.heads, sizes.size)
    kv = (sizes.rows, sizes.sequence, sizes.kv_heads, sizes.size)
    scores = Scores.of(sizes.size)

    def ring(layout: Layout, *heads: jax.Array) -> jax.Array:
        return _ring_of_cudnn(scores.scale, *heads)

    return _compare("ring attention", "qkv", ring, partial(_plain_attention, scores), (q, kv, kv), dtype, device)


def everything(sizes: Sizes, dtype: jnp.dtype, device: jax.Device) -> Iterator[Difference]:
    """Compare attention, cross-entropy, RMSNorm, SwiGLU and rotary positions, each with all its gradients."""
    compare = partial(_compare, dtype=dtype, device=device)
    rows = sizes.rows
    sequence = sizes.sequence
    embed = sizes.embed
    x = (rows, sequence, embed)
    # All tokens in turn, and -1, which is padding.
    labels = np.arange(rows * sequence).reshape(1, rows, sequence) % (sizes.vocab + 1) - 1

    def fused_loss(layout: Layout, x: jax.Array, table: jax.Array) -> jax.Array:
        return cross_entropy(layout, x, table, jnp.asarray(labels))

    def turn(layout: Layout, x: jax.Array) -> jax.Array:
        return rotary(x, tuple(RopeScaling().frequencies(THETA, sizes.size)), jnp.arange(sequence))

    yield from attention(sizes, dtype, device)
    plain_loss = partial(_plain_cross_entropy, labels)
    yield from compare("cross-entropy", ("x", "table"), fused_loss, plain_loss, ((1, *x), (sizes.vocab, embed)))
    yield from compare("RMSNorm", ("x", "scale"), _rms_norm, _plain_rms_norm, (x, (embed,)))
    factors = (x, (embed, 2, sizes.mlp), (sizes.mlp, embed))
    yield from compare("SwiGLU", ("x", "gate-up", "down"), _swiglu, _plain_swiglu, factors)
    yield from compare("rotary", "x", turn, _plain_rotary, ((rows, sequence, sizes.heads, sizes.size),))


def _compare(
    name: str,
    inputs: str | tuple[str, ...],
    fast: Callable[..., Array],
    plain: Callable[..., Array],
    shapes: tuple[tuple[int, ...], ...],
    dtype: jnp.dtype,
    device: jax.Device,
) -> list[Difference]:
    """Compare result and gradients of `fast(layout, *inputs)` with `plain(*inputs)` in f32 at least."""
    mesh = make_mesh(parse_mesh("1x1x1"), [device])
    layout = Layout.on(mesh, RULES, device)
    rng = np.random.default_rng(0)
    given = [_normal(rng, shape, dtype) for shape in shapes]
    exact = [a.astype(np.promote_types(dtype, np.float32)) for a in given]
    with jax.set_mesh(mesh), jax.numpy_rank_promotion("allow"):
        g = _normal(rng, jax.eval_shape(plain, *exact).shape, dtype)
        got = jax.jit(partial(_with_gradients, partial(fast, layout)))(given, g)
        with jax.default_matmul_precision("highest"):
            wanted = jax.jit(partial(_with_gradients, plain))(exact, g)
    names = [name, *(f"{name}, d {one}" for one in inputs)]
    bound = BOUNDS[jnp.dtype(dtype).name]
    return [Difference(what, _error(a, b), bound) for what, a, b in zip(names, got, wanted, strict=True)]


def _normal(rng: np.random.Generator, shape: tuple[int, ...], dtype: jnp.dtype) -> np.ndarray:
    """Draw normal numbers; weights are divided by the root of their first dim, so that results stay as large as x."""
    is_weight = len(shape) in (2, 3) and shape[0] > 8
    scale = shape[0] ** -0.5 if is_weight else 1.0
    return np.asarray(scale * rng.normal(size=shape)).astype(dtype)


def _with_gradients(f: Callable[..., Array], given: list[Array], g: Array) -> tuple[Array, ...]:
    """Return the result of `f` and the gradients of its inputs for the cotangent `g`."""
    out, pullback = jax.vjp(f, *given)
    return out, *pullback(g.astype(out.dtype))


def _error(a: Array, b: Array) -> float:
    found, wanted = (np.asarray(one, np.float64) for one in (a, b))
    return float(np.max(np.abs(found - wanted)) / np.max(np.abs(wanted)))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _ring_of_cudnn(
    scale: float, q: Float[Array, "B S N H"], k: Float[Array, "B S K H"], v: Float[Array, "B S K H"]
) -> Array:
    """Attend by a ring whose `RANKS` devices are a dim of the arrays, which `vmap` gives the name of the axis."""
    return _ring_forward(scale, q, k, v)[0]


def _ring_forward(
    scale: float, q: jax.Array, k: jax.Array, v: jax.Array
) -> tuple[jax.Array, tuple[Queries, Keys, Attended]]:
    at = jnp.asarray(_positions(q.shape[1])).reshape(RANKS, -1)
    queries = Queries(_parts(q), at, None)
    keys = Keys(_parts(k), _parts(v), at)
    found = jax.vmap(_ring(scale).attend, axis_name=CONTEXT)(queries, keys)
    return _whole(found.out), (queries, keys, found)


def _ring_backward(
    scale: float, saved: tuple[Queries, Keys, Attended], g: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    gradients = jax.vmap(_ring(scale).gradients, axis_name=CONTEXT)(*saved, _parts(g))
    return _whole(gradients.q), _whole(gradients.k), _whole(gradients.v)


def _ring(scale: float) -> Ring:
    return Ring(RANKS, CudnnBlocks(scale))


_ring_of_cudnn.defvjp(_ring_forward, _ring_backward)


def _positions(sequence: int) -> np.ndarray:
    return zigzag(np.arange(sequence), sequence, RANKS)


def _parts(a: Float[Array, "B S N H"]) -> Float[Array, "n B S/n N H"]:
    """Return what each rank of the ring holds of `a`."""
    a = a[:, _positions(a.shape[1])]
    return jnp.moveaxis(a.reshape(a.shape[0], RANKS, -1, *a.shape[2:]), 1, 0)


def _whole(parts: Float[Array, "n B S/n N H"]) -> Float[Array, "B S N H"]:
    """Undo `_parts`."""
    a = jnp.moveaxis(parts, 0, 1)
    a = a.reshape(a.shape[0], -1, *a.shape[3:])
    return a[:, np.argsort(_positions(a.shape[1]))]


def _plain_attention(
    scores: Scores, q: Float[Array, "B S N H"], k: Float[Array, "B S K H"], v: Float[Array, "B S K H"]
) -> Array:
    group = q.shape[2] // k.shape[2]
    sequence = q.shape[1]
    k = jnp.repeat(k, group, axis=2)
    v = jnp.repeat(v, group, axis=2)
    products = jnp.einsum("BSNH,BTNH->BNST", q, k) * scores.scale
    distance = jnp.arange(sequence)[:, None] - jnp.arange(sequence)
    seen = (distance >= 0) & (distance < (scores.window or sequence))
    return jnp.einsum("BNST,BTNH->BSNH", jax.nn.softmax(jnp.where(seen, products, -jnp.inf)), v)


def _plain_cross_entropy(labels: np.ndarray, x: Float[Array, "k B S D"], table: Float[Array, "V D"]) -> Array:
    log_p = jax.nn.log_softmax(jnp.einsum("kBSD,VD->kBSV", x, table))
    # A label of -1 is no row of the table, and picks nothing.
    picked = jnp.sum(jnp.where(jnp.arange(table.shape[0]) == labels[..., None], log_p, 0))
    return -picked


def _rms_norm(layout: Layout, x: Float[Array, "B S D"], scale: Float[Array, " D"]) -> Array:
    norm = RMSNorm(scale.size, EPS)
    norm.scale = nnx.Param(scale)
    return norm(x)


def _plain_rms_norm(x: Float[Array, "B S D"], scale: Float[Array, " D"]) -> Array:
    return x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + EPS) * scale


def _swiglu(
    layout: Layout, x: Float[Array, "B S D"], gate_up: Float[Array, "D 2 F"], down: Float[Array, "F D"]
) -> Array:
    mlp_size, embed = down.shape
    mlp = GatedMLP(ModelConfig(family="llama", embed=embed, mlp=mlp_size), layout, nnx.Rngs(0))
    mlp.gate_up.weight = nnx.Param(gate_up)
    mlp.down.weight = nnx.Param(down)
    return mlp(x)


def _plain_swiglu(x: Float[Array, "B S D"], gate_up: Float[Array, "D 2 F"], down: Float[Array, "F D"]) -> Array:
    gate, up = (jnp.einsum("BSD,DF->BSF", x, gate_up[:, i]) for i in range(2))
    return jnp.einsum("BSF,FD->BSD", gate / (1 + jnp.exp(-gate)) * up, down)


def _plain_rotary(x: Float[Array, "B S N H"]) -> Array:
    """Turn the halves of a head as the real and imaginary parts of complex numbers."""
    half = x.shape[3] // 2
    angle = jnp.arange(x.shape[1])[:, None] * THETA ** (-jnp.arange(half) / half)
    turned = jax.lax.complex(x[..., :half], x[..., half:]) * jnp.exp(1j * angle)[:, None]
    return jnp.concatenate([turned.real, turned.imag], axis=-1)
