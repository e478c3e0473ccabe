"""Values inside a manual region, where each device sees its own part of every array.

A pipeline is one such region. Without stages, the loss, experts, and attention over `context` are in regions of their
own; no region is inside another. Collectives are written out there. The type of an array says over which mesh axes the
devices' parts differ ("varying"). Where a value that is the same everywhere meets one that varies, it has to become
varying first (`vary`), and the transpose of that is a sum over the axis, which is how gradients come out right.
Parameters are made varying over the axes that split tokens before they are used, so that their gradients stay partial
sums until they are reduced once (docs/design.md, laws).
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce
from operator import or_

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float

from jaxdist.mesh import AXES
from jaxdist.sharding import Tree

Axes = Iterable[str]


def varying(*arrays: jax.Array) -> frozenset[str]:
    """Return the mesh axes over which the devices' parts of any of `arrays` differ."""
    return frozenset().union(*(jax.typeof(a).manual_axis_type.varying for a in arrays))


def outermost_first(axes: Axes) -> tuple[str, ...]:
    """Return the axes in the order of the mesh; that of a set differs between processes, whose programs must not."""
    return tuple(axis for axis in AXES if axis in axes)


def vary(x: jax.Array, axes: Axes) -> jax.Array:
    """Give each device along `axes` its own copy of `x`; the gradient of `x` is summed over them.

    No data moves forwards. Axes over which `x` varies already are left as they are.
    """
    missing = tuple(a for a in axes if a not in varying(x))
    if not missing:
        return x
    return lax.pcast(x, missing, to="varying")


def to_next(ranks: int) -> list[tuple[int, int]]:
    """Return the (source, target) pairs with which each rank sends to the next one, and the last to the first."""
    return [(rank, (rank + 1) % ranks) for rank in range(ranks)]


def zeros(shape: tuple[int, ...], dtype: DTypeLike, axes: Axes) -> jax.Array:
    """Return zeros that vary over `axes`: a loop that sums must begin with a value of the type of the sum."""
    return vary(jnp.zeros(shape, dtype), axes)


def zeros_like(a: jax.Array | jax.ShapeDtypeStruct, lead: tuple[int, ...] = ()) -> jax.Array:
    """Return zeros of the type of `a`, with further leading dims `lead`."""
    axes = varying(a) if isinstance(a, jax.Array) else a.manual_axis_type.varying
    return zeros((*lead, *a.shape), a.dtype, axes)


def add_up(x: Float[Array, "..."], axes: Axes) -> Float[Array, "..."]:
    """All-reduce over the `axes` over which `x` varies; the result is the same on all of their devices.

    Over the other axes `x` is the same already: adding it up would count it once per device.
    """
    axes = outermost_first(varying(x) & set(axes))
    if not axes:
        return x
    return lax.psum(x, axes)


def partial_sum(x: Float[Array, "..."], axes: Axes) -> Float[Array, "..."]:
    """Type each device's own `x`, which varies over `axes`, as its part of a sum over them, to leave the region."""
    axes = tuple(axes)
    return lax.pcast(x, axes, to="unreduced") if axes else x


def after(x: jax.Array, *earlier: Float[Array, "..."]) -> jax.Array:
    """Return `x`, but not before all of `earlier` are there.

    XLA:CPU begins a loop as soon as its inputs are there, and goes on behind it. All collectives of a region have one
    number; so two loops that run at once would take each other's messages for their own: they wait forever, or sum up
    what does not belong together.
    """
    never = _never(earlier)
    if never is None:
        return x
    return jnp.where(never, jnp.zeros((), x.dtype), x)


def together(arrays: Tree, earlier: Tree = ()) -> Tree:
    """Return `arrays`, none of them before all of them and of `earlier` are there: see `after`.

    Of arrays without real numbers, such as indices, none is waited for.
    """
    never = _never(jax.tree.leaves((arrays, earlier)))
    if never is None:
        return arrays
    # An array must not vary over more axes only because it waits for one that does. A loop that turns while the
    # condition holds, which is on no device, makes a copy of it for which JAX finds no axes.
    nowhere = lax.while_loop(lambda found: never & ~found, lambda found: ~found, jnp.zeros((), bool))

    def waiting(a: jax.Array) -> jax.Array:
        condition = never if varying(never) <= varying(a) else nowhere
        return jnp.where(condition, jnp.zeros((), a.dtype), a)

    return jax.tree.map(waiting, arrays)


def _never(arrays: Iterable[jax.Array]) -> Bool[Array, ""] | None:
    """Return a condition that never holds, which no compiler can know, for which one number of each array is needed.

    None is returned where no array has real numbers.
    """
    some = [a[(0,) * a.ndim] for a in arrays if a.size and jnp.issubdtype(a.dtype, jnp.floating)]
    if not some:
        return None
    return reduce(or_, [(a != a) & (a == 0) for a in some])


def own(x: jax.Array, axes: tuple[str, ...], dim: int) -> jax.Array:
    """Return this device's part of `x` along `dim`, where `axes`, outermost first, split it.

    The size of `dim` must be a multiple of the number of devices along `axes`. Nothing is sent.
    """
    if not axes:
        return x
    size = x.shape[dim] // lax.axis_size(axes)
    return lax.dynamic_slice_in_dim(vary(x, axes), lax.axis_index(axes) * size, size, axis=dim)


def placed(x: jax.Array, axes: tuple[str, ...], dim: int) -> jax.Array:
    """Return zeros with this device's part `x` where `own` would take it from."""
    size = x.shape[dim]
    whole = list(x.shape)
    whole[dim] *= lax.axis_size(axes)
    at = lax.axis_index(axes) * size
    empty = zeros(tuple(whole), x.dtype, (*axes, *varying(x)))
    return lax.dynamic_update_slice_in_dim(empty, vary(x, axes), at, dim)
