"""Data parallelism and FSDP: where parameters lie, and the collectives between (ZeRO, Rajbhandari et al. 2020).

In use, a weight is whole over the data axis and typed `reduced` over the axes of the batch. That makes its gradient
`unreduced`: each device holds its own partial sum, and only `reduce` may add them up. So two collectives are all that
ever moves over `data`: `gather` (all-gather) before weights are used, and `reduce` (reduce-scatter; or all-reduce,
where nothing is sharded) after gradients are made.

    stage   sharded over data at rest      gather                reduce                   elements per parameter
    0       nothing (DDP)                  -                     once per step            2
    1       masters and optimizer state    once per step         once per step            2
    2       the same                       once per step         in each layer            2
    3       the same (FSDP)                in each layer, twice  in each layer            3, or 2 outside of layers

The last column is multiplied by (N-1)/N (section 7). From stage 2 on no device holds all gradients, from stage 3 on
none holds all weights: stage 3 is fully sharded data parallelism. Hybrid sharding (HSDP) shards over `data` and
replicates over the mesh axis `replica`, which adds an all-reduce of each gradient shard; at stage 0 it is a single
all-reduce over both axes.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import P
from jax.sharding import reshard
from jaxtyping import Array, Float

from jaxdist.mesh import DATA
from jaxdist.parallel import heads, region
from jaxdist.parallel.heads import HeadDeal
from jaxdist.sharding import LAYERS, Layout, LogicalAxes, Params, wide

Placements = dict[str, Any]
"""A `Placement` for every parameter, nested as the parameters are."""


def is_axes(a: object) -> bool:
    """Return whether a node of a tree is the logical axes of one parameter, for `is_leaf`."""
    return isinstance(a, tuple)


@dataclass(frozen=True)
class Placement:
    """Where one parameter lies: `rest` between steps, `use` in the forward and backward pass."""

    rest: P
    use: P
    deal: HeadDeal | None = None
    """How its key/value heads are dealt in use; None where the heads of the mesh split them evenly."""

    @property
    def layer(self) -> Placement:
        """The placement of one layer of a stack."""
        deal = None if self.deal is None else self.deal.layer
        return replace(self, rest=_without_first_dim(self.rest), use=_without_first_dim(self.use), deal=deal)

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
        """The dim that the data axis splits at rest, or None.

        None means that every rank along data holds all of the parameter: at ZeRO 0, or where no dim divides.
        """
        if DATA not in self.rest.partitions:
            return None
        return self.rest.partitions.index(DATA)

    def in_use(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape in use of a parameter of `shape`.

        It differs from the shape at rest only where key and value heads are repeated for the ranks of the model axis.
        """
        if self.deal is None:
            return shape
        return heads.dealt(shape, self.deal.dim, self.deal.parts)

    def gather(self, w: Float[Array, "..."]) -> Float[Array, "..."]:
        """All-gather weights over data: at rest -> in use."""
        if self.deal is not None:
            w = heads.deal(w, self.deal.dim, self.deal.parts)
            w = self._exchange(w, self.rest, self._shard, back=False)
        if self.shard_dim is None or self.use == self.rest:
            return reshard(w, self.use)
        shard = P(*self._shard.partitions, reduced=self.use.reduced - {DATA})
        whole = P(*self.use.partitions, reduced=self.use.reduced | {DATA})
        # The all-gather is written out so that its result is `reduced` over data; the reshards move nothing.
        gather = partial(jax.lax.all_gather, axis_name=DATA, axis=self.shard_dim, tiled=True, to="reduced")
        return reshard(jax.shard_map(gather, in_specs=shard, out_specs=whole)(reshard(w, shard)), self.use)

    def gather_manual(self, w: Float[Array, "..."]) -> Float[Array, "..."]:
        """Do what `gather` does, inside a pipeline's region: this device's part at rest -> its part in use."""
        if self.deal is not None:
            # Deal before the all-gather over data, so that it gathers only the heads that this device uses.
            w = heads.deal(w, self.deal.dim, self.deal.parts)
            w = self._all_to_all(w, back=False) if self.exchanged else region.own(w, self._head_axes, self.deal.dim)
        if self.shard_dim is not None:
            w = jax.lax.all_gather(w, DATA, axis=self.shard_dim, tiled=True)
        return region.vary(w, self.use.reduced)

    def reduce(self, g: Float[Array, "..."]) -> Float[Array, "..."]:
        """Reduce-scatter gradients: partial sums in use -> the sum, which lies as the parameter does at rest.

        A weight that is not `reduced` in use has a gradient that is summed already: each device keeps its part.
        """
        if self.shard_dim is None or not self.use.reduced:
            g = reshard(g, self._shard)
        else:
            g = jax.shard_map(self._reduce_scatter, in_specs=self._partial, out_specs=self._shard)(g)
        if self.deal is None:
            return g
        g = self._exchange(g, self._shard, self.rest, back=True)
        return heads.collect(g, self.deal.dim, self.deal.parts)

    def reduce_manual(self, g: Float[Array, "..."]) -> Float[Array, "..."]:
        """Do what `reduce` does, inside a pipeline's region: partial sums in use -> this device's part at rest."""
        summed = self.use.reduced
        if self.shard_dim is not None:
            g = jax.lax.psum_scatter(g, DATA, scatter_dimension=self.shard_dim, tiled=True)
            summed = summed - {DATA}
        g = region.add_up(g, sorted(summed))
        if self.deal is None:
            return g
        # Heads come last, when a device has the least to send.
        if self.exchanged:
            return heads.collect(self._all_to_all(g, back=True), self.deal.dim, self.deal.parts)
        # The copies of a key or a value are summed on the way.
        g = region.placed(g, self._head_axes, self.deal.dim)
        g = heads.collect(g, self.deal.dim, self.deal.parts)
        return region.add_up(g, self._head_axes)

    def with_sink(self, w: Float[Array, "..."], sink: Float[Array, "..."]) -> Float[Array, "..."]:
        """Return the weights in use unchanged, in the dtype of `sink`, whose gradient is that of `w`, reduced.

        `sink` has the shape of the parameter and lies as it does at rest; its values are not read. Differentiating
        with respect to sinks instead of weights reduces each gradient at the point where it is made.
        """
        return _with_sink(self, w, sink)

    def partial_sums(self, w: Float[Array, "..."]) -> Float[Array, "..."]:
        """Return zeros for gradient accumulation of a weight in use: f32 at least, each device its own."""
        return reshard(jnp.zeros(w.shape, wide(w.dtype)), self._partial)

    def sink(self, shape: tuple[int, ...], dtype: jnp.dtype) -> Float[Array, "..."]:
        """Return zeros for gradient accumulation in `dtype`, lying as the parameter of `shape` does at rest."""
        return reshard(jnp.zeros(shape, dtype), self.rest)

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
        """Sum over data, keeping this device's shard; then all-reduce the shard over the other axes of the batch."""
        g = jax.lax.psum_scatter(g, DATA, scatter_dimension=self.shard_dim, tiled=True)
        others = tuple(sorted(self.use.reduced - {DATA}))
        if not others:
            return g
        return jax.lax.psum(g, others)

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
        """The spec in use, but split over data as at rest."""
        split = list(self.use.partitions)
        if self.shard_dim is not None:
            split[self.shard_dim] = DATA
        return P(*split)


