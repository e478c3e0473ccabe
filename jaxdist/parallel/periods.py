"""A loop over stacked layers whose kinds repeat in a period: one `scan` over whole periods, then the rest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxdist.sharding import Tree

Body = Callable[[Any, Any], tuple[Any, Any]]
"""(carry, what belongs to a layer) -> (carry, result), as `lax.scan` calls it."""


def scan(bodies: Sequence[Body], carry: Any, layers: Tree, unroll: bool = False) -> tuple[Any, Tree]:
    """Return (the carry after all layers, the results [L, ...] of the layers), where `layers` are [L, ...] each.

    Layer i runs `bodies[i % period]`; there are as many bodies as a period has layers.
    """
    period = len(bodies)
    if period == 1:
        return lax.scan(bodies[0], carry, layers, unroll=unroll)
    count = jax.tree.leaves(layers)[0].shape[0]
    whole = count - count % period

    def one_period(carry: Any, layers: Tree) -> tuple[Any, Tree]:
        return _one_after_the_other(bodies, carry, layers)

    found = []
    if whole:
        periods = jax.tree.map(lambda a: a[:whole].reshape(-1, period, *a.shape[1:]), layers)
        carry, of_periods = lax.scan(one_period, carry, periods, unroll=unroll)
        found.append(jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), of_periods))
    if whole < count:
        rest = jax.tree.map(lambda a: a[whole:], layers)
        carry, of_rest = _one_after_the_other(bodies[: count - whole], carry, rest)
        found.append(of_rest)
    return carry, jax.tree.map(lambda *parts: jnp.concatenate(parts), *found)


def _one_after_the_other(bodies: Sequence[Body], carry: Any, layers: Tree) -> tuple[Any, Tree]:
    """Run one layer of each body."""
    found = []
    for i, body in enumerate(bodies):
        carry, result = body(carry, jax.tree.map(lambda a, i=i: a[i], layers))
        found.append(result)
    return carry, jax.tree.map(lambda *parts: jnp.stack(parts), *found)
