"""Where parameters lie, and the two moves between: data parallelism and the ZeRO stages (Rajbhandari et al. 2020).

In use a weight is whole over the data axis and typed `reduced` over the axes of the batch. That makes its gradient
`unreduced`: each device's own partial sum, which nothing may add up but `reduce`. So two collectives are all that
ever moves over `data`: `gather` (all-gather) before weights are used, `reduce` (reduce-scatter; or an all-reduce, where
nothing is sharded) after gradients are made. `replica` adds an all-reduce of the shard (hybrid sharding; at stage 0 it
is one all-reduce over both).

    stage   at rest, sharded over data     gather                reduce                   elements per parameter
    0       nothing                        -                     once per step            2
    1       masters and optimizer          once per step         once per step            2
    2       the same                       once per step         in each layer            2
    3       the same                       in each layer, twice  in each layer            3, or 2 of what is no layer

times (N-1)/N (section 7). From stage 2 on no device holds all gradients, from stage 3 on none holds all weights.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
from jax import P
from jax.sharding import reshard
from jaxtyping import Array, Float

from jaxdist.mesh import DATA
from jaxdist.parallel import heads, region
from jaxdist.sharding import LAYERS, Layout, wide

is_axes = lambda a: isinstance(a, tuple)


@dataclass(frozen=True)
class Placement:
    """Where one parameter lies between steps and in use."""

    rest: P
    use: P
    deal: tuple[int, int] = (0, 1)
    """(dim, n): its key/value heads are dealt to n times as many devices in use (`parallel.heads`)."""

    @property
    def layer(self) -> Placement:
        """That of one layer of a stack."""
        first = lambda spec: P(*spec.partitions[1:], unreduced=spec.unreduced, reduced=spec.reduced)
        return replace(self, rest=first(self.rest), use=first(self.use), deal=(self.deal[0] - 1, self.deal[1]))

    @property
    def dealt(self) -> bool:
        return self.deal[1] > 1

    @property
    def exchanged(self) -> bool:
        """Whether, of heads that are dealt, the model axis splits their size at rest."""
        return self.dealt and self.rest.partitions[self.deal[0] + 2] == self.use.partitions[self.deal[0]]

    @property
    def shard_dim(self) -> int | None:
        """The dim that the data axis splits at rest."""
        return self.rest.partitions.index(DATA) if DATA in self.rest.partitions else None

    def in_use(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape in use of a parameter of `shape`."""
        return heads.dealt(shape, *self.deal) if self.dealt else shape

    def gather(self, w: Float[Array, "..."]) -> Float[Array, "..."]:
        """Weights at rest -> weights in use. (The reshards move nothing.)"""
        if self.dealt:
            w = self._exchange(heads.deal(w, *self.deal))
        if self.shard_dim is None or self.use == self.rest:
            return reshard(w, self.use)
        shard = P(*self._shard.partitions, reduced=self.use.reduced - {DATA})
        whole = P(*self.use.partitions, reduced=self.use.reduced | {DATA})
        gather = partial(jax.lax.all_gather, axis_name=DATA, axis=self.shard_dim, tiled=True, to="reduced")
        return reshard(jax.shard_map(gather, in_specs=shard, out_specs=whole)(reshard(w, shard)), self.use)

    def reduce(self, g: Float[Array, "..."]) -> Float[Array, "..."]:
        """Partial sums of the gradient in use -> the gradient, lying as the parameter does at rest.

        A weight that is not `reduced` in use has a gradient that is added up already: each device keeps its part.
        """
        if self.shard_dim is None or not self.use.reduced:
            g = reshard(g, self._shard)
        else:
            g = jax.shard_map(self._reduce_scatter, in_specs=self._partial, out_specs=self._shard)(g)
        return heads.collect(self._exchange(g, back=True), *self.deal) if self.dealt else g

    def _exchange(self, w: jax.Array, back: bool = False) -> jax.Array:
        """Heads as they are dealt, from how the parameter lies at rest to each on its device; or back."""
        ends = (self._shard, self.rest) if back else (self.rest, self._shard)
        if not self.exchanged:
            return reshard(w, ends[1])
        return jax.shard_map(partial(self._all_to_all, back=back), in_specs=ends[0], out_specs=ends[1])(w)

    def _all_to_all(self, w: jax.Array, back: bool = False) -> jax.Array:
        """Parts of all heads -> all of a head, or back."""
        head, size = self.deal[0], self.deal[0] + 2
        split, joined = (size, head) if back else (head, size)
        return jax.lax.all_to_all(w, self._dealt_over, split_axis=split, concat_axis=joined, tiled=True)

    def _reduce_scatter(self, g: jax.Array) -> jax.Array:
        g = jax.lax.psum_scatter(g, DATA, scatter_dimension=self.shard_dim, tiled=True)
        others = tuple(sorted(self.use.reduced - {DATA}))
        return jax.lax.psum(g, others) if others else g

    def own(self, w: Float[Array, "..."]) -> Float[Array, "..."]:
        """`gather` inside a pipeline's region: this device's part at rest -> its part in use."""
        if self.dealt:  # first, so that data gathers only the heads that this device uses
            w = heads.deal(w, *self.deal)
            w = self._all_to_all(w) if self.exchanged else region.own(w, self._dealt_over, self.deal[0])
        if self.shard_dim is not None:
            w = jax.lax.all_gather(w, DATA, axis=self.shard_dim, tiled=True)
        return region.vary(w, self.use.reduced)

    def add_up(self, g: Float[Array, "..."]) -> Float[Array, "..."]:
        """`reduce` inside a pipeline's region: this device's partial sums in use -> its part of the sum at rest."""
        if self.shard_dim is not None:
            g = jax.lax.psum_scatter(g, DATA, scatter_dimension=self.shard_dim, tiled=True)
        g = region.add_up(g, sorted(self.use.reduced - {DATA} if self.shard_dim is not None else self.use.reduced))
        if self.exchanged:  # last, when a device has the least
            g = heads.collect(self._all_to_all(g, back=True), *self.deal)
        elif self.dealt:  # the copies of a key or a value are added up on the way
            g = heads.collect(region.placed(g, self._dealt_over, self.deal[0]), *self.deal)
            g = region.add_up(g, self._dealt_over)
        return g

    def land(self, w: Float[Array, "..."], sink: Float[Array, "..."]) -> Float[Array, "..."]:
        """Weights in use, as they are, in the sink's dtype; their gradient arrives, reduced, as that of `sink`.

        `sink` has the shape of the parameter and lies as it does at rest; its values are not read.
        """
        return _land(self, w, sink)

    def partial_sums(self, w: Float[Array, "..."]) -> Float[Array, "..."]:
        """Zeros to add the gradients of a weight in use to: f32 at least, each device its own."""
        return reshard(jnp.zeros(w.shape, wide(w.dtype)), self._partial)

    def sink(self, shape: tuple[int, ...], dtype: jnp.dtype) -> Float[Array, "..."]:
        """Zeros of the parameter's shape, lying as it does at rest; `dtype` is what gradients are added in."""
        return reshard(jnp.zeros(shape, dtype), self.rest)

    @property
    def _dealt_over(self) -> tuple[str, ...]:
        """The mesh axes that split heads in use."""
        axes = self.use.partitions[self.deal[0]]
        return (axes,) if isinstance(axes, str) else axes

    @property
    def _partial(self) -> P:
        return P(*self.use.partitions, unreduced=self.use.reduced)

    @property
    def _shard(self) -> P:
        """In use, but for the data axis."""
        split = list(self.use.partitions)
        if self.shard_dim is not None:
            split[self.shard_dim] = DATA
        return P(*split)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _land(placement: Placement, w: jax.Array, sink: jax.Array) -> jax.Array:
    return w.astype(sink.dtype)


