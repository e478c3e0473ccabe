"""Adafactor (Shazeer and Stern 2018) without momentum: means of its rows and of its columns stand for all of a matrix.

    R <- b R + (1 - b) mean over columns of (G^2 + 1e-30)       b = 1 - t^-0.8 in update t (section 7.2)
    C <- b C + (1 - b) mean over rows of (G^2 + 1e-30)          (algorithm 4)
    U <- G / sqrt(R C / mean of R)
    W <- W - rate (U / max(1, root mean square of U) + decay W)

The rate is that of the schedule, and not relative to the size of the parameter (section 8), so that decay is AdamW's.
A vector has a mean of squares for each number. Of a weight in a layer, what the product contracts is the rows, each
layer and expert has means of its own, and so has each place along the dim where several weights lie side by side.

A mean over a dim that the mesh splits is an all-reduce; the planner reads them, and what is kept, from `means`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxdist.optimizers.rule import Knobs, Mean, Role, Roles, decaying

if TYPE_CHECKING:
    import jax
    import optax

DECAY = 0.8
"""The power of the number of the update by which a second moment becomes slower."""

TINY = 1e-30
"""What is added to squares, so that none is zero."""


class AdafactorState(NamedTuple):
    """The state of Adafactor."""

    count: jax.Array  # type: ignore[assignment]  # a tuple has a method of this name, which is not called here
    """Updates so far."""
    means: Any
    """For each parameter the means that are kept, (R, C) or one; a dim of which the mean is taken has size 1."""


class Factors(NamedTuple):
    """The dims of a parameter that are rows, and those that are columns; each place along others has its own matrix."""

    rows: tuple[int, ...]
    columns: tuple[int, ...]


def adafactor(config: Knobs, rate: optax.Schedule, roles: Roles) -> optax.GradientTransformation:
    """Return Adafactor with decoupled weight decay."""
    import optax

    decay = optax.add_decayed_weights(config.weight_decay, mask=decaying(roles))
    return optax.chain(_directions(roles), decay, optax.scale_by_learning_rate(rate))


def means(role: Role, dims: int) -> tuple[Mean, ...]:
    """Return the means that an update takes of a parameter with so many dims."""
    every = range(dims)
    found = factors_of(role, dims)
    if found is None:
        layers = tuple(range(role.stacked))
        return Mean((), tuple(every), kept=True), Mean(tuple(range(role.stacked, dims)), layers)
    rows, columns = found
    of_rows = tuple(dim for dim in every if dim not in columns)
    of_columns = tuple(dim for dim in every if dim not in rows)
    of_matrices = tuple(dim for dim in of_rows if dim not in rows)
    return (
        Mean(columns, of_rows, kept=True),
        Mean(rows, of_columns, kept=True),
        Mean(rows, of_matrices),
        Mean((*rows, *columns), of_matrices),
    )


def factors_of(role: Role, dims: int) -> Factors | None:
    """Return which of its dims make a parameter a matrix; None for vectors. A matrix of no layer ends with columns."""
    matrices = role.matrices
    if matrices is not None:
        first = role.stacked + matrices.experts
        rows = tuple(first + dim for dim in matrices.inputs)
        apart = None if matrices.fused is None else first + matrices.fused
        return Factors(rows, tuple(dim for dim in range(first, dims) if dim not in rows and dim != apart))
    if not role.decays:
        return None
    return Factors(tuple(range(role.stacked, dims - 1)), (dims - 1,))


def _directions(roles: Roles) -> optax.GradientTransformation:
    """Return what an update is before decay and learning rate."""
    import jax
    import jax.numpy as jnp
    import optax

    def init(params: Any) -> AdafactorState:
        def nothing(role: Role, w: jax.Array) -> tuple[jax.Array, ...]:
            kept = [mean for mean in means(role, w.ndim) if mean.kept]
            return tuple(_mean(jnp.zeros_like(w), mean, role) for mean in kept)

        return AdafactorState(jnp.zeros((), jnp.int32), jax.tree.map(nothing, roles, params))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        count = jnp.asarray(optax.safe_increment(state.count))
        before = 1 - jnp.asarray(count, jnp.float32) ** -DECAY
        leaves = jax.tree.leaves(updates)
        tree: Any = jax.tree.structure(updates)
        each = zip(tree.flatten_up_to(roles), leaves, tree.flatten_up_to(state.means), strict=True)
        changes, kept = zip(*(_direction(role, g, own, before) for role, g, own in each), strict=True)
        return tree.unflatten(changes), AdafactorState(count, tree.unflatten(kept))

    return optax.GradientTransformation(init, update)


def _direction(
    role: Role, g: jax.Array, kept: tuple[jax.Array, ...], before: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """Return (the direction of one parameter, the means to keep); `before` is the share of those that were kept."""
    import jax
    import jax.numpy as jnp

    squares = jnp.square(g) + TINY
    asked = means(role, g.ndim)
    share = before.astype(g.dtype)
    new = tuple(
        share * old + (1 - share) * _mean(squares, mean, role)
        for old, mean in zip(kept, [mean for mean in asked if mean.kept], strict=True)
    )
    if len(new) == 1:
        direction = g * jax.lax.rsqrt(new[0])
    else:
        rows, columns = new
        relative = rows / _spread(_mean(rows, asked[2], role), rows)
        direction = g * _spread(jax.lax.rsqrt(relative), g) * _spread(jax.lax.rsqrt(columns), g)
    size = jnp.sqrt(_mean(jnp.square(direction), asked[-1], role))
    return direction / _spread(jnp.maximum(1, size), g), new


def _mean(a: jax.Array, mean: Mean, role: Role) -> jax.Array:
    """Return a mean of `a`, whose dims are those of the parameter; the dims that it loses have size 1.

    Where the mesh has added places, they are zero in `a`.
    """
    import jax
    import jax.numpy as jnp

    lost = tuple(dim for dim in range(a.ndim) if dim not in mean.dims)
    spec = jax.typeof(a).sharding.spec
    axes_of = [(axes,) if isinstance(axes, str) else tuple(axes or ()) for axes in spec.partitions]
    over = tuple(axis for dim in lost for axis in axes_of[dim])
    count = math.prod(a.shape[dim] - (role.added if dim == 0 else 0) for dim in lost)

    def on_device(own: jax.Array) -> jax.Array:
        total = jnp.sum(own, lost)
        if over:
            total = jax.lax.psum(total, over)
        return jnp.expand_dims(total / count, lost)

    if not any(axes_of):
        return on_device(a)
    left = spec.update(partitions=[None if dim in lost else axes for dim, axes in enumerate(spec.partitions)])
    return jax.shard_map(on_device, in_specs=spec, out_specs=left)(a)


def _spread(a: jax.Array, like: jax.Array) -> jax.Array:
    """Repeat `a` along the dims where it has size 1, so that it has the shape of `like`, and lies alike."""
    import jax

    return jax.lax.broadcast_in_dim(a, like.shape, range(like.ndim), out_sharding=jax.typeof(like).sharding)
