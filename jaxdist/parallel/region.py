"""Inside the one manual region, that of a pipeline: arrays are the devices' own parts, and what moves is written out.

An array's type says over which axes the devices' parts differ ("varying"). Where a value that is the same everywhere
meets one that varies, it becomes varying first (`vary`), and the transpose of that is a sum over the axis: so gradients
come out right without a word about them. Parameters are made varying over the batch axes before they are used, so that
their gradients stay partial sums until they are reduced once (design, law 3).
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce
from operator import or_

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

Axes = Iterable[str]


def varying(*arrays: jax.Array) -> frozenset[str]:
    """The axes over which the devices' parts of some of `arrays` differ."""
    return frozenset().union(*(jax.typeof(a).manual_axis_type.varying for a in arrays))


def vary(x: jax.Array, axes: Axes) -> jax.Array:
    """`x` as a value that each device along `axes` has for itself; its gradient is added up over them."""
    missing = tuple(a for a in axes if a not in varying(x))
    return lax.pcast(x, missing, to="varying") if missing else x


def zeros(shape: tuple[int, ...], dtype: jnp.dtype, axes: Axes) -> jax.Array:
    """What a loop begins to add to: its type must be that of the sum."""
    return vary(jnp.zeros(shape, dtype), axes)


def zeros_like(a: jax.Array | jax.ShapeDtypeStruct, lead: tuple[int, ...] = ()) -> jax.Array:
    """Zeros of the type of `a`, behind further leading dims."""
    return zeros((*lead, *a.shape), a.dtype, a.manual_axis_type.varying if not isinstance(a, jax.Array) else varying(a))


def add_up(x: Float[Array, "..."], axes: Axes) -> Float[Array, "..."]:
    """The sum of the devices' parts over `axes`, the same on all of them; of what is the same already, `x` itself."""
    axes = tuple(a for a in axes if a in varying(x))
    return lax.psum(x, axes) if axes else x


def after(x: jax.Array, *earlier: Float[Array, "..."]) -> jax.Array:
    """`x`, once all of `earlier` are there, whatever they are: a condition that never holds, but no compiler knows.

    XLA:CPU begins a loop as soon as its inputs are there, and goes on behind it. Collectives of a region all have one
    number; so two loops that run at once would take each other's for their own: they wait for ever, or sum up what
    does not belong together.
    """
    some = [a[(0,) * a.ndim] for a in earlier]
    never = [(a != a) & (a == 0) for a in some]
    return jnp.where(reduce(or_, never), jnp.zeros((), x.dtype), x) if never else x


def own(x: jax.Array, axes: tuple[str, ...], dim: int) -> jax.Array:
    """The part of `x` along `dim` that belongs to this device, where it is split over `axes`, outermost first."""
    if not axes:
        return x
    size = x.shape[dim] // lax.axis_size(axes)
    return lax.dynamic_slice_in_dim(vary(x, axes), lax.axis_index(axes) * size, size, axis=dim)


def placed(x: jax.Array, axes: tuple[str, ...], dim: int) -> jax.Array:
    """Zeros, and this device's part where `own` would take it from."""
    size, whole = x.shape[dim], list(x.shape)
    whole[dim] *= lax.axis_size(axes)
    at = lax.axis_index(axes) * size
    return lax.dynamic_update_slice_in_dim(zeros(tuple(whole), x.dtype, (*axes, *varying(x))), vary(x, axes), at, dim)