def _without_first_dim(spec: P) -> P:
    return P(*spec.partitions[1:], unreduced=spec.unreduced, reduced=spec.reduced)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _with_sink(placement: Placement, w: jax.Array, sink: jax.Array) -> jax.Array:
    return w.astype(sink.dtype)


def _with_sink_forward(placement: Placement, w: jax.Array, sink: jax.Array) -> tuple[jax.Array, None]:
    return w.astype(sink.dtype), None


def _with_sink_backward(placement: Placement, _: None, g: jax.Array) -> tuple[None, jax.Array]:
    return None, placement.reduce(g)


_with_sink.defvjp(_with_sink_forward, _with_sink_backward)


def in_use(places: Placements, weights: Params, sinks: Params | None, stage: int) -> Params:
    """Gather weights that are not whole yet (stage 3), and connect them to the sinks of their gradients.

    Without `sinks` (None), gradients are not reduced where they are made.
    """
    # Weights are cast where they are used, inside the loop over micro-batches, so that gradients accumulate in f32.
    if stage == 3:
        weights = jax.tree.map(lambda p, w: p.gather(w), places, weights)
    if sinks is None:
        return weights
    return jax.tree.map(lambda p, w, s: p.with_sink(w, s), places, weights, sinks)


def placements(
    layout: Layout,
    axes: Params,
    abstract: Params,
    stage: int,
    summed: bool = True,
    split: Params | None = None,
    stacks: bool = False,
) -> Placements:
    """Return a `Placement` for every parameter, from its logical axes and shape.

    `summed`: gradients are partial sums of the devices, so weights in use are `reduced`. `split` holds for every
    parameter whether the data axis may split it (None: it may split all). `stacks`: stacked layers are used as they lie
    at rest, by a module that gathers each layer when it is its turn.

    Where key/value heads are too few to be split as the query heads are, they are dealt out in use (`parallel.heads`),
    and at rest their size is split, if the mesh divides it. Raises `ValueError` where heads cannot be dealt evenly.
    """
    if split is None:
        split = jax.tree.map(lambda _: True, abstract)

    def place(names: LogicalAxes, parameter: jax.ShapeDtypeStruct, may_split: bool) -> Placement:
        sharded = bool(stage and may_split)
        placement = _place(layout, names, parameter.shape, sharded, summed)
        if stacks and LAYERS in names:
            return replace(placement, use=placement.rest)
        return placement

    return jax.tree.map(place, axes, abstract, split, is_leaf=is_axes)


