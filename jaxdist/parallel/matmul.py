"""The matmuls between activations and weights, forward and backward, on any platform but the CPU."""

from __future__ import annotations

from string import ascii_lowercase

import jax
import jax.numpy as jnp
from jax import P
from jax.typing import DTypeLike

from jaxdist.sharding import Layout, gradient_spec, wide


def dot(layout: Layout, dims: str, a: jax.Array, b: jax.Array, spec: P, dtype: DTypeLike | None = None) -> jax.Array:
    """Contract `a` with `b` as the einsum string `dims` says; the result lies as `spec` says.

    It leaves the matmul in `dtype`, or in that of `a`.
    """
    # XLA:CPU of jax 0.10 multiplies bfloat16 fast only if f32 comes out.
    accumulate = wide(a.dtype) if layout.platform == "cpu" else dtype
    # jnp.einsum contracts dims in the order of their letters, and XLA:GPU writes operands out in that order; so the
    # dims of `a` get letters in the order in which they lie.
    a_dims = dims.partition(",")[0]
    dims = dims.translate(str.maketrans(a_dims, ascii_lowercase[: len(a_dims)]))
    return jnp.einsum(dims, a, b, out_sharding=spec, preferred_element_type=accumulate).astype(dtype or a.dtype)


def weight_gradient(layout: Layout, dims: str, x: jax.Array, w: jax.Array, g: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Return the gradient of `w` in the matmul `dims` of `x` and `w`, from the gradient `g` of its result, in `dtype`.

    It is `unreduced` over the axes that `w` is `reduced` over.
    """
    operands, out = dims.split("->")
    x_dims, w_dims = operands.split(",")
    return dot(layout, f"{x_dims},{out}->{w_dims}", x, g, gradient_spec(w), dtype)
