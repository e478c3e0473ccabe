"""Data parallelism and FSDP: the collectives between parameters at rest and in use (ZeRO, Rajbhandari et al. 2020).

In use, a weight is whole over its ZeRO group and typed `reduced` over the axes that split tokens. The group is all of
`ZERO_AXES` that do not split the weight: mostly `data`, the name for all of them here. The gradient is `unreduced`:
each device holds its own partial sum, and only `reduce` may add them up. Only `gather` (all-gather), before weights are
used, and `reduce` (reduce-scatter or all-reduce) of gradients send them over `data`. Where all of them lie, parameter
by parameter, is what a `Placement` says, and `placing` decides.

    stage   sharded over data at rest      gather                reduce                   elements per parameter
    0       nothing (DDP)                  -                     once per step            2
    1       masters and optimizer state    once per step         once per step            2
    2       the same                       once per step         in each layer            2
    3       the same (FSDP)                in each layer, twice  in each layer            3, or 2 outside of layers

The last column is multiplied by (N-1)/N (section 7). From stage 2 on no device holds all gradients, from stage 3 on
none holds all weights: stage 3 is fully sharded data parallelism.

Hybrid sharding (HSDP) shards over `data`, whose links are fast, and holds a copy of the weights in use on each of the
R ranks along `replica`, whose links may be slow. `reduce` adds up over the other axes alone: a gradient stays a partial
sum over `replica`, as its type says, until `cross` adds up the replicas' shards, once per step, however many
micro-batches there are. Each parameter then crosses `replica` as 1/N of its elements. That holds at stage 0 too, where
`reduce` scatters over data for this purpose, and `cross` gathers the sum again.

From stage 1 on `replica` may also split the masters and the optimizer state (`replica_zero`): `cross` is then a
reduce-scatter, and `gather_replicas` brings the updated weights, in the compute dtype, back to all replicas.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import P
from jax.sharding import reshard
from jaxtyping import Array, Float

from jaxdist.mesh import REPLICA
from jaxdist.parallel import dealt_heads, heads, region
from jaxdist.parallel.placement import Placement, split_further
from jaxdist.sharding import wide


def gather_replicas(place: Placement, w: Float[Array, "..."]) -> Float[Array, "..."]:
    """All-gather weights over the replicas: as held between steps -> at rest in each replica."""
    if place.replica_dim is None:
        return w
    whole = P(*place.rest.partitions, reduced={REPLICA})
    gather = partial(jax.lax.all_gather, axis_name=REPLICA, axis=place.replica_dim, tiled=True, to="reduced")
    return reshard(jax.shard_map(gather, in_specs=place.held, out_specs=whole)(w), place.rest)


def gather(place: Placement, w: Float[Array, "..."]) -> Float[Array, "..."]:
    """All-gather weights over their group: at rest -> in use."""
    if place.deal is not None:
        w = heads.deal(w, place.deal)
        w = dealt_heads.exchange(place, w, place.rest, _shard_in_use(place), back=False)
    if place.shard_dim is None or place.use == place.rest:
        return reshard(w, place.use)
    shard = P(*_shard_in_use(place).partitions, reduced=place.use.reduced - set(place.group))
    whole = P(*place.use.partitions, reduced=place.use.reduced | set(place.group))
    # The all-gather is written out so that its result is `reduced` over the group; the reshards move nothing.
    gather = partial(jax.lax.all_gather, axis_name=place.group, axis=place.shard_dim, tiled=True, to="reduced")
    return reshard(jax.shard_map(gather, in_specs=shard, out_specs=whole)(reshard(w, shard)), place.use)


def gather_manual(place: Placement, w: Float[Array, "..."]) -> Float[Array, "..."]:
    """Do what `gather` does, inside a pipeline's region: this device's part at rest -> its part in use."""
    if place.deal is not None:
        # Deal before the all-gather over the group, so that it gathers only the heads that this device uses.
        w = dealt_heads.take(place, w)
    if place.shard_dim is not None:
        w = jax.lax.all_gather(w, place.group, axis=place.shard_dim, tiled=True)
    return region.vary(w, place.use.reduced)


def reduce(place: Placement, g: Float[Array, "..."]) -> Float[Array, "..."]:
    """Reduce-scatter gradients: partial sums in use -> `Placement.reduced`; the sum, unless it is deferred.

    A weight that is not `reduced` in use has a gradient that is summed already: each device keeps its part.
    """
    source = place.partial
    if place.deal is not None and place.deferred:
        # JAX has no rule for moving partial sums: unchecked, each device moves its own.
        own = partial(_reduce_dealt, place)
        return jax.shard_map(own, in_specs=source, out_specs=place.reduced, check_vma=False)(g)
    target = P(*_scattered_in_use(place).partitions, unreduced=place.deferred)
    if not place.use.reduced or (place.scatter_dim is None and not place.deferred):
        g = reshard(g, target)
    elif source != target:
        g = jax.shard_map(partial(_reduce_scatter, place), in_specs=source, out_specs=target)(g)
    if place.deal is None:
        return g
    g = dealt_heads.exchange(place, g, _shard_in_use(place), place.rest, back=True)
    return heads.collect(g, place.deal)


def reduce_manual(place: Placement, g: Float[Array, "..."]) -> Float[Array, "..."]:
    """Do what `reduce` does, inside a pipeline's region: partial sums in use -> this device's part, reduced."""
    summed = place.use.reduced - place.deferred
    if place.scatter_dim is not None:
        g = jax.lax.psum_scatter(g, place.group, scatter_dimension=place.scatter_dim, tiled=True)
        summed = summed - set(place.group)
    g = region.add_up(g, sorted(summed))
    # Heads come last, when a device has the least to send.
    return g if place.deal is None else dealt_heads.give_back(place, g)


def reduced_sums(place: Placement, shape: tuple[int, ...], dtype: jnp.dtype) -> Float[Array, "..."]:
    """Return zeros to accumulate what `reduce` returns for a parameter of `shape`."""
    return reshard(jnp.zeros(shape, dtype), place.reduced)


def partial_sums(place: Placement, w: Float[Array, "..."]) -> Float[Array, "..."]:
    """Return zeros for gradient accumulation of a weight in use: f32 at least, each device its own."""
    return reshard(jnp.zeros(w.shape, wide(w.dtype)), place.partial)


def cross(place: Placement, g: Float[Array, "..."]) -> Float[Array, "..."]:
    """Add up the replicas' partial sums: what `reduce` returns -> the sum, as parameters are held between steps."""
    if not place.deferred:
        return g
    if place.crossing_dim is None:
        return jax.shard_map(partial(_add_replicas, place), in_specs=place.reduced, out_specs=place.held)(g)

    def add(g: jax.Array) -> jax.Array:
        g = jax.lax.psum(g, REPLICA)
        return jax.lax.all_gather(g, place.group, axis=place.crossing_dim, tiled=True, to="reduced")

    whole = P(*place.rest.partitions, reduced=frozenset(place.group))
    return reshard(jax.shard_map(add, in_specs=place.reduced, out_specs=whole)(g), place.rest)


