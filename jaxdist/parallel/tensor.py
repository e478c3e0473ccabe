"""Tensor parallelism (Megatron-LM, Shoeybi et al. 2019) and sequence parallelism (Korthikanti et al. 2022).

    x -> enter -> column-parallel weight -> ... -> row-parallel weight -> leave -> x

`enter` is Megatron's f: it moves nothing in the forward pass, and all-reduces the gradients over the model axis in the
backward pass. The matmul with a row-parallel weight, whose contracted dim is split, leaves partial sums; `leave` is
Megatron's g and all-reduces them. With sequence parallelism the residual stream (letter s) is split along the sequence:
f becomes an all-gather, g a reduce-scatter, and the backward pass does the opposite (Korthikanti et al., section
4.2.2). That moves the same bytes, and no device holds the residual stream twice.

Inside a pipeline's region (`Layout.manual`) arrays are the devices' own parts, and the same collectives are written
out.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import partial

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import reshard
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxdist.parallel import float8, matmul, matmul_cpu, region
from jaxdist.sharding import LETTERS, Layout, gradient_spec, wide

PRODUCT = "product"
"""The checkpoint name of every matmul with a weight: activation checkpointing (remat) policies see no operation inside
a custom VJP, so they go by this name. `mean_over_heads` uses it too, so that its all-reduce is not repeated."""


def enter(layout: Layout, x: Float[Array, "B s D"], logical: str) -> Float[Array, "B S D"]:
    """Take the residual stream into weights whose columns carry the logical axis `logical`.

    Call it once for all the weights that share `x`, so that their gradients are summed before they travel.
    """
    axes = layout.split(logical)
    stream = layout.sequence_parallel
    if layout.manual:
        if stream:
            x = jax.lax.all_gather(x, stream, axis=1, tiled=True)
        return region.vary(x, axes)
    whole = layout.activation("BSD", reduced=frozenset(axes))
    if not axes or not stream:
        return reshard(x, whole)
    gather = partial(jax.lax.all_gather, axis_name=axes, axis=1, tiled=True, to="reduced")
    return jax.shard_map(gather, in_specs=layout.activation("BsD"), out_specs=whole)(x)


def leave(layout: Layout, y: Float[Array, "B S D"], summed: Collection[str]) -> Float[Array, "B s D"]:
    """Reduce partial sums over the axes `summed` on their way back to the residual stream."""
    stream = layout.sequence_parallel
    if layout.manual:
        return _leave_manual(y, summed, stream)
    if not summed or not stream:
        return reshard(y, layout.activation("BsD"))
    # Written out because on CPUs `reshard` scatters by an all-reduce.
    scatter = partial(jax.lax.psum_scatter, axis_name=stream, scatter_dimension=1, tiled=True)
    partial_sums = layout.activation("BSD", unreduced=frozenset(summed))
    return jax.shard_map(scatter, in_specs=partial_sums, out_specs=layout.activation("BsD"))(y)


def _leave_manual(y: jax.Array, summed: Collection[str], stream: tuple[str, ...]) -> jax.Array:
    if stream and set(stream) <= set(summed):
        y = jax.lax.psum_scatter(y, stream, scatter_dimension=1, tiled=True)
    else:
        y = region.own(y, stream, dim=1)
    # After the scatter, so that only this device's part of the sequence is summed.
    return region.add_up(y, [axis for axis in summed if axis not in stream])


def einsum(
    layout: Layout,
    dims: str,
    x: Float[Array, "..."],
    w: Float[Array, "..."],
    beside: Float[Array, "..."] | None = None,
) -> Float[Array, "..."]:
    """Multiply an activation by a weight: `"BSD,DF->BSF"`, or, back onto the residual stream, `"BSF,FD->BsD"`.

    The gradient of `w` is a partial sum over the axes that `w` is `reduced` over. `beside` is added to the result,
    before partial sums are reduced.
    """
    operands, out = dims.split("->")
    x_dims = operands.split(",")[0]
    contracted = [letter for letter in x_dims if letter not in out.upper()]
    summed = frozenset().union(*(layout.split(LETTERS.get(letter)) for letter in contracted))
    y = _product(layout, dims.replace("s", "S"), summed, x, w)
    if beside is not None:
        y = y + beside
    if out == "BsD":
        y = leave(layout, y, summed)
    return checkpoint_name(y, PRODUCT)


def einsum_on_stream(
    layout: Layout, dims: str, x: Float[Array, "B s ..."], w: Float[Array, "..."]
) -> Float[Array, "B s ..."]:
    """Multiply what lies as the residual stream does by a weight that nothing splits: `"BsD,DA->BsA"`."""
    return checkpoint_name(_product(layout, dims, frozenset(), x, w), PRODUCT)


def _product(layout: Layout, dims: str, summed: frozenset[str], x: jax.Array, w: jax.Array) -> jax.Array:
    return _matmul(layout, dims, summed, w.dtype, x, w)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3))
def _matmul(
    layout: Layout, dims: str, summed: frozenset[str], held: DTypeLike, x: jax.Array, w: jax.Array
) -> jax.Array:
    """Multiply in the dtype of `x`; the gradient of `w` leaves its matmul in the dtype that `w` has, `held`."""
    return _matmul_forward(layout, dims, summed, held, x, w)[0]


def _matmul_forward(
    layout: Layout, dims: str, summed: frozenset[str], held: DTypeLike, x: jax.Array, w: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    saved = (x, w.astype(x.dtype))
    x, w = float8.of_operands(layout, *saved)
    out = dims.split("->")[1]
    return matmul.dot(layout, dims, x, w, layout.activation(out, unreduced=summed)), saved


def _matmul_backward(
    layout: Layout, dims: str, summed: frozenset[str], held: DTypeLike, saved: tuple[jax.Array, jax.Array], g: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x, w = float8.of_operands(layout, *saved)
    with float8.backward_sums(layout):
        return _gradients(layout, dims, held, x, w, float8.of_gradient(layout, g))


def _gradients(
    layout: Layout, dims: str, held: DTypeLike, x: jax.Array, w: jax.Array, g: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return the gradients of both operands, from that of the result."""
    operands, out = dims.split("->")
    x_dims, w_dims = operands.split(",")
    dx = matmul.dot(layout, f"{out},{w_dims}->{x_dims}", g, w, gradient_spec(x))
    form = matmul_cpu if layout.platform == "cpu" else matmul
    return dx, form.weight_gradient(layout, dims, x, w, g, held)


