"""Gradients that wait for the next step: each replica keeps its own part as state, and the parts cross together.

Inside a program a gradient between `Placement.reduce` and `Placement.cross` is typed as partial sums; an array between
two programs cannot be. It is kept as [..., R], as the errors of gradient compression are.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from jaxdist.config import Config
from jaxdist.mesh import REPLICA
from jaxdist.parallel.zero import Placements
from jaxdist.sharding import Layout, Params


def delayed(config: Config, layout: Layout) -> bool:
    """Return whether gradients cross one step late; without replicas nothing crosses, and all are on time."""
    return config.parallel.delayed_gradients and layout.size(REPLICA) > 1


def cross_at_once(places: Placements, parts: Params) -> Params:
    """Do what `Placement.cross` does for all gradients in one all-reduce; `parts` are what `replicas.kept` returns.

    One, because XLA puts a loop of matmuls beside a collective, but seldom beside each of several. It is for gradients
    that all wait for the replicas, which split none of them between steps.
    """
    leaves, tree = jax.tree.flatten(parts)
    all_places = jax.tree.leaves(places)
    assert all(place.deferred and place.replica_dim is None for place in all_places)

    def add(*own: jax.Array) -> tuple[jax.Array, ...]:
        total = jax.lax.psum(jnp.concatenate([part.ravel() for part in own]), REPLICA)
        ends = [0]
        found = []
        for place, part in zip(all_places, own, strict=True):
            ends.append(ends[-1] + math.prod(part.shape))
            g = total[ends[-2] : ends[-1]].reshape(part.shape[:-1])
            if place.crossing_dim is not None:
                g = jax.lax.all_gather(g, place.over, axis=place.crossing_dim, tiled=True)
            found.append(g)
        return tuple(found)

    before = tuple(place.errors for place in all_places)
    after = tuple(place.rest for place in all_places)
    crossed = jax.shard_map(add, in_specs=before, out_specs=after, check_vma=False)(*leaves)
    return jax.tree.unflatten(tree, crossed)
