"""From measured times to the numbers of a cluster: a latency and a bandwidth of each collective, then of each link."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import ceil
from typing import Any

import numpy as np

from jaxdist.gpu_memory import GPU_SHARE
from jaxdist.planning import hardware
from jaxdist.planning.clusters import Cluster, Link
from jaxdist.planning.collective_time import START, wire_share
from jaxdist.planning.predicted_collectives import ALL_REDUCE, PERMUTE

ALIKE = 0.8
"""Of a bandwidth: a measured one from here on may be the same."""


def fit(kind: str, ranks: int, sizes: Sequence[int], took: Sequence[float]) -> tuple[float, float, float]:
    """(alpha, bandwidth, error) of t = alpha + share x bytes / bandwidth, in seconds and bytes per second.

    Least squares of what it is off by in relation to each time, so that the short ones count too; alpha is not
    negative. The error is the root mean square of that.
    """
    took, sent = np.asarray(took), float(wire_share(kind, ranks)) * np.asarray(sizes)
    columns = np.stack([1 / took, sent / took], axis=1)
    alpha, inverse = np.linalg.lstsq(columns, np.ones(len(took)), rcond=None)[0]
    if alpha < 0 or inverse <= 0:
        alpha, inverse = 0.0, columns[:, 1].sum() / (columns[:, 1] ** 2).sum()
    error = np.sqrt(np.mean((columns @ [alpha, inverse] - 1) ** 2))
    return float(alpha), float(1 / inverse), float(error)


def cluster_of(told: Mapping[str, Any], name: str) -> tuple[Cluster, list[str]]:
    """The cluster that `calibration.measure` has seen, and what of it was not measured, a sentence each."""
    gpu = hardware.known(told["device"])
    rate = max(one["flops_per_second"] for one in told["matmuls"])
    peak = gpu.peak if gpu else rate
    rows = told["collectives"]
    near = [row for row in rows if row["ranks_inside"] == row["ranks"]]
    inside = _link(near, None)
    inside = inside and replace(inside, **_without_switch(near))
    across = _link([row for row in rows if row["ranks_inside"] < row["ranks"]], inside)
    notes = [] if gpu else [f"the peak of '{told['device']}' is not known: the best product stands for it, matmul is 1"]
    memory = told["memory_bytes"] or (GPU_SHARE * gpu.memory if gpu else 0)
    if not memory:
        notes.append("the device does not tell its memory; set memory, in bytes")
    if told["virtual_devices"]:
        notes.append("memory is that of the machine over its devices")
    for side, link, sheet in ("inside", inside, gpu and gpu.link), ("across", across, gpu and gpu.network):
        if link is None:
            notes.append(f"{side} was not measured: " + ("of the data sheet" if sheet else "as the other link"))
    default = across or inside
    inside = inside or Link(gpu.link if gpu else default.bandwidth, default.latency)
    across = across or Link(gpu.network if gpu else default.bandwidth, default.latency)
    where = f"{told['devices']} x {told['device']} on {told['hosts']} host(s), {told['mesh']}, jax {told['jax']}"
    made = Cluster(
        name=name,
        gpu=next((key for key, known in hardware.GPUS.items() if known == gpu), told["device"]),
        per_host=told["per_host"],
        memory=float(memory),
        peak=peak,
        matmul=min(rate / peak, 1.0),
        bandwidth=told["copy_bytes_per_second"],
        inside=inside,
        across=across,
        overlap=told["overlap"],
        sources=(f"measured by python -m jaxdist.bench collectives: {where}",),
    )
    return made, notes


def _without_switch(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Both bandwidths of links inside a host where two of its GPUs reach less than `ALIKE` of what larger groups do."""
    most = max(row["ranks"] for row in rows)
    larger = [row["bytes_per_second"] for row in rows if row["ranks"] == most > 2 and row["kind"] != PERMUTE]
    pairs = [row["bytes_per_second"] for row in rows if row["ranks"] == 2 or row["kind"] == PERMUTE]
    if not larger or not pairs or statistics.median(pairs) >= ALIKE * statistics.median(larger):
        return {}
    return dict(bandwidth=statistics.median(larger), pair=statistics.median(pairs))


def _link(rows: Sequence[Mapping[str, Any]], inside: Link | None) -> Link | None:
    """The medians of what the collectives over it say; None for none. `inside`: the link that the other hops go over.

    What leaves a host is carried by the cards of all ranks of a group there, but in a permute, and each way around a
    ring has one hop out of each host but the last.
    """
    if not rows:
        return None
    rates, latencies = [], []
    for row in rows:
        n, near = row["ranks"], row["ranks_inside"]
        leaves = near < n
        ways = 2 if row["kind"] == ALL_REDUCE else 1
        hops = 1 if row["kind"] == PERMUTE else ceil(n / near) - 1 if leaves else n - 1
        others = 0 if row["kind"] == PERMUTE or not leaves else n - 1 - hops
        before = START + ways * others * (inside.latency if inside else 0)
        rates.append(row["bytes_per_second"] / (near if leaves and row["kind"] != PERMUTE else 1))
        latencies.append(max(row["alpha_seconds"] - before, 0) / (ways * hops))
    return Link(statistics.median(rates), statistics.median(latencies))
