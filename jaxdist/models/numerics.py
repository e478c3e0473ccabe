"""Each fast form of what a model computes, and its gradients, beside the plain form in float32 on the same device.

A kernel that is wrong on one kind of device, with one version of its library, is wrong without a word: the loss still
falls. So these run where the model is going to, with the same kernels, on small arrays of normal numbers.
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

from jaxdist.mesh import make_mesh, parse_mesh
from jaxdist.models.attention import causal_attention
from jaxdist.models.layers import RMSNorm, SwiGLU, rotary
from jaxdist.models.loss import cross_entropy
from jaxdist.sharding import RULES, Layout

BOUNDS = {"bfloat16": 2**-5, "float16": 2**-8, "float32": 2**-8, "float64": 1e-10}
"""How far a result may be from the plain form, of the latter's largest value: eight times what rounding it once can do.
GPUs multiply float32 with the significand of float16 (TF32). float64 is for the tests."""

THETA = 10_000.0
"""Base of the rotary positions here."""


class Difference(NamedTuple):
    what: str
    error: float
    """Of the largest value of the plain form."""
    bound: float

    @property
    def fine(self) -> bool:
        """NaN is not."""
        return self.error <= self.bound


@dataclass(frozen=True)
class Sizes:
    rows: int = 1
    sequence: int = 256
    heads: int = 2
    kv_heads: int = 1
    size: int = 64
    """Of a head."""
    mlp: int = 256
    vocab: int = 512

    @property
    def embed(self) -> int:
        return self.heads * self.size


def attention(sizes: Sizes, dtype: jnp.dtype, device: jax.Device) -> list[Difference]:
    """The attention that `models.attention` chooses on this device."""
    b, s, n, k, h = sizes.rows, sizes.sequence, sizes.heads, sizes.kv_heads, sizes.size
    shapes = (b, s, n, h), (b, s, k, h), (b, s, k, h)
    return _compare("attention", "qkv", causal_attention, _plain_attention, shapes, dtype, device)


def everything(sizes: Sizes, dtype: jnp.dtype, device: jax.Device) -> Iterator[Difference]:
    """Attention, cross-entropy, RMSNorm, SwiGLU and rotary positions, each with all its gradients."""
    compare = partial(_compare, dtype=dtype, device=device)
    b, s, d = sizes.rows, sizes.sequence, sizes.embed
    x, table, labels = (1, b, s, d), (sizes.vocab, d), np.arange(b * s).reshape(1, b, s) % (sizes.vocab + 1) - 1
    names, factors = ("x", "gate-up", "down"), ((b, s, d), (d, 2, sizes.mlp), (sizes.mlp, d))
    yield from attention(sizes, dtype, device)
    loss = lambda layout, x, table: cross_entropy(layout, x, table, labels)
    yield from compare("cross-entropy", ("x", "table"), loss, partial(_plain_cross_entropy, labels), (x, table))
    yield from compare("RMSNorm", ("x", "scale"), _rms_norm, _plain_rms_norm, ((b, s, d), (d,)))
    yield from compare("SwiGLU", names, _swiglu, _plain_swiglu, factors)
    turn = lambda layout, x: rotary(x, THETA)
    yield from compare("rotary", "x", turn, _plain_rotary, ((b, s, sizes.heads, sizes.size),))


def _compare(
    name: str,
    inputs: str | tuple[str, ...],
    fast: Callable[..., Array],
    plain: Callable[..., Array],
    shapes: tuple[tuple[int, ...], ...],
    dtype: jnp.dtype,
    device: jax.Device,
) -> list[Difference]:
    """The result of `fast(layout, *inputs)` and its gradients against those of `plain(*inputs)` in f32 at least."""
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
    return [Difference(what, _apart(a, b), bound) for what, a, b in zip(names, got, wanted, strict=True)]


def _normal(rng: np.random.Generator, shape: tuple[int, ...], dtype: jnp.dtype) -> np.ndarray:
    """Weights, of two dims or three, are divided by the root of their first: products stay as large as x."""
    scale = shape[0] ** -0.5 if len(shape) in (2, 3) and shape[0] > 8 else 1.0
    return np.asarray(scale * rng.normal(size=shape)).astype(dtype)


def _with_gradients(f: Callable[..., Array], given: list[Array], g: Array) -> tuple[Array, ...]:
    out, pull = jax.vjp(f, *given)
    return out, *pull(g.astype(out.dtype))


def _apart(a: Array, b: Array) -> float:
    a, b = (np.asarray(one, np.float64) for one in (a, b))
    return float(np.max(np.abs(a - b)) / np.max(np.abs(b)))


def _plain_attention(q: Float[Array, "B S N H"], k: Float[Array, "B S K H"], v: Float[Array, "B S K H"]) -> Array:
    group, sequence = q.shape[2] // k.shape[2], q.shape[1]
    k, v = jnp.repeat(k, group, axis=2), jnp.repeat(v, group, axis=2)
    scores = jnp.einsum("BSNH,BTNH->BNST", q, k) * q.shape[3] ** -0.5
    past = jnp.arange(sequence)[:, None] >= jnp.arange(sequence)
    return jnp.einsum("BNST,BTNH->BSNH", jax.nn.softmax(jnp.where(past, scores, -jnp.inf)), v)


def _plain_cross_entropy(labels: Array, x: Float[Array, "k B S D"], table: Float[Array, "V D"]) -> Array:
    likely = jax.nn.log_softmax(jnp.einsum("kBSD,VD->kBSV", x, table))
    picked = jnp.sum(jnp.where(jnp.arange(table.shape[0]) == labels[..., None], likely, 0))  # -1 is no row's number
    return -picked


def _rms_norm(layout: Layout, x: Float[Array, "B S D"], scale: Float[Array, " D"]) -> Array:
    norm = RMSNorm(scale.size)
    norm.scale = nnx.Param(scale)
    return norm(x)


def _plain_rms_norm(x: Float[Array, "B S D"], scale: Float[Array, " D"]) -> Array:
    return x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-5) * scale


def _swiglu(
    layout: Layout, x: Float[Array, "B S D"], gate_up: Float[Array, "D 2 F"], down: Float[Array, "F D"]
) -> Array:
    mlp = SwiGLU(*down.shape[::-1], layout, nnx.Rngs(0), 1.0)
    mlp.gate_up, mlp.down = nnx.Param(gate_up), nnx.Param(down)
    return mlp(x)


def _plain_swiglu(x: Float[Array, "B S D"], gate_up: Float[Array, "D 2 F"], down: Float[Array, "F D"]) -> Array:
    gate, up = (jnp.einsum("BSD,DF->BSF", x, gate_up[:, i]) for i in range(2))
    return jnp.einsum("BSF,FD->BSD", gate / (1 + jnp.exp(-gate)) * up, down)


def _plain_rotary(x: Float[Array, "B S N H"]) -> Array:
    """As complex numbers, whose halves stand apart."""
    half = x.shape[3] // 2
    angle = jnp.arange(x.shape[1])[:, None] * THETA ** (-jnp.arange(half) / half)
    turned = jax.lax.complex(x[..., :half], x[..., half:]) * jnp.exp(1j * angle)[:, None]
    return jnp.concatenate([turned.real, turned.imag], axis=-1)