_land.defvjp(
    lambda placement, w, sink: (w.astype(sink.dtype), None),
    lambda placement, _, g: (None, placement.reduce(g)),
)


def in_use(places, weights, sinks, stage: int):
    """Weights whole, gathered if stage 3 has not yet, and, where gradients are reduced as they are made, on the way to
    their sinks.

    They are cast where they are used, inside the loop over micro-batches, so that it adds gradients in f32.
    """
    if stage == 3:
        weights = jax.tree.map(lambda p, w: p.gather(w), places, weights)
    return weights if sinks is None else jax.tree.map(lambda p, w, s: p.land(w, s), places, weights, sinks)


def placements(layout: Layout, axes, abstract, stage: int, summed: bool = True, split=None, stacks: bool = False):
    """A `Placement` for every parameter, from its logical axes and shape.

    `summed`: gradients are partial sums of the devices, so weights in use are `reduced`. `split` says of every
    parameter whether the data axis may split it (None: of all). `stacks`: stacked layers are used as they lie at rest,
    by a module that gathers each when it is its turn.

    Where key/value heads are too few to be split as heads are, they are dealt out in use (`parallel.heads`), and at
    rest their size is split, if it can be; raises `ValueError` where heads cannot be dealt evenly.
    """
    split = jax.tree.map(lambda _: True, abstract) if split is None else split

    def place(a, w, split: bool) -> Placement:
        found = _place(layout, a, w.shape, bool(stage and split), summed)
        return replace(found, use=found.rest) if stacks and LAYERS in a else found

    return jax.tree.map(place, axes, abstract, split, is_leaf=is_axes)


def _place(
    layout: Layout, axes: tuple[str | None, ...], shape: tuple[int, ...], split: bool, summed: bool
) -> Placement:
    use, deal, tied = tuple("heads" if name == "kv_heads" else name for name in axes), (0, 1), ()
    rest = list(layout.spec(use).partitions)
    if "kv_heads" in axes:
        dim, parts = axes.index("kv_heads"), layout.parts("heads")
        if shape[dim] % parts and parts % shape[dim]:
            raise ValueError(f"{shape[dim]} key/value heads neither split nor repeat evenly over {parts} parts")
        if shape[dim] % parts:
            deal, tied = (dim, parts // shape[dim]), (dim + 1, dim + 2)
            rest[dim], rest[dim + 2] = None, None if shape[dim + 2] % parts else rest[dim]
    if split and (dim := _first_free(layout, use, shape, tied)) is not None:
        rest[dim] = DATA
    return Placement(P(*rest), layout.spec(use, reduced=layout.partial(axes) if summed else frozenset()), deal)


def _first_free(layout: Layout, axes: tuple[str | None, ...], shape: tuple[int, ...], tied: Collection[int]):
    """The first dim that the data axis can split, but for those that are `tied`: gathering along the first takes no
    transposed copy."""
    ways = layout.size(DATA)
    free = [d for d, name in enumerate(axes) if name != LAYERS and not layout.split(name) and d not in tied]
    return next((d for d in free if shape[d] % ways == 0), None) if ways > 1 else None
