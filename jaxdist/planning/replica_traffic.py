"""Predict what crosses the replicas: sums of gradients, by a rule of `parallel.crossing`, and weights."""

from __future__ import annotations

from collections.abc import Iterator

from jaxdist.config import Config
from jaxdist.mesh import REPLICA
from jaxdist.parallel.crossing import crossing_of
from jaxdist.planning.parameter_layout import Placed
from jaxdist.planning.predicted_collectives import ALL_GATHER, F32, REDUCE_SCATTER, Transfer, transfer
from jaxdist.sharding import Layout

BETWEEN_REPLICAS = "gradients between replicas"
"""`Transfer.what` of the sums over the replicas."""

SECOND_FACTORS = "second factors between replicas"
"""`Transfer.what` of the sums that powersgd can begin only when it has those of the first factors."""


def between_replicas(config: Config, p: Placed, layout: Layout) -> Iterator[Transfer]:
    """Yield the transfers that sum a parameter's gradient over the replicas, and give all of them its new value.

    They run once per step, on what a device has of the parameter. A frozen one that the replicas split is gathered.
    """
    place = p.place
    if not place.deferred:
        return
    if place.replica_dim is not None:
        if p.trained:
            yield transfer(layout, BETWEEN_REPLICAS, REDUCE_SCATTER, place.deferred, 1, p.rest, F32)
        yield transfer(layout, "weights between replicas", ALL_GATHER, place.deferred, 1, p.rest, p.width(config))
        return
    if not p.trained:
        return
    for one in crossing_of(config, layout.size(REPLICA)).messages(p.shard, place.role.stacked):
        what = SECOND_FACTORS if one.waits else BETWEEN_REPLICAS
        yield transfer(layout, what, one.kind, {REPLICA}, 1, one.elements, one.width)
    if place.crossing_dim is not None:
        yield transfer(layout, "summed gradients", ALL_GATHER, place.group, 1, p.rest, F32)
