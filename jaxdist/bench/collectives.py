"""`python -m jaxdist.bench collectives`: what links, matrix units and memory do, and a file for the planner."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxdist.bench.step import JSON
from jaxdist.cluster.process_env import find
from jaxdist.config import RequestError
from jaxdist.files import write_whole
from jaxdist.request import JOB_KNOBS, Extra, arguments, check_output
from jaxdist.values import FileName

if TYPE_CHECKING:
    import jax

DESCRIPTION = (
    "Measure all-reduce, all-gather, reduce-scatter and permute over each axis of the mesh at several sizes, fit a "
    "latency and a bandwidth to each, and measure matrix products, memory and how well the two overlap. Start it as a "
    "run is started, under srun too. No model is read, nothing is saved but --fit."
)
FIT = Extra("fit", "", "Write what was measured into this TOML file, a cluster for the planner.", FileName)
KNOBS = ["mesh", *JOB_KNOBS]

WIDTH = 120
"""Of a line of text."""


def main(argv: list[str] | None = None) -> int:
    asked = arguments(argv, "bench collectives", DESCRIPTION, positional=None, extras=[JSON, FIT], knobs=KNOBS)
    file = asked.extras["fit"]
    check_file(file)
    place = find(asked.config.cluster)

    from jaxdist.bench.calibration import measure
    from jaxdist.cluster import runtime
    from jaxdist.cluster.consensus import check_request
    from jaxdist.cluster.job import Job
    from jaxdist.mesh import parse_mesh

    with Job(place, asked.config) as job:
        check_request(asked.text)
        mesh = runtime.start(parse_mesh(asked.config.mesh))
        check_links(mesh, file)
        told = measure(mesh, job.note)
        if job.env.leader:
            told["notes"] = list(notes(told))
            if file:
                told |= write(told, Path(file))
            print(json.dumps(told) if asked.extras["json"] else "\n".join(lines(told)), flush=True)
        return job.end(0)


def check_file(file: str) -> None:
    """Raise `RequestError` where `file` could not be written, before anything is measured."""
    check_output("--fit", file, "cluster.toml")
    if file and Path(file).suffix != ".toml":
        raise RequestError(f"--fit '{file}' is no TOML file; name it {Path(file).with_suffix('.toml')}")


def check_links(mesh: jax.sharding.Mesh, file: str) -> None:
    if file and mesh.size == 1:
        raise RequestError("--fit needs links to measure, but the mesh is one device; give --mesh, such as 4x1x1")


def write(told: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Write the cluster. Returns the file's name and what of it was not measured."""
    from jaxdist.bench.fitting import cluster_of
    from jaxdist.planning.clusters import to_toml

    cluster, notes = cluster_of(told, path.stem)
    told_too = [line for note in (*told["notes"], *notes) for line in textwrap.wrap(note, WIDTH - 2)]
    heading = [cluster.sources[0], "", *told_too, "", *_table(told)]
    write_whole(path, to_toml(cluster, heading))
    return {"fit": str(path), "notes": [*told["notes"], *notes]}


def notes(told: Mapping[str, Any]) -> Iterator[str]:
    """What a reader has to know, a sentence each."""
    from jaxdist.doctor.devices import LEAST
    from jaxdist.planning.hardware import known

    if told["virtual_devices"]:
        yield (
            f"these are virtual devices of {told['hosts']} CPU host(s) with {told['cores']} core(s): what shows is how "
            f"fast memory is copied and threads wait for each other, no link; a plan for GPUs needs a file from there"
        )
    if not told["collectives"]:
        yield "the mesh is one device: there is no link to measure; give --mesh, such as 4x1x1"
    gpu = known(told["device"])
    for row in told["collectives"] if gpu else ():
        inside = row["ranks_inside"]
        expected = gpu.link if inside == row["ranks"] else min(gpu.link, inside * gpu.network)
        if row["bytes_per_second"] < LEAST * expected:
            yield (
                f"{row['kind']} over {row['axis']} reaches {row['bytes_per_second'] / expected:.0%} of the "
                f"{expected / 1e9:.4g} GB/s of the data sheets; run python -m jaxdist.doctor"
            )


def lines(told: Mapping[str, Any]) -> list[str]:
    """For a person."""
    overlap = "not measured" if told["overlap"] is None else f"{told['overlap']:.3f} (1 hides all, 2 nothing)"
    rates = [
        f"{'x'.join(map(str, one['shape'])):<18} {one['flops_per_second'] / 1e12:.4g} TFLOP/s"
        for one in told["matmuls"]
    ]
    return [
        f"{told['devices']} x {told['device']} on {told['hosts']} host(s), {told['mesh']}, jax {told['jax']}",
        "",
        *_table(told),
        "",
        *(f"matrix product     {rate}" for rate in rates),
        f"memory             {told['copy_bytes_per_second'] / 1e9:.4g} GB/s read and written",
        f"overlap factor     {overlap}",
        *([f"written to         {told['fit']}"] if "fit" in told else []),
        "",
        *(line for note in told["notes"] for line in textwrap.wrap(note, WIDTH)),
    ]


def _table(told: Mapping[str, Any]) -> list[str]:
    """A line for each collective and axis."""
    from jaxdist.planning.tables import table
    from jaxdist.units import size

    if not told["collectives"]:
        return []
    sizes = told["collectives"][0]["bytes"]
    rows = [("collective", "axis", "ranks", "in a host", *map(size, sizes), "alpha", "bandwidth", "fit is off by")]
    for row in told["collectives"]:
        times = [f"{took * 1e6:.0f} us" for took in row["seconds"]]
        fitted = (f"{row['alpha_seconds'] * 1e6:.1f} us", f"{row['bytes_per_second'] / 1e9:.4g} GB/s")
        place = (row["kind"], row["axis"], str(row["ranks"]), str(row["ranks_inside"]))
        rows.append((*place, *times, *fitted, f"{row['fit_error']:.0%}"))
    return table(rows, right=True)