def _reduce_dealt(place: Placement, g: jax.Array) -> jax.Array:
    """Do what `reduce` does for dealt heads, on one device."""
    return dealt_heads.give_back_unchecked(place, _reduce_scatter(place, g))


def _reduce_scatter(place: Placement, g: jax.Array) -> jax.Array:
    """Sum over the group, keeping this device's shard; then all-reduce it over the other axes that do not wait."""
    summed = place.use.reduced - place.deferred
    if place.scatter_dim is not None:
        g = jax.lax.psum_scatter(g, place.group, scatter_dimension=place.scatter_dim, tiled=True)
        summed = summed - set(place.group)
    if not summed:
        return g
    return jax.lax.psum(g, tuple(sorted(summed)))


def _add_replicas(place: Placement, g: jax.Array) -> jax.Array:
    """Sum over the replicas; where `replica` splits the parameter, keep this device's part."""
    if place.replica_dim is None:
        return jax.lax.psum(g, REPLICA)
    return jax.lax.psum_scatter(g, REPLICA, scatter_dimension=place.replica_dim, tiled=True)


def _shard_in_use(place: Placement) -> P:
    """Return the spec in use, but split over the group as at rest."""
    if place.shard_dim is None:
        return P(*place.use.partitions)
    return split_further(place.use, place.shard_dim, place.group)


def _scattered_in_use(place: Placement) -> P:
    """Return the spec in use, but split over the group as a gradient is after `reduce`."""
    if place.scatter_dim is None or (place.shard_dim is not None and place.use == place.rest):
        return P(*place.use.partitions)
    return split_further(place.use, place.scatter_dim, place.group)
