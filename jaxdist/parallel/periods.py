"""A loop over stacked layers whose kinds repeat in a period: one `scan` over whole periods, then the rest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import P, lax
from jaxtyping import Array

from jaxdist.sharding import Tree

Body = Callable[[Any, Any], tuple[Any, Any]]
"""(carry, what belongs to a layer) -> (carry, result), as `lax.scan` calls it."""


def scan(
    bodies: Sequence[Body], carry: Any, layers: Tree, unroll: bool = False, reverse: bool = False
) -> tuple[Any, Tree]:
    """Return (the carry after all layers, the results [L, ...] of the layers), where `layers` are [L, ...] each.

    Layer i runs `bodies[i % period]`; there are as many bodies as a period has layers. In `reverse`, the last layer
    comes first. With `unroll` the program has all layers one after the other.
    """
    period = len(bodies)
    count = jax.tree.leaves(layers)[0].shape[0]
    if unroll and count > 1:
        bodies = [passes_apart(body) for body in bodies]
    if period == 1:
        return lax.scan(bodies[0], carry, layers, unroll=unroll, reverse=reverse)
    whole = count - count % period

    def one_period(carry: Any, layers: Tree) -> tuple[Any, Tree]:
        return _one_after_the_other(bodies, carry, layers, reverse)

    def whole_periods(carry: Any) -> tuple[Any, Tree]:
        periods = jax.tree.map(lambda a: _folded(a[:whole], period), layers)
        carry, found = lax.scan(one_period, carry, periods, unroll=unroll, reverse=reverse)
        return carry, jax.tree.map(_merged, found)

    def rest(carry: Any) -> tuple[Any, Tree]:
        of_rest = jax.tree.map(lambda a: a[whole:], layers)
        return _one_after_the_other(bodies[: count - whole], carry, of_rest, reverse)

    parts = []
    if whole:
        parts.append(whole_periods)
    if whole < count:
        parts.append(rest)
    carry, found = _in_turn(parts, carry, reverse)
    return carry, jax.tree.map(lambda *parts: jnp.concatenate(parts), *found)


def passes_apart(f: Callable[..., Any]) -> Callable[..., Any]:
    """Return `f`, of whose results the backward pass uses none but those that it saves.

    Where the two passes are not in loops of their own, XLA finds that activation checkpointing computes again what the
    forward pass has computed, and keeps that in memory instead.
    """

    @jax.custom_vjp
    def call(*arguments: Any) -> Any:
        return f(*arguments)

    def forward(*arguments: Any) -> tuple[Any, Any]:
        return jax.vjp(f, *arguments)

    def backward(pull: Any, g: Any) -> Any:
        pull, g = lax.optimization_barrier((pull, g))
        return pull(g)

    call.defvjp(forward, backward)
    return call


def _one_after_the_other(bodies: Sequence[Body], carry: Any, layers: Tree, reverse: bool) -> tuple[Any, Tree]:
    """Run one layer of each body."""

    def of_layer(i: int, body: Body, carry: Any) -> tuple[Any, Any]:
        return body(carry, jax.tree.map(lambda a: a[i], layers))

    carry, found = _in_turn([partial(of_layer, i, body) for i, body in enumerate(bodies)], carry, reverse)
    # `jnp.stack` sums arrays that are typed `unreduced`, as the counts of routers are, once too often (jax 0.10).
    return carry, jax.tree.map(lambda *parts: jnp.concatenate([a[None] for a in parts]), *found)


def _folded(a: Array, period: int) -> Array:
    """Return layers [L, ...] as whole periods [L / period, period, ...]."""
    # By a reshape JAX adds no dim of size 1 to an array that is typed `reduced`.
    return a[None] if a.shape[0] == period else a.reshape(-1, period, *a.shape[1:])


def _merged(a: Array) -> Array:
    """Return the results [periods, period, ...] of layers as [L, ...]."""
    spec = jax.typeof(a).sharding.spec
    shape = (a.shape[0] * a.shape[1], *a.shape[2:])
    if not spec.unreduced:
        return a.reshape(shape)
    # JAX does not find the layout of partial sums by itself.
    return lax.reshape(a, shape, out_sharding=P(*spec.partitions[1:], unreduced=spec.unreduced))


def _in_turn(runs: Sequence[Callable[[Any], tuple[Any, Tree]]], carry: Any, reverse: bool) -> tuple[Any, list[Tree]]:
    """Run each of `runs`, in `reverse` the last one first; return (the carry, the results in the order of `runs`)."""
    found = []
    for run in reversed(runs) if reverse else runs:
        carry, result = run(carry)
        found.append(result)
    return carry, found[::-1] if reverse else found
