"""`python -m jaxdist.bench collectives`: measure links, matrix units and memory, and write a cluster file."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxdist.cluster.process_env import find
from jaxdist.config import RequestError
from jaxdist.config.values import FileName
from jaxdist.files import write_whole
from jaxdist.output.units import counted
from jaxdist.request import JOB_KNOBS, JSON, Extra, arguments, check_output

DESCRIPTION = (
    "Measure all-reduce, all-gather, reduce-scatter and permute over each axis of the mesh at several sizes, fit a "
    "latency and a bandwidth to each, and measure matmuls, memory and how well communication and matmuls overlap. "
    "Start it as you start a run, also under srun. It reads no model and saves nothing but --fit."
)
FIT = Extra("fit", "", "Write the measured cluster into this TOML file, for the planner.", FileName)
KNOBS = ["mesh", *JOB_KNOBS]

WIDTH = 120
"""Columns of a line of text."""


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    request = arguments(argv, "bench collectives", DESCRIPTION, positional=None, extras=[JSON, FIT], knobs=KNOBS)
    file = request.extras["fit"]
    check_file(file)
    env = find(request.config.cluster)

    # Imported here, so that --help and mistakes in the options need no jax.
    from jaxdist.bench.calibration import measure
    from jaxdist.cluster import runtime
    from jaxdist.cluster.consensus import check_request
    from jaxdist.cluster.job import Job
    from jaxdist.mesh import parse_mesh

    with Job(env, request.config) as job:
        check_request(request.text)
        request.tell_unused(job.env.processes)
        mesh = runtime.start(parse_mesh(request.config.mesh))
        if file and mesh.size == 1:
            raise RequestError("--fit needs links to measure, but the mesh is one device; give --mesh, such as 4x1x1")
        measured = measure(mesh, job.note)
        if job.env.leader:
            measured["notes"] = list(notes(measured))
            if file:
                measured |= write(measured, Path(file))
            if request.extras["json"]:
                print(json.dumps(measured), flush=True)
            else:
                print("\n".join(lines(measured)), flush=True)
        return job.end(0)


def check_file(file: str) -> None:
    """Raise `RequestError` if `file` cannot be written, before anything is measured."""
    check_output("--fit", file, "cluster.toml")
    if file and Path(file).suffix != ".toml":
        raise RequestError(f"--fit '{file}' is no TOML file; name it {Path(file).with_suffix('.toml')}")


def write(measured: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Write the cluster file; returns its name, and the notes with those on what was not measured."""
    from jaxdist.bench.fitting import cluster_of
    from jaxdist.planning.clusters import to_toml

    cluster, more_notes = cluster_of(measured, path.stem)
    all_notes = [*measured["notes"], *more_notes]
    wrapped = [line for note in all_notes for line in textwrap.wrap(note, WIDTH - 2)]
    # Comments above the cluster say how it was measured.
    heading = [cluster.sources[0], "", *wrapped, "", *_table(measured)]
    write_whole(path, to_toml(cluster, heading))
    return {"fit": str(path), "notes": all_notes}


def notes(measured: Mapping[str, Any]) -> Iterator[str]:
    """Yield what a reader must know to interpret the numbers, one sentence each."""
    from jaxdist.doctor.devices import LEAST
    from jaxdist.planning.clusters import of_kind
    from jaxdist.planning.collective_time import Group

    if measured["virtual_devices"]:
        yield (
            f"these are virtual devices of {counted(measured['hosts'], 'CPU host')} with "
            f"{counted(measured['cores'], 'core')}: the times show how fast memory is copied and how threads wait for "
            f"each other, no link; to plan for GPUs, write the file on GPUs"
        )
    if not measured["collectives"]:
        yield "the mesh is one device: there is no link to measure; give --mesh, such as 4x1x1"
    shipped = of_kind(measured["device"])
    if shipped is None:
        return
    for row in measured["collectives"]:
        expected = float(Group(row["ranks"], row["ranks_inside"], shipped).rate)
        if row["bytes_per_second"] < LEAST * expected:
            yield (
                f"{row['kind']} over {row['axis']} reaches {row['bytes_per_second'] / expected:.0%} of the "
                f"{expected / 1e9:.4g} GB/s of {shipped.name}; run python -m jaxdist.doctor"
            )


def lines(measured: Mapping[str, Any]) -> list[str]:
    """Return the lines that the command prints."""
    from jaxdist.bench.fitting import where

    overlap = "not measured"
    if measured["overlap"] is not None:
        overlap = f"{measured['overlap']:.3f} (1 hides all, 2 nothing)"
    text = [where(measured), "", *_table(measured), ""]
    for one in measured["matmuls"]:
        shape = "x".join(map(str, one["shape"]))
        text.append(f"matrix product     {shape:<18} {one['flops_per_second'] / 1e12:.4g} TFLOP/s")
    text.append(f"memory             {measured['copy_bytes_per_second'] / 1e9:.4g} GB/s read and written")
    text.append(f"overlap factor     {overlap}")
    if "fit" in measured:
        text.append(f"written to         {measured['fit']}")
    text.append("")
    for note in measured["notes"]:
        text += textwrap.wrap(note, WIDTH)
    return text


def _table(measured: Mapping[str, Any]) -> list[str]:
    """Return a table with a line for each collective and axis."""
    from jaxdist.output.tables import table
    from jaxdist.output.units import size

    if not measured["collectives"]:
        return []
    sizes = measured["collectives"][0]["bytes"]
    rows = [("collective", "axis", "ranks", "in a host", *map(size, sizes), "alpha", "bandwidth", "fit is off by")]
    for row in measured["collectives"]:
        group = (row["kind"], row["axis"], str(row["ranks"]), str(row["ranks_inside"]))
        times = [f"{took * 1e6:.0f} us" for took in row["seconds"]]
        fitted = (f"{row['alpha_seconds'] * 1e6:.1f} us", f"{row['bytes_per_second'] / 1e9:.4g} GB/s")
        rows.append((*group, *times, *fitted, f"{row['fit_error']:.0%}"))
    return table(rows, right=True)
