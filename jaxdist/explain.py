"""`python -m jaxdist.explain [CONFIG] --mesh ...`: what a step holds and moves, read off the compiled program."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from jaxdist.cluster.process_env import check_alone
from jaxdist.config import Config
from jaxdist.exit_codes import DONE, FAILED
from jaxdist.request import STEP_KNOBS, Extra, arguments, check_picture, run
from jaxdist.values import DevicesOrZero, FileName

if TYPE_CHECKING:
    from jaxdist.planning.report import Report

DESCRIPTION = (
    "Compile the train step of a configuration, and tell which bytes every device holds, what crosses the mesh, and "
    "whether that is what theory says. Nothing is run, no data is read, and no device has to be there. The exit code "
    "is 1 if the program moves something else than predicted, unless the difference is a known one."
)
EXTRAS = [
    Extra("target", "", "Compile for this GPU, which need not be here: a100, h100, h200, gh200. Empty: CPU devices."),
    Extra(
        "devices", 0, "How many devices, where the mesh has a -1 to be filled; 0: as many as it names.", DevicesOrZero
    ),
    Extra("json", False, "Print one JSON object on standard output, and nothing else."),
    Extra("picture", "", "Draw the memory as stacked bars into this PNG file.", FileName),
]


def main(argv: list[str] | None = None) -> int:
    asked = arguments(argv, "explain", DESCRIPTION, extras=EXTRAS, knobs=STEP_KNOBS)
    check_alone("explain")
    extras = asked.extras
    check_picture(extras["picture"], "memory.png")
    report = explain(asked.config, extras["target"] or None, extras["devices"])

    from jaxdist.planning.report_text import lines

    print(json.dumps(report.json()) if extras["json"] else "\n".join(lines(report)))
    if extras["picture"]:
        from jaxdist.planning.report_picture import draw

        draw(report, Path(extras["picture"]))
    return FAILED if report.unknown else DONE


def explain(config: Config, target: str | None = None, devices: int = 0) -> Report:
    """Compile the step of `config` in a process of its own, for CPU devices or a GPU of `planning.hardware.GPUS`.

    Raises `RequestError` for what is wrong with the request or cannot be compiled for here.
    """
    from jaxdist import models
    from jaxdist.cluster import xla_options
    from jaxdist.cluster.rendezvous import across_hosts
    from jaxdist.mesh import abstract_mesh, devices_asked, fill, parse_mesh
    from jaxdist.models.attention import NO_DOCUMENTS
    from jaxdist.planning.cross_compile import compile_apart
    from jaxdist.planning.report import Report
    from jaxdist.planning.target import gpu_of
    from jaxdist.request import check_mesh_fits
    from jaxdist.sharding import Layout, rules
    from jaxdist.training.run import lower_step

    gpu = gpu_of(target) if target else None
    shape = parse_mesh(config.mesh)
    shape = fill(shape, devices or devices_asked(shape))
    if config.precision == "auto":
        config = config.model_copy(update={"precision": "bfloat16" if gpu else "float32"})
    check_mesh_fits(config, shape)
    mesh = abstract_mesh(shape)
    layout = Layout.on(mesh, rules(config, shape), gpu or CPU)
    program = compile_apart(partial(lower_step, config), target, mesh.size)
    notes = []
    host = [number // gpu.per_host for number in range(mesh.size)] if gpu else [0] * mesh.size
    asked = xla_options.options(layout.platform, mesh.size, across_hosts(mesh, host), layout.parts("residual") > 1)
    if asked:
        notes.append(f"compiled with {xla_options.as_flags(asked)}, as train does")
    if config.model.documents == "apart" and gpu:
        notes.append(f"attention runs in blocks of queries, because {NO_DOCUMENTS}")
    program = replace(program, notes=tuple(notes))
    return Report(config, models.build(config.model, layout), layout, mesh, program, target, gpu)


class CPU:
    """A device like those that a CPU is split into."""

    platform = "cpu"


if __name__ == "__main__":
    run(main)
