"""Matmuls in fp8, with a scale for each tensor that is found anew each time (Micikevicius et al. 2022, "FP8 Formats").

Activations and weights are E4M3, and gradients E5M2. A scale is a power of two, and that of what one device holds, so
that nothing is sent to find it. Multiplying by it rounds nothing: where a device holds another part of a tensor on
another mesh, only numbers below 2^-13 of the largest there are rounded otherwise, by 2^-17 of it at most (E4M3). The
loss is that of one device within that.

The numbers come back in the dtype that they had. XLA:GPU finds the conversion, the multiplication by the scale and the
matmul, and calls cuBLASLt in fp8 for all three; on CPUs, and on GPUs where it does not, a matmul in the wide dtype
multiplies the same numbers.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import jax
import jax.numpy as jnp
from jax import P
from jax.sharding import reshard
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxdist.sharding import Layout

FORWARD = jnp.float8_e4m3fn
"""Of activations and weights: three bits of the significand, and none for infinity."""

BACKWARD = jnp.float8_e5m2
"""Of the gradients of results: two bits of the significand, for more range."""


def of_operands(layout: Layout, x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return an activation and a weight as `layout` multiplies them: rounded, or as they are."""
    if not layout.float8:
        return x, w
    return rounded(layout, x, FORWARD), rounded(layout, w, FORWARD)


def of_gradient(layout: Layout, g: jax.Array) -> jax.Array:
    """Return the gradient of a result as `layout` multiplies it with the operands: rounded, or as it is."""
    return rounded(layout, g, BACKWARD) if layout.float8 else g


def backward_sums(layout: Layout) -> AbstractContextManager[object]:
    """Return a context for the matmuls of the backward pass, in which no sum is in fewer bits.

    In fp8 cuBLASLt adds up in fewer bits, unless it is asked not to: Transformer Engine asks for it here alone, too.
    """
    return jax.default_matmul_precision("highest") if layout.float8 else nullcontext()


def rounded(layout: Layout, a: Float[Array, "..."], dtype: DTypeLike) -> Float[Array, "..."]:
    """Return `a` rounded to the numbers of `dtype`, by a scale of each device's part; the dtype and layout stay."""
    if layout.manual:
        return _rounded(a, dtype)
    spec = jax.typeof(a).sharding.spec
    # Elementwise operations reject what is typed `reduced`.
    plain = P(*spec.partitions)
    found = jax.shard_map(lambda part: _rounded(part, dtype), in_specs=plain, out_specs=plain)(reshard(a, plain))
    return reshard(found, spec)


def _rounded(a: jax.Array, dtype: DTypeLike) -> jax.Array:
    # The largest finite number is below 2^(top + 1): so large is what is below 2^top once it is rounded up.
    top = jnp.finfo(dtype).maxexp - 1
    largest = jnp.max(jnp.abs(a)).astype(jnp.float32)
    # A number that is not finite has no exponent: it stays what it is, and the step is skipped.
    _, exponent = jnp.frexp(jnp.where(jnp.isfinite(largest), largest, 1))
    # So that the scale is finite, whatever the numbers.
    exponent = jnp.maximum(exponent, -100)
    scale = jnp.ldexp(jnp.float32(1), top - exponent)
    back = jnp.ldexp(jnp.float32(1), exponent - top)
    small = (a.astype(jnp.float32) * scale).astype(dtype)
    # In this order XLA finds it: convert, multiply by a number, contract.
    return small.astype(a.dtype) * back.astype(a.dtype)
