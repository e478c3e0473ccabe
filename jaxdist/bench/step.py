"""`python -m jaxdist.bench step [CONFIG]`: time, throughput, MFU and memory of the compiled train step."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING

from jaxdist.cluster.process_env import find
from jaxdist.request import JOB_KNOBS, STEP_KNOBS, Enough, Extra, arguments
from jaxdist.values import Count, CountOrZero

if TYPE_CHECKING:
    from jaxdist.bench.measuring import Timed
    from jaxdist.config import Config

DESCRIPTION = "Measure the train step of a configuration on random tokens or images: no data is read, nothing is saved."
KNOBS = [*STEP_KNOBS, *JOB_KNOBS, "train.seed"]
JSON = Extra("json", False, "Print one JSON object on standard output, and nothing else.")
WARMUP = Extra("warmup", 3, "Steps before the measurement.", CountOrZero)
REPEATS = Extra("repeats", 20, "Steps that are measured, each one waited for.", Count)


def main(argv: list[str] | None = None) -> int:
    asked = arguments(argv, "bench step", DESCRIPTION, extras=[JSON, WARMUP, REPEATS], knobs=KNOBS)
    place = find(asked.config.cluster)

    from jaxdist.cluster.consensus import check_request
    from jaxdist.cluster.job import Job

    with Job(place, asked.config, enough=Enough(asked.config)) as job:
        check_request(asked.text)
        timed = compile_and_time(asked.config, asked.extras["warmup"], asked.extras["repeats"], job.note)
        if job.env.leader:
            result = told(timed)
            lines = [f"{name:<22} {for_people(name, value)}" for name, value in result.items()]
            print(json.dumps(result) if asked.extras["json"] else "\n".join(lines))
        return job.end(0)


def for_people(name: str, value: object) -> str:
    """One of the results with its unit, as long as a person reads it; JSON has all digits."""
    from jaxdist.units import duration, size

    if value is None:
        return "not known"
    if name == "step_seconds_quartiles":
        return " to ".join(map(duration, value))
    if name.endswith("_seconds"):
        return duration(value)
    if name.endswith("_bytes"):
        return size(value)
    if name == "peak_flops":
        return f"{value / 1e12:,.4g} TFLOP/s"
    if name == "mfu":
        return f"{value:.1%}"
    if name == "loss":
        return f"{value:.4f} nats"
    return f"{value:,.0f}" if isinstance(value, int | float) else str(value)


def compile_and_time(config: Config, warmup: int, repeats: int, note: Callable[[str], None]) -> Timed:
    """`note` gets what is being done, as the watchdog wants to know it."""
    from jaxdist.bench.measuring import Timed, measure_together
    from jaxdist.cluster.heartbeat import COMPILING
    from jaxdist.training.run import Run

    note(COMPILING)
    timed = Timed.compile(Run(config))
    measure_together([timed], warmup, repeats, note)
    return timed


def told(timed: Timed) -> dict[str, object]:
    """Step seconds (median, quartiles), tokens or images per second, MFU and bytes per device, and on what."""
    from importlib.metadata import version

    from jaxdist.cluster.runtime import peak_bytes
    from jaxdist.mesh import describe
    from jaxdist.planning.hardware import peak_flops
    from jaxdist.planning.timing import FLOPS_FORMULA, mfu

    run = timed.run
    device, count = run.device, run.mesh.size
    low, median, high = timed.quartiles
    unit, flops, peak = run.task.unit, run.task.flops, peak_flops(device.device_kind, run.config.precision)
    planned = timed.program.memory_analysis()
    return {
        "device": device.device_kind,
        "devices": count,
        "processes": len(timed.processes),
        "mesh": describe(run.mesh.shape),
        "precision": run.config.precision,
        "jax": version("jax"),
        "repeats": len(timed.seconds),
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
