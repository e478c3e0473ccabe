"""Where arrays lie: from the letters and logical axes that models write to the mesh axes that devices have.

A model says `layout.einsum("BSD,DF->BSF", x, w)` and that `w` carries the logical axes `("embed", "mlp")`. A `Layout`
knows the mesh and turns both into `PartitionSpec`s, so a model changes its layout without a change of its code.

Letters: B rows, S sequence, D embed, F mlp, N heads, H head size, V vocabulary, L layers; C counts things stacked
in one weight (query, key, value).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import P
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import reshard
from jaxtyping import Array, Float, Int

from jaxdist.mesh import BATCH_AXES

LETTERS = dict(B="batch", S="sequence", D="embed", F="mlp", N="heads", H="head", V="vocab", L="layers")
"""The logical axis behind each letter of an einsum string."""

PRODUCT = "product"
"""The name of every product with a weight, for policies of recomputation: inside a custom VJP they see no operation."""

RULES = dict(batch=BATCH_AXES)
"""Logical axis -> the mesh axes that split it. What is not named here lies whole on every device."""


@dataclass(frozen=True)
class Layout:
    """The mesh as models see it. Axes of size 1 are left out of every spec: `reduced` over one fails to lower."""

    axes: tuple[tuple[str, int], ...] = ()
    platform: str = "cpu"

    @classmethod
    def on(cls, mesh: jax.sharding.Mesh) -> Layout:
        axes = tuple((name, size) for name, size in mesh.shape.items() if size > 1)
        return cls(axes, mesh.devices.flat[0].platform)

    @property
    def batch(self) -> tuple[str, ...]:
        """The mesh axes that split the rows of a batch."""
        return tuple(name for name, _ in self.axes if name in BATCH_AXES)

    @property
    def ranks(self) -> int:
        """Into how many parts the rows of a batch are split."""
        return self.parts("batch")

    def parts(self, logical: str) -> int:
        split = RULES.get(logical, ())
        return _product(size for name, size in self.axes if name in split)

    def spec(self, logical: Sequence[str | None], **kinds: frozenset[str]) -> P:
        """The `PartitionSpec` of an array whose dims carry these logical axes."""
        present = [name for name, _ in self.axes]
        split = [tuple(axis for axis in present if axis in RULES.get(name, ())) for name in logical]
        return P(*(axes[0] if len(axes) == 1 else axes or None for axes in split), **kinds)

    def activation(self, letters: str) -> P:
        """The `PartitionSpec` of an activation, its dims named by letters: `"BSD"`."""
        return self.spec([LETTERS.get(letter) for letter in letters])

    def einsum(self, dims: str, x: Float[Array, "..."], w: Float[Array, "..."]) -> Float[Array, "..."]:
        """Activation times weight, `"BSD,DF->BSF"`; the result lies as its letters say, the gradient of `w` as a
        partial sum over the axes that `w` is `reduced` over."""
        return checkpoint_name(_weight_einsum(self, dims, x, w), PRODUCT)

    def lookup(self, table: Float[Array, "V D"], ids: Int[Array, "B S"]) -> Float[Array, "B S D"]:
        """Rows of a table (NaN for an id outside it). In f32, so that a frequent token's gradients are added in f32."""
        rows = table.astype(wide(table.dtype)).at[ids].get(out_sharding=self.activation("BSD"))
        return rows.astype(table.dtype)


ONE_DEVICE = Layout()
"""No axis splits anything."""


def on_devices(abstract, mesh: jax.sharding.Mesh):
    """A tree from `jax.eval_shape`, whose layouts name no devices, as one that lies on the devices of `mesh`."""
    place = lambda a: jax.sharding.NamedSharding(mesh, a.sharding.spec if a.sharding else P())
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=place(a)), abstract)


def wide(dtype: jnp.dtype) -> jnp.dtype:
    """What to add numbers of `dtype` in: f32, or f64 for f64."""
    return jnp.promote_types(dtype, jnp.float32)


def spread(w: Float[Array, "..."], like: Float[Array, "..."]) -> Float[Array, "..."]:
    """A weight repeated over the leading dims of an activation, to scale or shift it element by element.

    Elementwise operations refuse `reduced` operands; this broadcast takes them, and its gradient is a partial sum,
    added up in f32.
    """
    dims = tuple(range(like.ndim - w.ndim, like.ndim))
    out = jax.lax.broadcast_in_dim(w.astype(wide(w.dtype)), like.shape, dims, out_sharding=jax.typeof(like).sharding)
    return out.astype(w.dtype)


def gradient_spec(a: jax.Array) -> P:
    """How the gradient of `a` lies: what is `reduced` going forward is `unreduced` (a partial sum) coming back."""
    spec = jax.typeof(a).sharding.spec
    return P(*spec.partitions, unreduced=spec.reduced)


def scale_partial(sums: Float[Array, "..."], factor: Float[Array, ""]) -> Float[Array, "..."]:
    """Partial sums times a number that every device knows: legal, because it can as well be done after adding up."""
    return sums * reshard(factor, P(reduced=jax.typeof(sums).sharding.spec.unreduced))


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _weight_einsum(layout: Layout, dims: str, x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.einsum(dims, x, w, out_sharding=layout.activation(dims.split("->")[1]))


def _weight_einsum_forward(layout, dims, x, w):
    return _weight_einsum(layout, dims, x, w), (x, w)


def _weight_einsum_backward(layout, dims, saved, g):
    x, w = saved
    operands, out = dims.split("->")
    x_dims, w_dims = operands.split(",")
    dx = jnp.einsum(f"{out},{w_dims}->{x_dims}", g, w, out_sharding=gradient_spec(x))
    dw = partial(jnp.einsum, out_sharding=gradient_spec(w))
    if layout.platform != "cpu":
        return dx, dw(f"{x_dims},{out}->{w_dims}", x, g)
    # XLA's fast CPU kernels do not take a left operand that is contracted over its leading dims. Written out
    # transposed, behind a barrier that keeps the compiler from folding it back, it is one. The smaller one goes there.
    (dims, left), (right_dims, right) = sorted(((x_dims, x), (out, g)), key=lambda side: side[1].size)
    rows_last = "".join(sorted(dims, key=lambda d: d not in w_dims))
    left = jax.lax.optimization_barrier(jnp.einsum(f"{dims}->{rows_last}", left))
    return dx, dw(f"{rows_last},{right_dims}->{w_dims}", left, right)


_weight_einsum.defvjp(_weight_einsum_forward, _weight_einsum_backward)


def _product(sizes) -> int:
    total = 1
    for size in sizes:
        total *= size
    return total
