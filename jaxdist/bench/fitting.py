"""Turn measured times into the numbers of a cluster: latency and bandwidth of each collective, then of each link."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import ceil
from typing import Any

import numpy as np

from jaxdist.output.units import counted
from jaxdist.planning.clusters import Cluster, Link, of_kind
from jaxdist.planning.collective_time import START
from jaxdist.planning.predicted_collectives import ALL_REDUCE, PERMUTE, wire_share

ALIKE = 0.8
"""Share of a bandwidth: a measured one above this share may be the same."""


def fit(kind: str, ranks: int, sizes: Sequence[int], took: Sequence[float]) -> tuple[float, float, float]:
    """Fit t = alpha + share x bytes / bandwidth; returns (alpha, bandwidth, error) in seconds and bytes per second.

    Least squares of the relative error of each time, so that the short ones count too; alpha is not negative. The
    error returned is the root mean square of the relative errors.
    """
    took = np.asarray(took)
    sent = float(wire_share(kind, ranks)) * np.asarray(sizes)
    # Both sides of the equation are divided by the time, so that all times weigh the same.
    columns = np.stack([1 / took, sent / took], axis=1)
    alpha, inverse = np.linalg.lstsq(columns, np.ones(len(took)), rcond=None)[0]
    if alpha < 0 or inverse <= 0:
        # The best line without a latency.
        alpha = 0.0
        inverse = columns[:, 1].sum() / (columns[:, 1] ** 2).sum()
    error = np.sqrt(np.mean((columns @ [alpha, inverse] - 1) ** 2))
    return float(alpha), float(1 / inverse), float(error)


def where(measured: Mapping[str, Any]) -> str:
    """Return what was measured, and with which mesh and version of JAX."""
    return (
        f"{measured['devices']} x {measured['device']} on {counted(measured['hosts'], 'host')}, {measured['mesh']}, "
        f"jax {measured['jax']}"
    )


def cluster_of(measured: Mapping[str, Any], name: str) -> tuple[Cluster, list[str]]:
    """Return the cluster that `calibration.measure` measured, and a sentence on each number that it did not."""
    shipped = of_kind(measured["device"])
    rate = max(one["flops_per_second"] for one in measured["matmuls"])
    notes = []
    peak = rate
    if shipped is not None:
        peak = shipped.peak
    else:
        notes.append(f"the peak of '{measured['device']}' is not known: the fastest matmul stands for it, matmul is 1")
    memory, memory_notes = _memory(measured, shipped)
    inside, across, link_notes = _links(measured["collectives"], shipped)
    cluster = Cluster(
        name=name,
        gpu=measured["device"] if shipped is None else shipped.gpu,
        per_host=measured["per_host"],
        memory=float(memory),
        peak=peak,
        matmul=min(rate / peak, 1.0),
        bandwidth=measured["copy_bytes_per_second"],
        inside=inside,
        across=across,
        overlap=measured["overlap"],
        sources=(f"measured by python -m jaxdist.bench collectives: {where(measured)}",),
    )
    return cluster, notes + memory_notes + link_notes


def _memory(measured: Mapping[str, Any], shipped: Cluster | None) -> tuple[float, list[str]]:
    """Return the bytes of memory of a device (0 where nothing is known), and notes."""
    notes = []
    memory = measured["memory_bytes"]
    if not memory:
        memory = 0 if shipped is None else shipped.memory
    if not memory:
        notes.append("the device does not report its memory; set memory, in bytes")
    if measured["virtual_devices"]:
        notes.append("memory is the memory of the machine divided by its devices")
    return memory, notes


def _links(rows: Sequence[Mapping[str, Any]], shipped: Cluster | None) -> tuple[Link, Link, list[str]]:
    """Return the links inside a host and across hosts, and a note for one that was not measured.

    One that was not measured is that of the shipped cluster with the same GPU, or else the other link.
    """
    near = [row for row in rows if row["ranks_inside"] == row["ranks"]]
    far = [row for row in rows if row["ranks_inside"] < row["ranks"]]
    inside = _link(near, None)
    if inside is not None:
        inside = replace(inside, **_without_switch(near))
    across = _link(far, inside)
    measured = across or inside
    source = "the other link" if shipped is None else shipped.name
    notes = []
    if inside is None:
        inside = measured if shipped is None else shipped.inside
        notes.append(f"inside was not measured: taken from {source}")
    if across is None:
        across = measured if shipped is None else shipped.across
        notes.append(f"across was not measured: taken from {source}")
    return inside, across, notes


def _without_switch(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return both bandwidths of links inside a host that has no switch, else an empty dict.

    Without a switch, two GPUs reach less than `ALIKE` of the bandwidth that larger groups reach.
    """
    # A permute sends from one GPU to one other, so it counts as a pair in groups of any size.
    most = max(row["ranks"] for row in rows)
    larger = [row["bytes_per_second"] for row in rows if row["ranks"] == most > 2 and row["kind"] != PERMUTE]
    pairs = [row["bytes_per_second"] for row in rows if row["ranks"] == 2 or row["kind"] == PERMUTE]
    if not larger or not pairs or statistics.median(pairs) >= ALIKE * statistics.median(larger):
        return {}
    return {"bandwidth": statistics.median(larger), "pair": statistics.median(pairs)}


def _link(rows: Sequence[Mapping[str, Any]], inside: Link | None) -> Link | None:
    """Return the link with the median bandwidth and latency of the collectives over it; None without any.

    `inside` is the link of the hops that stay in a host, where a group spans several hosts.
    """
    if not rows:
        return None
    bandwidths = []
    latencies = []
    for row in rows:
        ranks = row["ranks"]
        near = row["ranks_inside"]
        leaves = near < ranks
        ways = 2 if row["kind"] == ALL_REDUCE else 1
        cards = 1
        hops_inside = 0
        if row["kind"] == PERMUTE:
            hops = 1
        elif leaves:
            # Each way around a ring has one hop out of each host but the last; the other hops stay in a host. The
            # network cards of all ranks of the group on a host share what leaves it.
            hops = ceil(ranks / near) - 1
            hops_inside = ranks - 1 - hops
            cards = near
        else:
            hops = ranks - 1
        before = START
        if inside is not None:
            before += ways * hops_inside * inside.latency
        bandwidths.append(row["bytes_per_second"] / cards)
        latencies.append(max(row["alpha_seconds"] - before, 0) / (ways * hops))
    return Link(statistics.median(bandwidths), statistics.median(latencies))
