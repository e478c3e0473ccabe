"""Predict how long the transfers of a step take on a cluster, and how long those that cross sites take.

A transfer over axes whose groups lie in several sites is priced by the link between sites (`collective_time`): a rule
that sends fewer bytes over `replica` is a smaller transfer in what `communication` predicts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import lru_cache, reduce
from math import prod

import numpy as np

from jaxdist.mesh import REPLICA, axes_across, device_numbers
from jaxdist.mesh.crossing import CrossingTraits
from jaxdist.planning import collective_time
from jaxdist.planning.clusters import Cluster
from jaxdist.planning.collective_time import Group, group_over
from jaxdist.planning.predicted_collectives import ALL_TO_ALL, Numbers, Transfer


def merge_calls(transfers: Iterable[Transfer]) -> list[Transfer]:
    """Merge transfers that the compiler sends in one call: same purpose, same axes, same time.

    XLA combines collectives of any kind but all-to-all, of which each parameter has its own.
    """
    alike: dict[tuple, list[Transfer]] = {}
    for transfer in transfers:
        key = (transfer.axes, transfer.kind, transfer.what, transfer.width)
        alike.setdefault(key, []).append(transfer)
    return [one if not others else _merged([one, *others]) for one, *others in alike.values()]


def _merged(transfers: list[Transfer]) -> Transfer:
    """Return transfers of one kind as one."""
    first = transfers[0]
    all_calls = [transfer.calls for transfer in transfers]
    calls = sum(all_calls) if first.kind == ALL_TO_ALL else reduce(np.maximum, all_calls)
    return replace(first, calls=calls, elements=sum(transfer.elements for transfer in transfers))


def seconds(transfer: Transfer, shape: Mapping[str, Numbers], cluster: Cluster) -> Numbers:
    """Return the seconds that all calls of a transfer take; sizes may be arrays, of meshes of equally many devices."""
    return seconds_in(group_over(shape, transfer.axes, cluster), transfer)


def seconds_over_axes(
    transfers: Iterable[Transfer], shape: Mapping[str, int], cluster: Cluster | None
) -> dict[str, float]:
    """Return the seconds of transfers over each set of axes, such as `replica+data` for both at once.

    There are none where the cluster is not known.
    """
    found: defaultdict[str, float] = defaultdict(float)
    if cluster is None:
        return found
    for transfer in merge_calls(transfers):
        found["+".join(transfer.axes)] += float(seconds(transfer, shape, cluster))
    return dict(found)


def seconds_in(group: Group, transfer: Transfer) -> Numbers:
    """Return the seconds that all calls of a transfer take in its group."""
    # A transfer that some of the meshes do not make has no size.
    size = transfer.payload_bytes / np.maximum(transfer.calls, 1)
    if np.ndim(size) or np.ndim(group.inside):
        return transfer.calls * collective_time.seconds_of(transfer.kind, size, group)
    in_site = int(group.here)
    each = _seconds_of_call(transfer.kind, float(size), int(group.ranks), int(group.inside), group.cluster, in_site)
    return transfer.calls * each


# The candidates of a search share most of their calls.
@lru_cache(maxsize=4096)
def _seconds_of_call(kind: str, size: float, ranks: int, inside: int, cluster: Cluster, in_site: int) -> float:
    return float(collective_time.seconds(kind, size, ranks, inside, cluster, in_site))


def misplaced(shape: Mapping[str, int], cluster: Cluster) -> list[str]:
    """Return the axes other than `replica` that span sites of a cluster whose devices a mesh of `shape` fills in order.

    Their collectives run several times in a step, or in every layer.
    """
    numbers = device_numbers(shape, cluster.sites(prod(shape.values())))
    return [axis for axis in axes_across(numbers // cluster.per_site) if axis != REPLICA]


def warnings(
    shape: Mapping[str, int],
    transfers: Iterable[Transfer],
    cluster: Cluster,
    rule: CrossingTraits,
    outer: Iterable[Transfer] = (),
) -> list[str]:
    """Return a sentence for each axis other than `replica` that spans sites of `cluster`, with what it costs.

    `transfers` are those of a step, `outer` those of the outer step that ends each round of local steps.
    """
    transfers = list(transfers)
    outer = list(outer)
    costs = {
        f"over the link of {cluster.name}": cluster,
        "within one site": replace(cluster, hosts_per_site=0, between=None),
    }
    sites = cluster.sites(prod(shape.values()))
    return [warning(axis, shape, sites, transfers, costs, rule, outer) for axis in misplaced(shape, cluster)]


def warning(
    axis: str,
    shape: Mapping[str, int],
    sites: int,
    transfers: Iterable[Transfer],
    costs: Mapping[str, Cluster],
    rule: CrossingTraits,
    outer: Iterable[Transfer] = (),
) -> str:
    """Return a sentence about an axis other than `replica` that spans sites, with what its collectives cost.

    `costs` has the clusters for which they are predicted, by where that is, such as `within one site`. Those of an
    outer step are divided among the local steps of its round.
    """
    over = [transfer for transfer in merge_calls(transfers) if axis in transfer.axes]
    over_outer = [transfer for transfer in merge_calls(outer) if axis in transfer.axes]
    predicted = []
    for where, cluster in costs.items():
        took = sum(seconds(transfer, shape, cluster) for transfer in over)
        took += sum(seconds(transfer, shape, cluster) for transfer in over_outer) / rule.every
        predicted.append(f"{took:.3g} s of a step {where}")
    text = f": its collectives take {', '.join(predicted)}" if over or over_outer else ""
    return (
        f"{axis}={shape[axis]} spans {sites} sites{text}; where {REPLICA} is a multiple of {sites} and the other axes "
        f"fit into a site, {rule.crosses}"
    )
