"""The gradient of a weight on CPUs, where XLA needs the operands of a matmul to lie in a certain way.

XLA's fast CPU kernels do not take a left operand that is contracted over its leading dims, as activations [B, S, D] are
for a gradient [D, F]. Written out transposed, behind a barrier that keeps the compiler from folding the transpose back
into the matmul, it is one that they take. `models.blocked_attention` and `models.loss` do so in theirs.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxdist.parallel.matmul import dot
from jaxdist.sharding import Layout, gradient_spec


def weight_gradient(layout: Layout, dims: str, x: jax.Array, w: jax.Array, g: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Return what `matmul.weight_gradient` does, up to rounding."""
    operands, out = dims.split("->")
    x_dims, w_dims = operands.split(",")
    # The smaller operand is the one to transpose.
    smaller, larger = sorted(((x_dims, x), (out, g)), key=lambda side: side[1].size)
    left_dims, left = smaller
    right_dims, right = larger
    rows_last = "".join(sorted(left_dims, key=lambda d: d not in w_dims))
    left = jax.lax.optimization_barrier(jnp.einsum(f"{left_dims}->{rows_last}", left))
    # The result comes out in the order of its operands: for another order XLA would transpose the larger operand.
    made_dims = "".join(d for d in rows_last + right_dims if d in w_dims)
    spec = gradient_spec(jnp.einsum(f"{w_dims}->{made_dims}", w))
    dw = dot(layout, f"{rows_last},{right_dims}->{made_dims}", left, right, spec, dtype)
    return jnp.einsum(f"{made_dims}->{w_dims}", jax.lax.optimization_barrier(dw))
