"""`python -m jaxdist.explain [CONFIG] --mesh ...`: what a step holds and sends, read from the compiled program."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

from jaxdist.cluster.process_env import check_alone
from jaxdist.config import Config, RequestError
from jaxdist.config.values import DevicesOrZero, FileName, Suggested
from jaxdist.output.patience import saying_that_it_takes
from jaxdist.planning.hardware import GPUS, PRESETS
from jaxdist.process.exit_codes import DONE, FAILED
from jaxdist.request import JSON, STEP_KNOBS, Extra, arguments, check_picture, run
from jaxdist.weights.named import check_described

if TYPE_CHECKING:
    import numpy as np

    from jaxdist.explaining.report import Report
    from jaxdist.mesh.split import Split
    from jaxdist.planning.clusters import Cluster
    from jaxdist.programs.cross_compile import Lower

DESCRIPTION = (
    "Compile the train step of a configuration, and report the bytes that every device holds, the collectives of the "
    "program, and whether both are as predicted. Nothing is run, no data is read, and no device has to be present. The "
    "exit code is 1 if the collectives differ from the prediction, unless the difference is a known one."
)
ReportT = TypeVar("ReportT", bound="Report")

KNOBS = (*STEP_KNOBS, "init_from", "train.local_steps", "train.objective")
TargetName = Annotated[str, Suggested(GPUS)]
ClusterName = Annotated[FileName, Suggested(PRESETS)]
EXTRAS = [
    Extra(
        "target",
        "",
        f"Compile for this GPU, present or not: {', '.join(GPUS)}. Empty: CPU devices.",
        TargetName,
    ),
    Extra("devices", 0, "Number of devices, to fill a -1 of the mesh; 0: as many as the mesh names.", DevicesOrZero),
    Extra(
        "cluster", "", "Cluster of the devices, as for plan: its links and sites. Empty: that of the GPU.", ClusterName
    ),
    JSON,
    Extra("picture", "", "Draw the memory as stacked bars into this PNG file.", FileName),
]


def main(argv: list[str] | None = None) -> int:
    """Compile the step and print the report. Return the exit code."""
    request = arguments(argv, "explain", DESCRIPTION, extras=EXTRAS, knobs=KNOBS)
    check_alone("explain")
    request.tell_unused(processes=1)
    check_described(request.config.init_from)
    extras = request.extras
    check_picture(extras["picture"], "memory.png")
    report = explain(request.config, extras["target"] or None, extras["devices"], extras["cluster"])

    from jaxdist.explaining.text import lines

    if extras["json"]:
        print(json.dumps(report.json()))
    else:
        print("\n".join(lines(report)))
    if extras["picture"]:
        from jaxdist.explaining.picture import draw

        draw(report, Path(extras["picture"]))
    return DONE if report.agrees else FAILED


def explain(config: Config, target: str | None = None, devices: int = 0, cluster: str = "") -> Report:
    """Compile the step of `config` in a process of its own, for CPU devices or a GPU of `planning.hardware.GPUS`.

    `cluster` is the name or the file of the cluster whose hosts and sites the devices fill; empty: that of the GPU.
    With local steps, the step of a replica and the outer step are compiled.
    Raises `RequestError` for a wrong request, and where this machine cannot compile for the target.
    """
    # Imported late, so that --help and wrong requests answer before jax is imported.
    from jaxdist.explaining.report import OuterReport, Report, of_local_step
    from jaxdist.mesh import AXES, REPLICA, device_numbers, devices_asked, fill, parse_mesh
    from jaxdist.mesh.split import Split
    from jaxdist.planning import clusters
    from jaxdist.programs.target import gpu_of
    from jaxdist.request import check_mesh_fits
    from jaxdist.training.rounds import lower_local_step, lower_outer_step
    from jaxdist.training.run import lower_step

    gpu = gpu_of(target) if target else None
    where = clusters.cluster(cluster) if cluster else None
    if where and target and where.gpu != target:
        raise RequestError(f"--cluster {cluster} has {where.gpu}, but --target is {target}; name the same GPU in both")
    shape = parse_mesh(config.mesh)
    shape = fill(shape, devices or devices_asked(shape))
    count = devices_asked(shape)
    sites = 1
    if where:
        clusters.check_sites(where, count)
        sites = where.sites(count)
    config = config.with_precision(cpu=not gpu, capability=gpu.capability if gpu else ())
    split = Split(config, shape)
    check_mesh_fits(split)
    numbers = device_numbers(shape, sites)
    if not split.crossing_traits.apart:
        return _compiled(Report, split, numbers, count, partial(lower_step, config, sites=sites), target, where)
    lower = partial(lower_outer_step, config, sites=sites)
    outer = _compiled(OuterReport, split, numbers, count, lower, target, where)
    # Replicas differ only in their devices.
    numbers = numbers.take([0], axis=AXES.index(REPLICA))
    lower = partial(lower_local_step, config, sites=sites)
    return replace(_compiled(Report, of_local_step(split), numbers, count, lower, target, where), outer=outer)


def _compiled(
    kind: type[ReportT],
    split: Split,
    numbers: np.ndarray,
    count: int,
    lower: Lower,
    target: str | None,
    where: Cluster | None,
) -> ReportT:
    """Compile `lower(devices)` for `count` devices, and return the report of this kind.

    `numbers` has the numbers of the devices of the program's mesh, as `mesh.device_numbers` does; `split` is what they
    compute.
    """
    from jaxdist import models
    from jaxdist.cluster import xla_options
    from jaxdist.cluster.rendezvous import across_hosts
    from jaxdist.mesh import AXES, abstract_mesh
    from jaxdist.models.attention import AttentionCall
    from jaxdist.planning.sharded_model import ShardedModel
    from jaxdist.programs.cross_compile import compile_apart
    from jaxdist.programs.target import gpu_of
    from jaxdist.sharding import Layout

    gpu = gpu_of(target) if target else None
    mesh = abstract_mesh(dict(zip(AXES, numbers.shape, strict=True)))
    config = split.config
    layout = Layout.of(split, mesh, gpu or CPU)
    # In a pipe or a file there is nobody who waits.
    waits = sys.stderr is not None and sys.stderr.isatty()
    said = f"compiling   the step for {count} x {target or 'CPU'}"
    with saying_that_it_takes(partial(print, file=sys.stderr), said) if waits else nullcontext():
        program = compile_apart(lower, target, count)
    host_of, note = _hosts(numbers, count, target, where)
    notes = [note] if note else []
    sequence = bool(layout.sequence_parallel)
    across = across_hosts(mesh, host_of)
    options = xla_options.options(
        layout.platform,
        mesh.size,
        across,
        sequence,
        split.sends_several,
        config.train.deterministic,
        config.numbers.float8,
    )
    if options:
        notes.append(f"compiled with {xla_options.as_flags(options)}, as train does")
    model = config.model
    unknown = AttentionCall.of(model, model.window, layout, split.rows, config.numbers.compute).unknown_mask
    if unknown and gpu:
        notes.append(f"attention runs in blocks of queries, because {unknown}")
    program = replace(program, notes=tuple(notes))
    sharded = ShardedModel(split, models.build(config.model, layout), layout)
    return kind(sharded, mesh, program, target, gpu, where)


def _hosts(numbers: np.ndarray, count: int, target: str | None, where: Cluster | None) -> tuple[list[int], str]:
    """Return the host of each of the devices, of which there are `count`, and what is to be told of hosts, if anything.

    CPU devices share one host.
    """
    from jaxdist.planning import clusters
    from jaxdist.programs.target import hosts as hosts_of

    if not target:
        return [0] * numbers.size, ""
    # Neighbours in the mesh share a host, as in a run.
    hosts = where or clusters.of_gpu(target)
    per_host = hosts.per_host if hosts else count
    host_of = [number // per_host for number in numbers.ravel().tolist()]
    if not hosts or hosts.fills_hosts(count):
        return host_of, ""
    number, each = hosts_of(target, count)
    return host_of, f"{count} devices do not fill hosts of {per_host}: compiled as {number} hosts of {each}"


class CPU:
    """A device like those that a CPU is split into."""

    platform = "cpu"


if __name__ == "__main__":
    run(main)
