"""Data parallelism and FSDP: where parameters lie, and the collectives between (ZeRO, Rajbhandari et al. 2020).

In use, a weight is whole over its ZeRO group and typed `reduced` over the axes that split tokens. The group
(`Placement.over`) is all of `ZERO_AXES` that do not split the weight: mostly `data`, the name for all of them here. The
gradient is `unreduced`: each device holds its own partial sum, and only `reduce` may add them up. Only `gather`
(all-gather), before weights are used, and `reduce` (reduce-scatter or all-reduce) of gradients send them over `data`.

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

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import P
from jax.sharding import reshard
from jaxtyping import Array, Float

from jaxdist.mesh import REPLICA
from jaxdist.parallel import heads, region
from jaxdist.parallel.heads import HeadDeal
from jaxdist.parallel.partial_trees import joined, part_of, selected
from jaxdist.parallel.sink import with_sink
from jaxdist.sharding import Params, axes_of, partition, wide

Placements = dict[str, Any]
"""A `Placement` for every parameter, nested as the parameters are."""


@dataclass(frozen=True)
class Placement:
    """Where one parameter lies: `rest` in each replica, and `use` in the forward and backward pass.

    Between steps it lies as `held` says: as at rest, or split over the replicas too.
    """

    rest: P
    use: P
    over: tuple[str, ...] = ()
    """Its ZeRO group, outermost first: the axes over which ZeRO shards it, if a dim divides. None splits it in use."""
    deal: HeadDeal | None = None
    """How its key/value heads are dealt in use; None where the heads of the mesh split them evenly."""
    deferred: frozenset[str] = frozenset()
    """Axes over which `reduce` leaves partial sums, for `cross` to add up: `replica`, or none."""
    replica_dim: int | None = None
    """The dim that `replica` splits between steps; None where each replica holds the parameter."""
    crossing_dim: int | None = None
    """The dim that `over` splits while a gradient crosses `replica`, where nothing is sharded at rest (stage 0)."""
    stacked: int = 0
    """How many leading dims count layers."""
    steered: bool = False
    """Whether a rule of the model moves it, in the place of a gradient: it has no optimizer state."""
    trained: bool = True
    """Whether it is trained; a frozen one has no gradient and no optimizer state, and lies as it would if trained."""

    @property
    def differentiated(self) -> bool:
        """Whether it has a gradient."""
        return self.trained and not self.steered

    @property
    def layer(self) -> Placement:
        """The placement of one layer of a stack."""
        deal = None if self.deal is None else self.deal.layer
        crossing_dim = None if self.crossing_dim is None else self.crossing_dim - 1
        return replace(
            self,
            rest=_without_first_dim(self.rest),
            use=_without_first_dim(self.use),
            deal=deal,
            # Between steps, and over the replicas, layers move as one stack.
            replica_dim=None,
            crossing_dim=crossing_dim,
            stacked=self.stacked - 1,
        )

    @property
    def held(self) -> P:
        """How the parameter and its optimizer state lie between steps."""
        if self.replica_dim is None:
            return self.rest
        # The replicas come last, so that gathering their parts makes one rank's shard.
        return _split_further(self.rest, self.replica_dim, (REPLICA,))

    @property
    def reduced(self) -> P:
        """How a gradient lies between `reduce` and `cross`: as at rest, and where deferred as partial sums."""
        return P(*self._scattered(self.rest).partitions, unreduced=self.deferred)

    @property
    def dealt(self) -> bool:
        """Whether key/value heads are dealt in use (`parallel.heads`)."""
        return self.deal is not None

    @property
    def exchanged(self) -> bool:
        """Whether an all-to-all deals the heads: at rest, the model axis splits the size of each head."""
        if self.deal is None:
            return False
        return self.rest.partitions[self._head_size_dim] == self.use.partitions[self.deal.dim]

    @property
    def shard_dim(self) -> int | None:
        """The dim that `over` splits at rest, or None.

        None means that every rank of the group holds all of the parameter: at ZeRO 0, or where no dim divides.
        """
        if not self.over:
            return None
        # Inside of an axis that splits the dim in use, as `expert` does: a shard is a part of what a rank uses.
        inside = [axes_of(part)[-len(self.over) :] for part in self.rest.partitions]
        return inside.index(self.over) if self.over in inside else None

    def in_use(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape in use of a parameter of `shape`.

        It differs from the shape at rest only where key and value heads are repeated for the ranks of the model axis.
        """
        if self.deal is None:
            return shape
        return heads.dealt(shape, self.deal)

    def gather(self, w: Float[Array, "..."]) -> Float[Array, "..."]:
        """All-gather weights over their group: at rest -> in use."""
        if self.deal is not None:
            w = heads.deal(w, self.deal)
            w = self._exchange(w, self.rest, self._shard, back=False)
        if self.shard_dim is None or self.use == self.rest:
            return reshard(w, self.use)
        shard = P(*self._shard.partitions, reduced=self.use.reduced - set(self.over))
        whole = P(*self.use.partitions, reduced=self.use.reduced | set(self.over))
        # The all-gather is written out so that its result is `reduced` over the group; the reshards move nothing.
        gather = partial(jax.lax.all_gather, axis_name=self.over, axis=self.shard_dim, tiled=True, to="reduced")
        return reshard(jax.shard_map(gather, in_specs=shard, out_specs=whole)(reshard(w, shard)), self.use)

    def gather_manual(self, w: Float[Array, "..."]) -> Float[Array, "..."]:
        """Do what `gather` does, inside a pipeline's region: this device's part at rest -> its part in use."""
        if self.deal is not None:
            # Deal before the all-gather over the group, so that it gathers only the heads that this device uses.
            w = heads.deal(w, self.deal)
            w = self._all_to_all(w, back=False) if self.exchanged else region.own(w, self._head_axes, self.deal.dim)
        if self.shard_dim is not None:
            w = jax.lax.all_gather(w, self.over, axis=self.shard_dim, tiled=True)
        return region.vary(w, self.use.reduced)

    def reduce(self, g: Float[Array, "..."]) -> Float[Array, "..."]:
        """Reduce-scatter gradients: partial sums in use -> as `reduced` says; the sum, unless it is deferred.

        A weight that is not `reduced` in use has a gradient that is summed already: each device keeps its part.
        """
        if self.deal is not None and self.deferred:
            # JAX has no rule for moving partial sums: unchecked, each device moves its own.
            return jax.shard_map(self._reduce_dealt, in_specs=self._partial, out_specs=self.reduced, check_vma=False)(g)
        source = self._partial
        target = P(*self._scattered(self.use).partitions, unreduced=self.deferred)
        if not self.use.reduced or (self.scatter_dim is None and not self.deferred):
            g = reshard(g, target)
        elif source != target:
            g = jax.shard_map(self._reduce_scatter, in_specs=source, out_specs=target)(g)
        if self.deal is None:
            return g
        g = self._exchange(g, self._shard, self.rest, back=True)
        return heads.collect(g, self.deal)

    def cross(self, g: Float[Array, "..."]) -> Float[Array, "..."]:
        """Add up the replicas' partial sums: what `reduce` returns -> the sum, which lies as `held` says."""
        if not self.deferred:
            return g
        if self.crossing_dim is None:
            return jax.shard_map(self._add_replicas, in_specs=self.reduced, out_specs=self.held)(g)

        def add(g: jax.Array) -> jax.Array:
            g = jax.lax.psum(g, REPLICA)
            return jax.lax.all_gather(g, self.over, axis=self.crossing_dim, tiled=True, to="reduced")

        whole = P(*self.rest.partitions, reduced=frozenset(self.over))
        return reshard(jax.shard_map(add, in_specs=self.reduced, out_specs=whole)(g), self.rest)

    def gather_replicas(self, w: Float[Array, "..."]) -> Float[Array, "..."]:
        """All-gather weights over the replicas: as `held` between steps -> at rest in each replica."""
        if self.replica_dim is None:
            return w
        whole = P(*self.rest.partitions, reduced={REPLICA})
        gather = partial(jax.lax.all_gather, axis_name=REPLICA, axis=self.replica_dim, tiled=True, to="reduced")
        return reshard(jax.shard_map(gather, in_specs=self.held, out_specs=whole)(w), self.rest)

    def reduce_manual(self, g: Float[Array, "..."]) -> Float[Array, "..."]:
        """Do what `reduce` does, inside a pipeline's region: partial sums in use -> this device's part, reduced."""
        summed = self.use.reduced - self.deferred
        if self.scatter_dim is not None:
            g = jax.lax.psum_scatter(g, self.over, scatter_dimension=self.scatter_dim, tiled=True)
            summed = summed - set(self.over)
        g = region.add_up(g, sorted(summed))
        if self.deal is None:
            return g
        # Heads come last, when a device has the least to send.
        if self.exchanged:
            return heads.collect(self._all_to_all(g, back=True), self.deal)
        # The copies of a key or a value are summed on the way.
        g = region.placed(g, self._head_axes, self.deal.dim)
        g = heads.collect(g, self.deal)
        return region.add_up(g, self._head_axes)

    def deferred_manual(self, g: Float[Array, "..."]) -> Float[Array, "..."]:
        """Type what `reduce_manual` returns as partial sums, to leave the region as `reduced` says."""
        return region.partial_sum(g, self.deferred)

    def with_sink(self, w: Float[Array, "..."], sink: Float[Array, "..."]) -> Float[Array, "..."]:
        """Return the weights in use unchanged, in the dtype of `sink`, whose gradient is that of `w`, reduced.

        `sink` has the shape of the parameter and lies as it does at rest; its values are not read. Differentiating
        with respect to sinks instead of weights reduces each gradient at the point where it is made.
        """
        return with_sink(self.reduce, w, sink)

    def partial_sums(self, w: Float[Array, "..."]) -> Float[Array, "..."]:
        """Return zeros for gradient accumulation of a weight in use: f32 at least, each device its own."""
        return reshard(jnp.zeros(w.shape, wide(w.dtype)), self._partial)

    def sink(self, shape: tuple[int, ...], dtype: jnp.dtype) -> Float[Array, "..."]:
        """Return zeros in `dtype` for `with_sink`: their gradient, as `reduce` returns it, is that of a weight."""
        return reshard(jnp.zeros(shape, dtype), P(*self.reduced.partitions, reduced=self.deferred))

    def reduced_sums(self, shape: tuple[int, ...], dtype: jnp.dtype) -> Float[Array, "..."]:
        """Return zeros to accumulate what `reduce` returns for a parameter of `shape`."""
        return reshard(jnp.zeros(shape, dtype), self.reduced)

    def _reduce_dealt(self, g: jax.Array) -> jax.Array:
        """Do what `reduce` does for dealt heads, on one device."""
        assert self.deal is not None
        g = self._reduce_scatter(g)
        if self.exchanged:
            g = self._all_to_all(g, back=True)
        else:
            g = jax.lax.all_gather(g, self._head_axes, axis=self.deal.dim, tiled=True)
        return heads.collect(g, self.deal)

    def _exchange(self, w: jax.Array, source: P, target: P, back: bool) -> jax.Array:
        """Move dealt heads from `source` to `target`: by an all-to-all, or by a reshard where heads are whole."""
        if not self.exchanged:
            return reshard(w, target)
        return jax.shard_map(partial(self._all_to_all, back=back), in_specs=source, out_specs=target)(w)

    def _all_to_all(self, w: jax.Array, back: bool) -> jax.Array:
        """Exchange a part of every head for the whole of this device's heads, or `back`."""
        split = self._head_dim
        joined = self._head_size_dim
        if back:
            split, joined = joined, split
        return jax.lax.all_to_all(w, self._head_axes, split_axis=split, concat_axis=joined, tiled=True)

    def _reduce_scatter(self, g: jax.Array) -> jax.Array:
        """Sum over the group, keeping this device's shard; then all-reduce it over the other axes that do not wait."""
        summed = self.use.reduced - self.deferred
        if self.scatter_dim is not None:
            g = jax.lax.psum_scatter(g, self.over, scatter_dimension=self.scatter_dim, tiled=True)
            summed = summed - set(self.over)
        if not summed:
            return g
        return jax.lax.psum(g, tuple(sorted(summed)))

    def _add_replicas(self, g: jax.Array) -> jax.Array:
        """Sum over the replicas; where `replica` splits the parameter, keep this device's part."""
        if self.replica_dim is None:
            return jax.lax.psum(g, REPLICA)
        return jax.lax.psum_scatter(g, REPLICA, scatter_dimension=self.replica_dim, tiled=True)

    @property
    def scatter_dim(self) -> int | None:
        """The dim along which the group scatters a gradient; None where it is all-reduced over the group."""
        return self.crossing_dim if self.shard_dim is None else self.shard_dim

    def _scattered(self, spec: P) -> P:
        """Return `spec`, which is that at rest or in use, split over the group as gradients are after `reduce`."""
        if self.scatter_dim is None or (self.shard_dim is not None and spec == self.rest):
            return P(*spec.partitions)
        return _split_further(spec, self.scatter_dim, self.over)

    @property
    def _head_dim(self) -> int:
        """The dim of K, in [..., K, G + 2, H]; for a parameter whose heads are dealt."""
        assert self.deal is not None
        return self.deal.dim

    @property
    def _head_size_dim(self) -> int:
        """The dim of H, in [..., K, G + 2, H]."""
        return self._head_dim + 2

    @property
    def _head_axes(self) -> tuple[str, ...]:
        """The mesh axes that split heads in use."""
        axes = self.use.partitions[self._head_dim]
        return (axes,) if isinstance(axes, str) else axes

    @property
    def _partial(self) -> P:
        """The spec of a gradient in use: every device has its own partial sum."""
        return P(*self.use.partitions, unreduced=self.use.reduced)

    @property
    def _shard(self) -> P:
        """The spec in use, but split over the group as at rest."""
        if self.shard_dim is None:
            return P(*self.use.partitions)
        return _split_further(self.use, self.shard_dim, self.over)


