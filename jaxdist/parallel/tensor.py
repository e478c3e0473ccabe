"""Tensor parallelism (Megatron-LM, Shoeybi et al. 2019) and sequence parallelism (Korthikanti et al. 2022).

    x -> enter -> column-parallel weight -> ... -> row-parallel weight -> x

`enter` is Megatron's f: it moves nothing forward and adds up the gradients over the model axis backward. The product
with a row-parallel weight, whose contracted dim is split, is g: it leaves partial sums, which one all-reduce adds up.
With sequence parallelism the residual stream (letter s) is split along the sequence, f becomes an all-gather, g a
reduce-scatter, and the backward pass the other way round (Korthikanti et al., section 4.2.2): the same bytes, and
nothing of the residual stream is held twice.

Inside a pipeline's region (`Layout.manual`) arrays are the devices' own parts, and the same moves are written out.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from string import ascii_lowercase

import jax
import jax.numpy as jnp
from jax import P
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import reshard
from jaxtyping import Array, Float, Int

from jaxdist.parallel import region
from jaxdist.sharding import LETTERS, Layout, gradient_spec, wide

PRODUCT = "product"
"""The name of every product with a weight, for policies of recomputation: inside a custom VJP they see no operation."""


def enter(layout: Layout, x: Float[Array, "B s D"], logical: str) -> Float[Array, "B S D"]:
    """The residual stream on its way into weights whose columns carry the logical axis `logical`.

    Call it once for all the weights that share `x`, so that their gradients are added before they travel.
    """
    axes, stream = layout.split(logical), layout.split("residual")
    if layout.manual:
        x = jax.lax.all_gather(x, stream, axis=1, tiled=True) if stream else x
        return region.vary(x, axes)
    whole = layout.activation("BSD", reduced=frozenset(axes))
    if not axes or not stream:
        return reshard(x, whole)
    gather = partial(jax.lax.all_gather, axis_name=axes, axis=1, tiled=True, to="reduced")
    return jax.shard_map(gather, in_specs=layout.activation("BsD"), out_specs=whole)(x)


def leave(layout: Layout, y: Float[Array, "B S D"], summed: Collection[str]) -> Float[Array, "B s D"]:
    """Partial sums over the axes `summed` on their way back to the residual stream.

    (`reshard` scatters by an all-reduce on CPU.)
    """
    stream = layout.split("residual")
    if layout.manual:
        return _leave_by_hand(y, summed, stream)
    if not summed or not stream:
        return reshard(y, layout.activation("BsD"))
    scatter = partial(jax.lax.psum_scatter, axis_name=stream, scatter_dimension=1, tiled=True)
    specs = layout.activation("BSD", unreduced=frozenset(summed)), layout.activation("BsD")
    return jax.shard_map(scatter, in_specs=specs[0], out_specs=specs[1])(y)


def _leave_by_hand(y: jax.Array, summed: Collection[str], stream: tuple[str, ...]) -> jax.Array:
    if stream and set(stream) <= set(summed):
        y = jax.lax.psum_scatter(y, stream, scatter_dimension=1, tiled=True)
    else:
        y = region.own(y, stream, dim=1)
    return region.add_up(y, [axis for axis in summed if axis not in stream])  # only of its own part of the sequence


def einsum(layout: Layout, dims: str, x: Float[Array, "..."], w: Float[Array, "..."]) -> Float[Array, "..."]:
    """Activation times weight, `"BSD,DF->BSF"`, or, back onto the residual stream, `"BSF,FD->BsD"`.

    The gradient of `w` is a partial sum over the axes that `w` is `reduced` over.
    """
    operands, out = dims.split("->")
    summed = [layout.split(LETTERS.get(letter)) for letter in operands.split(",")[0] if letter not in out.upper()]
    summed = frozenset().union(*summed)
    y = _product(layout, dims.replace("s", "S"), summed, x, w)
    return checkpoint_name(leave(layout, y, summed) if out == "BsD" else y, PRODUCT)


def lookup(
    layout: Layout, table: Float[Array, "V D"], ids: Int[Array, "B S"], logical: str = "vocab"
) -> Float[Array, "B s D"]:
    """Rows of a table, NaN for an id that is not one; where V is split, each device looks up its own rows (section 3).

    `logical` is the logical axis of V.

    The table is read in f32, so that a frequent token's gradients are added in f32. What travels is not: all but one of
    the numbers that are added up there are zeros.
    """
    batch, split, dtype = layout.split("batch"), layout.split(logical), table.dtype
    leaves = partial(_leave_by_hand, summed=split, stream=layout.split("residual"))
    rows_of = lambda table, ids: table.at[ids].get(mode="fill", wrap_negative_indices=False)

    def local(table, ids):
        table = region.vary(table, batch)  # its gradient becomes a partial sum
        if not split:
            return rows_of(table, ids).astype(dtype)
        own = ids - table.shape[0] * jax.lax.axis_index(split)
        elsewhere = ((own < 0) | (own >= table.shape[0])) & (ids >= 0) & (ids < table.shape[0] * layout.parts(logical))
        rows = jnp.where(elsewhere[..., None], 0, rows_of(table, jnp.where(elsewhere, 0, own))).astype(dtype)
        return leaves(rows)

    table = table.astype(wide(dtype))
    if layout.manual:
        return local(table, ids) if split else leaves(local(table, ids))
    specs = jax.typeof(table).sharding.spec, layout.activation("BS")
    rows = jax.shard_map(local, in_specs=specs, out_specs=layout.activation("BsD" if split else "BSD"))(table, ids)
    return reshard(rows, layout.activation("BsD"))


def _dot(layout: Layout, dims: str, a: jax.Array, b: jax.Array, spec: P) -> jax.Array:
    """A product that lies as `spec` says. (XLA:CPU of jax 0.10 multiplies bfloat16 fast only if f32 comes out.)

    jnp.einsum contracts dims in the order of their letters, and XLA:GPU writes operands out in that order; so those of
    `a` get letters in the order in which they lie.
    """
    kind = wide(a.dtype) if layout.platform == "cpu" else None
    a_dims = dims.partition(",")[0]
    dims = dims.translate(str.maketrans(a_dims, ascii_lowercase[: len(a_dims)]))
    return jnp.einsum(dims, a, b, out_sharding=spec, preferred_element_type=kind).astype(a.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _product(layout: Layout, dims: str, summed: frozenset[str], x: jax.Array, w: jax.Array) -> jax.Array:
    return _dot(layout, dims, x, w, layout.activation(dims.split("->")[1], unreduced=summed))


def _product_forward(layout, dims, summed, x, w):
    return _product(layout, dims, summed, x, w), (x, w)


def _product_backward(layout, dims, summed, saved, g):
    x, w = saved
    operands, out = dims.split("->")
    x_dims, w_dims = operands.split(",")
    dx = _dot(layout, f"{out},{w_dims}->{x_dims}", g, w, gradient_spec(x))
    if layout.platform != "cpu":
        return dx, _dot(layout, f"{x_dims},{out}->{w_dims}", x, g, gradient_spec(w))
    # XLA's fast CPU kernels do not take a left operand that is contracted over its leading dims. Written out
    # transposed, behind a barrier that keeps the compiler from folding it back, it is one. The smaller one goes there,
    # and the product comes out as its operands stand: XLA would turn the larger one to have it in another order.
    (dims, left), (right_dims, right) = sorted(((x_dims, x), (out, g)), key=lambda side: side[1].size)
    rows_last = "".join(sorted(dims, key=lambda d: d not in w_dims))
    left = jax.lax.optimization_barrier(jnp.einsum(f"{dims}->{rows_last}", left))
    product = "".join(d for d in rows_last + right_dims if d in w_dims)
    turned = gradient_spec(jnp.einsum(f"{w_dims}->{product}", w))
    dw = _dot(layout, f"{rows_last},{right_dims}->{product}", left, right, turned)
    return dx, jnp.einsum(f"{product}->{w_dims}", jax.lax.optimization_barrier(dw))


_product.defvjp(_product_forward, _product_backward)
