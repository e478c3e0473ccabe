"""Move dealt key/value heads (`heads`) between where they lie at rest and in use.

At rest the model axis splits the size H of each head, if it divides it: an all-to-all makes whole heads of that, and
the parts again. Otherwise every device has all heads, and takes its own.
"""

from __future__ import annotations

from functools import partial

import jax
from jax import P
from jax.sharding import reshard

from jaxdist.parallel import heads, region
from jaxdist.parallel.placement import Placement
from jaxdist.sharding import axes_of


def exchange(place: Placement, w: jax.Array, source: P, target: P, back: bool) -> jax.Array:
    """Move dealt heads from `source` to `target`: by an all-to-all, or by a reshard where heads are whole."""
    if not place.exchanged:
        return reshard(w, target)
    return jax.shard_map(partial(_all_to_all, place, back), in_specs=source, out_specs=target)(w)


def take(place: Placement, w: jax.Array) -> jax.Array:
    """Return this device's heads, dealt, of its part at rest; in a manual region."""
    deal, axes = _deal_and_axes(place)
    w = heads.deal(w, deal)
    if place.exchanged:
        return _all_to_all(place, False, w)
    return region.own(w, axes, deal.dim)


def give_back(place: Placement, g: jax.Array) -> jax.Array:
    """Transpose `take`: the gradient of this device's heads -> that of its part at rest, summed over copies."""
    deal, axes = _deal_and_axes(place)
    if place.exchanged:
        return heads.collect(_all_to_all(place, True, g), deal)
    # The copies of a key or a value are summed on the way.
    g = region.placed(g, axes, deal.dim)
    g = heads.collect(g, deal)
    return region.add_up(g, axes)


def give_back_unchecked(place: Placement, g: jax.Array) -> jax.Array:
    """Do what `give_back` does where the types of values do not say over which axes they vary."""
    deal, axes = _deal_and_axes(place)
    if place.exchanged:
        g = _all_to_all(place, True, g)
    else:
        g = jax.lax.all_gather(g, axes, axis=deal.dim, tiled=True)
    return heads.collect(g, deal)


def _deal_and_axes(place: Placement) -> tuple[heads.HeadDeal, tuple[str, ...]]:
    """Return how heads are dealt, and the mesh axes that split them in use."""
    assert place.deal is not None
    return place.deal, axes_of(place.use.partitions[place.deal.dim])


def _all_to_all(place: Placement, back: bool, w: jax.Array) -> jax.Array:
    """Exchange a part of every head for the whole of this device's heads, or `back`."""
    deal, axes = _deal_and_axes(place)
    split, joined = deal.dim, deal.size_dim
    if back:
        split, joined = joined, split
    return jax.lax.all_to_all(w, axes, split_axis=split, concat_axis=joined, tiled=True)