def _split_further(spec: P, dim: int, axes: tuple[str, ...]) -> P:
    """Return `spec` with `dim` split over `axes` too, inside of the axes that split it already."""
    split = list(spec.partitions)
    split[dim] = partition((*axes_of(split[dim]), *axes))
    return P(*split)


def _without_first_dim(spec: P) -> P:
    return P(*spec.partitions[1:], unreduced=spec.unreduced, reduced=spec.reduced)


def in_use(places: Placements, weights: Params, sinks: Params | None, stage: int) -> Params:
    """Gather weights that are not whole yet (stage 3), and connect them to the sinks of their gradients.

    Without `sinks` (None), gradients are not reduced where they are made.
    """
    # Weights are cast where they are used, inside the loop over micro-batches, so that gradients accumulate in f32.
    if stage == 3:
        weights = jax.tree.map(lambda p, w: p.gather(w), places, weights)
    if sinks is None:
        return weights
    those = part_of(places, sinks), part_of(weights, sinks), sinks
    return joined(weights, jax.tree.map(lambda p, w, s: p.with_sink(w, s), *those))


def trained(places: Placements, tree: Params) -> Params:
    """Return the leaves of `tree`, which is nested as `places` are, that belong to trained parameters."""
    return part_of(tree, selected(places, lambda place: place.trained))


def differentiated(places: Placements, tree: Params) -> Params:
    """Return the leaves of `tree`, which is nested as `places` are, that belong to parameters with a gradient."""
    return part_of(tree, selected(places, lambda place: place.differentiated))