def _place(layout: Layout, axes: LogicalAxes, shape: tuple[int, ...], sharded: bool, summed: bool) -> Placement:
    # Key/value heads are split over the same mesh axes as the query heads that they serve.
    axes_in_use = tuple("heads" if name == "kv_heads" else name for name in axes)
    rest = list(layout.spec(axes_in_use).partitions)
    deal = _head_deal(layout, axes, shape)
    taken: tuple[int, ...] = ()
    if deal is not None:
        head_dim = deal.dim
        size_dim = deal.dim + 2
        divides = shape[size_dim] % layout.parts("heads") == 0
        rest[size_dim] = rest[head_dim] if divides else None
        rest[head_dim] = None
        # Dealing heads, or exchanging them by an all-to-all, needs these dims whole over data.
        taken = (head_dim + 1, size_dim)
    if sharded:
        shard_dim = _first_free_dim(layout, axes_in_use, shape, taken)
        if shard_dim is not None:
            rest[shard_dim] = DATA
    reduced = layout.partial(axes) if summed else frozenset()
    return Placement(P(*rest), layout.spec(axes_in_use, reduced=reduced), deal)


def _head_deal(layout: Layout, axes: LogicalAxes, shape: tuple[int, ...]) -> HeadDeal | None:
    """Return how key/value heads are dealt; None for a parameter that has none, or has enough to split."""
    if "kv_heads" not in axes:
        return None
    dim = axes.index("kv_heads")
    count = shape[dim]
    parts = layout.parts("heads")
    if count % parts == 0:
        return None
    if parts % count:
        raise ValueError(f"{count} key/value heads neither split nor repeat evenly over {parts} parts")
    return HeadDeal(dim, parts // count)


def _first_free_dim(layout: Layout, axes: LogicalAxes, shape: tuple[int, ...], taken: Collection[int]) -> int | None:
    """Return the first dim that the data axis can split and that is not `taken`, or None."""
    ways = layout.size(DATA)
    if ways == 1:
        return None
    # The first one, because an all-gather along the first dim takes no transposed copy.
    for dim, name in enumerate(axes):
        free = name != LAYERS and not layout.split(name) and dim not in taken
        if free and shape[dim] % ways == 0:
            return dim
    return None
