"""`python -m jaxdist.bench step [CONFIG]`: time, throughput, MFU and memory of the compiled train step."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from jaxdist.config import Count, CountOrZero
from jaxdist.request import STEP_KNOBS, Extra, arguments

if TYPE_CHECKING:
    from jaxdist.config import Config

DESCRIPTION = "Measure the train step of a configuration on random tokens or images: no data is read, nothing is saved."
KNOBS = [*STEP_KNOBS, "train.seed"]
JSON = Extra("json", False, "Print one JSON object on standard output, and nothing else.")
WARMUP = Extra("warmup", 3, "Steps before the measurement.", CountOrZero)
REPEATS = Extra("repeats", 20, "Steps that are measured, each one waited for.", Count)


def main(argv: list[str] | None = None) -> int:
    asked = arguments(argv, "bench step", DESCRIPTION, extras=[JSON, WARMUP, REPEATS], knobs=KNOBS)
    result = measure(asked.config, asked.extras["warmup"], asked.extras["repeats"])
    if asked.extras["json"]:
        print(json.dumps(result))
        return 0
    for name, value in result.items():
        print(f"{name:<22} {value}")
    return 0


def measure(config: Config, warmup: int, repeats: int) -> dict[str, object]:
    """Step seconds (median, quartiles), tokens or images per second, MFU and bytes per device, and on what."""
    from importlib.metadata import version

    from jaxdist.bench.measuring import Timed, measure_together
    from jaxdist.cluster.runtime import peak_bytes
    from jaxdist.mesh import describe
    from jaxdist.planning.hardware import peak_flops
    from jaxdist.planning.timing import FLOPS_FORMULA, mfu
    from jaxdist.training.run import Run

    run = Run(config)
    timed = Timed.compile(run)
    measure_together([timed], warmup, repeats)
    device, count = run.device, run.mesh.size
    low, median, high = timed.quartiles
    unit, flops, peak = run.task.unit, run.task.flops, peak_flops(device.device_kind, run.config.precision)
    planned = timed.program.memory_analysis()
    return {
        "device": device.device_kind,
        "devices": count,
        "mesh": describe(run.mesh.shape),
        "precision": run.config.precision,
        "jax": version("jax"),
        "repeats": repeats,
        "compile_seconds": round(timed.compile_seconds, 3),
        "step_seconds": median,
        "step_seconds_quartiles": [low, high],
        f"{unit}s_per_step": timed.units,
        f"{unit}s_per_second": timed.units / median,
        f"flops_per_{unit}": flops,
        "flops_formula": flops and FLOPS_FORMULA,
        "peak_flops": peak,
        "mfu": mfu(timed.units / median, flops, count, peak),
        "memory_bytes": peak_bytes(device),
        "argument_bytes": planned.argument_size_in_bytes,
        "temporary_bytes": planned.temp_size_in_bytes,
        "loss": timed.loss,
    }
