"""Predict what crosses the replicas: sums of gradients, by a rule of `parallel.crossing`, and weights."""

from __future__ import annotations

import math
from collections.abc import Iterator

from jaxdist.config import Config
from jaxdist.mesh import REPLICA
from jaxdist.parallel.crossing.compressed import (
    BLOCK,
    LARGEST_OF,
    PLACED,
    SCALE,
    Compression,
    compression,
    matrix,
    padded,
)
from jaxdist.planning.parameter_layout import Placed
from jaxdist.planning.predicted_collectives import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    F32,
    REDUCE_SCATTER,
    Transfer,
    transfer,
)
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
    yield from _summed(compression(config.parallel), p, layout)
    if place.crossing_dim is not None:
        yield transfer(layout, "summed gradients", ALL_GATHER, place.over, 1, p.rest, F32)


def _summed(rule: Compression | None, p: Placed, layout: Layout) -> Iterator[Transfer]:
    """Yield the transfers that sum a gradient over the replicas, by a rule of `parallel.gradient_compression`."""
    replicas = layout.size(REPLICA)
    stacked = p.place.stacked
    size = math.prod(p.shard)

    def moved(kind: str, elements: int, width: int, what: str = BETWEEN_REPLICAS) -> Transfer:
        return transfer(layout, what, kind, {REPLICA}, 1, elements, width)

    if rule is None or not rule.compresses(p.shard, stacked, replicas):
        yield moved(ALL_REDUCE, size, F32)
        return
    if rule.rule == "powersgd":
        layers = math.prod(p.shard[:stacked])
        rows, columns = matrix(p.shard[stacked:])
        yield moved(ALL_REDUCE, layers * rows * rule.rank, F32)
        yield moved(ALL_REDUCE, layers * columns * rule.rank, F32, SECOND_FACTORS)
        return
    numbers = padded(size, replicas)
    if rule.rule == "bfloat16":
        coded = 2 * numbers
    else:
        coded = numbers // BLOCK * (BLOCK + SCALE)
    # As INT8: one shot between two replicas, two shots among more.
    for kind in (ALL_REDUCE,) if replicas == 2 else (ALL_TO_ALL, ALL_GATHER):
        yield moved(kind, coded, 1)
    if rule.rule == "topk-int8":
        blocks = -(-size // LARGEST_OF)
        yield moved(ALL_GATHER, replicas * blocks * PLACED * rule.largest, 2)
