"""Arrays of which each replica has its own: [..., R], with a last dim that `replica` splits.

On the mesh of one replica the same array is [..., 1]. What lies on a device is equal in both, so that `part` and `join`
go from one mesh to the other without a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import P
from jax.sharding import NamedSharding, reshard
from jaxtyping import Array, Float

from jaxdist.mesh import AXES, REPLICA
from jaxdist.parallel import region
from jaxdist.parallel.placement import Placement
from jaxdist.sharding import Tree

TreeT = TypeVar("TreeT", bound=Tree)


def of_each(tree: TreeT, replicas: int) -> TreeT:
    """Return [...] as [..., R], the same for each replica."""

    def repeat(a: Array) -> Array:
        split = P(*jax.typeof(a).sharding.spec.partitions, REPLICA)
        return reshard(jnp.broadcast_to(a[..., None], (*a.shape, replicas)), split)

    return jax.tree.map(repeat, tree)


def alone(tree: TreeT) -> TreeT:
    """Return [..., 1], on the mesh of one replica, as [...]."""
    return jax.tree.map(lambda a: jnp.squeeze(_last_dim(a, None), -1), tree)


def dealt(tree: TreeT, replicas: int) -> TreeT:
    """Return what Q replicas had, [..., Q], as [..., R]: as it was, or to each the mean of all; of counts the largest.

    The arrays are on devices, and not in a host's memory.
    """

    def deal(a: Array) -> Array:
        if a.shape[-1] == replicas:
            return _last_dim(a, REPLICA)
        a = _last_dim(a, None)
        return of_each(a.mean(-1) if jnp.issubdtype(a.dtype, jnp.floating) else a.max(-1), replicas)

    return jax.tree.map(deal, tree)


def of_others(tree: Tree, count: int) -> Tree:
    """Return shapes of arrays [..., R] for another number of replicas, of which each device holds all."""

    def of_all(a: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        whole = P(*a.sharding.spec.partitions[:-1], None)
        sharding = NamedSharding(a.sharding.mesh, whole, memory_kind=a.sharding.memory_kind)
        return jax.ShapeDtypeStruct((*a.shape[:-1], count), a.dtype, sharding=sharding)

    return jax.tree.map(of_all, tree)


def like(weight: Float[Array, " R"], own: Float[Array, "... R"]) -> Float[Array, "... R"]:
    """Broadcast a number of each replica over an array of which each has its own."""
    return jax.lax.broadcast_in_dim(weight, own.shape, (own.ndim - 1,), out_sharding=jax.typeof(own).sharding)


def own_parts(place: Placement) -> P:
    """Return how each replica's own part of a gradient lies, [..., R]: as between `zero.reduce` and `cross`."""
    return P(*place.reduced.partitions, REPLICA if place.deferred else None)


def kept(place: Placement, g: Float[Array, "..."]) -> Float[Array, "... R"]:
    """Return what `zero.reduce` returns as state: each replica's own part, as `own_parts` says."""

    def own(g: jax.Array) -> jax.Array:
        return g[..., None]

    # Unchecked, because there a partial sum is what it is, the device's own part; checked, it can only be added up.
    return jax.shard_map(own, in_specs=place.reduced, out_specs=own_parts(place), check_vma=False)(g)


def partial_sums(place: Placement, parts: Float[Array, "... R"]) -> Float[Array, "..."]:
    """Return the inverse of `kept`: partial sums over the replicas, in the type that `zero.cross` takes."""

    def typed(part: jax.Array) -> jax.Array:
        return region.partial_sum(part[..., 0], place.deferred)

    return jax.shard_map(typed, in_specs=own_parts(place), out_specs=place.reduced)(parts)


def mesh_of(mesh: jax.sharding.Mesh, replica: int) -> jax.sharding.Mesh:
    """Return the mesh of one replica: the same axes, of which `replica` has size 1."""
    devices = mesh.devices.take([replica], axis=AXES.index(REPLICA))
    return jax.sharding.Mesh(devices, mesh.axis_names, axis_types=mesh.axis_types)


def part(tree: TreeT, mesh: jax.sharding.Mesh) -> TreeT:
    """Return what lies on the devices of one replica, whose mesh is given, of arrays that `replica` splits."""
    devices = set(mesh.devices.flat)

    def take(a: jax.Array) -> jax.Array:
        shards = [shard.data for shard in a.addressable_shards if shard.device in devices]
        replicas = _sharding(a).mesh.shape[REPLICA]
        shape = _with_replica_dim(a, lambda size: size // replicas)
        return jax.make_array_from_single_device_arrays(shape, _as_on(mesh, a), shards)

    return jax.tree.map(take, tree)


def join(trees: Sequence[TreeT], mesh: jax.sharding.Mesh) -> TreeT:
    """Return the inverse of `part`: arrays of the whole mesh, from the parts that this process has."""

    def together(*parts: jax.Array) -> jax.Array:
        shards = [shard.data for one in parts for shard in one.addressable_shards]
        shape = _with_replica_dim(parts[0], lambda size: size * mesh.shape[REPLICA])
        return jax.make_array_from_single_device_arrays(shape, _as_on(mesh, parts[0]), shards)

    return jax.tree.map(together, *trees)


def value(a: jax.Array) -> int:
    """Return the one number of an array [1] of a replica that has devices of this process."""
    return int(np.asarray(a.addressable_shards[0].data)[0])


def filled(a: jax.Array, number: float) -> jax.Array:
    """Return an array like `a`, [1] of a replica, with that number in it; no process waits for another."""
    one = np.full(a.shape, number, a.dtype)
    shards = [jax.device_put(one, shard.device) for shard in a.addressable_shards]
    return jax.make_array_from_single_device_arrays(a.shape, a.sharding, shards)


def joined(tree: Tree, mesh: jax.sharding.Mesh) -> Tree:
    """Return shapes and shardings of what `join` makes of arrays [1] with these dtypes."""
    whole = NamedSharding(mesh, P(REPLICA))
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct((mesh.shape[REPLICA],), a.dtype, sharding=whole), tree)


def _last_dim(a: Array, axis: str | None) -> Array:
    """Return `a` with its last dim split over a mesh axis, or whole."""
    return reshard(a, P(*jax.typeof(a).sharding.spec.partitions[:-1], axis))


def _with_replica_dim(a: jax.Array, other: Callable[[int], int]) -> tuple[int, ...]:
    """Return the shape of `a`, with another size of the dim that `replica` splits, if it splits one."""
    shape = list(a.shape)
    for dim, axes in enumerate(_sharding(a).spec.partitions):
        if axes == REPLICA or (isinstance(axes, tuple) and REPLICA in axes):
            shape[dim] = other(shape[dim])
    return tuple(shape)


def _as_on(mesh: jax.sharding.Mesh, a: jax.Array) -> NamedSharding:
    """Return how `a` lies, but on another mesh."""
    sharding = _sharding(a)
    return NamedSharding(mesh, sharding.spec, memory_kind=sharding.memory_kind)


def _sharding(a: jax.Array) -> NamedSharding:
    assert isinstance(a.sharding, NamedSharding)
    return a.sharding