_matmul.defvjp(_matmul_forward, _matmul_backward)


def mean_over_heads(layout: Layout, x: Float[Array, "B S K C"]) -> Float[Array, "B S 1 C"]:
    """Return the mean over the key/value heads of the whole mesh, by an all-reduce where the model axis splits them.

    Where `parallel.heads` has dealt them, each is there equally often.
    """
    mean = jnp.mean(x, 2, keepdims=True)
    axes = layout.split("heads")
    if layout.manual and axes:
        mean = region.vary(jax.lax.pmean(mean, axes), axes)
    return checkpoint_name(mean, PRODUCT)


def lookup(
    layout: Layout,
    table: Float[Array, "V D"],
    ids: Int[Array, "B S"],
    logical: str = "vocab",
    size: int | None = None,
) -> Float[Array, "B s D"]:
    """Look up rows of a table; an id outside of it gives NaN.

    `logical` is the logical axis of V. Where V is split, each device looks up its own rows and the devices add up what
    they found (Megatron-LM, section 3). A table that is split may have more rows than its `size`
    (`parallel.vocabulary`); these are outside of it.
    """
    split = layout.split(logical)
    stream = layout.sequence_parallel
    dtype = table.dtype

    def rows_of(table: jax.Array, ids: jax.Array) -> jax.Array:
        return table.at[ids].get(mode="fill", wrap_negative_indices=False)

    def local(table: jax.Array, ids: jax.Array) -> jax.Array:
        # The gradient of the table becomes a partial sum of each device.
        table = region.vary(table, layout.tokens_over)
        if not split:
            return rows_of(table, ids).astype(dtype)
        own = ids - table.shape[0] * jax.lax.axis_index(split)
        known = size or table.shape[0] * layout.parts(logical)
        elsewhere = ((own < 0) | (own >= table.shape[0])) & (ids >= 0) & (ids < known)
        rows = jnp.where(elsewhere[..., None], 0, rows_of(table, jnp.where(elsewhere, 0, own))).astype(dtype)
        return _leave_manual(rows, split, stream)

    # The table is read in f32, so that a frequent token's gradients are added in f32. The rows travel in the table's
    # own dtype: all but one of the numbers that are added up there are zeros.
    table = table.astype(wide(dtype))
    if layout.manual:
        rows = local(table, ids)
        return rows if split else _leave_manual(rows, split, stream)
    specs = (jax.typeof(table).sharding.spec, layout.activation("BS"))
    out = "BsD" if split else "BSD"
    rows = jax.shard_map(local, in_specs=specs, out_specs=layout.activation(out))(table, ids)
    return reshard(rows, layout.activation("BsD"))
