"""`python -m jaxdist.bench step [CONFIG]`: measure time, throughput, MFU and memory of the compiled train step."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING

from jaxdist.cluster.process_env import find
from jaxdist.config import NotFinite
from jaxdist.config.values import Count, CountOrZero
from jaxdist.request import JOB_KNOBS, JSON, STEP_KNOBS, Enough, Extra, arguments

if TYPE_CHECKING:
    from jaxdist.bench.measuring import Timed
    from jaxdist.config import Config

DESCRIPTION = "Measure the train step of a configuration on random tokens or images: no data is read, nothing is saved."
KNOBS = [*STEP_KNOBS, *JOB_KNOBS, "train.seed"]
WARMUP = Extra("warmup", 3, "Steps before the measurement.", CountOrZero)
REPEATS = Extra("repeats", 20, "Steps that are measured, each one waited for.", Count)


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    request = arguments(argv, "bench step", DESCRIPTION, extras=[JSON, WARMUP, REPEATS], knobs=KNOBS)
    config = request.config
    env = find(config.cluster)

    # Imported here, so that --help and mistakes in the options need no jax.
    from jaxdist.cluster.consensus import check_request
    from jaxdist.cluster.job import Job

    with Job(env, config, enough=Enough(config)) as job:
        check_request(request.text)
        request.tell_unused(job.env.processes)
        timed = compile_and_time(config, request.extras["warmup"], request.extras["repeats"], job.note)
        if job.env.leader:
            result = report(timed)
            if request.extras["json"]:
                print(json.dumps(result))
            else:
                shown = {name: value for name, value in result.items() if name != "config"}
                lines = [f"{name:<22} {for_people(name, value)}" for name, value in shown.items()]
                print("\n".join(lines))
        if timed.loss is None:
            raise NotFinite(f"the loss of the last step is NaN or infinite; {timed.run.against_overflow}")
        return job.end(0)


def for_people(name: str, value: object) -> str:
    """Return a value of the report with its unit and rounded for a person; JSON has all digits."""
    from jaxdist.output.units import duration, size

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
    if isinstance(value, int | float):
        return f"{value:,.0f}"
    return str(value)


def compile_and_time(config: Config, warmup: int, repeats: int, note: Callable[[str], None]) -> Timed:
    """Compile the step of `config` and measure it; `note` takes the current phase, for the watchdog."""
    from jaxdist.bench.measuring import Timed, measure_together
    from jaxdist.cluster.heartbeat import COMPILING
    from jaxdist.training.run import Run

    note(COMPILING)
    timed = Timed.compile(Run(config))
    measure_together([timed], warmup, repeats, note)
    return timed


def report(timed: Timed) -> dict[str, object]:
    """Return seconds of a step, tokens or images per second, MFU and bytes per device, and what it ran on."""
    from importlib.metadata import version

    from jaxdist.cluster.runtime import peak_bytes
    from jaxdist.mesh import describe
    from jaxdist.planning.hardware import peak_flops
    from jaxdist.planning.timing import mfu

    run = timed.run
    low, median, high = timed.quartiles
    unit = run.task.unit
    flops = run.task.flops
    peak = peak_flops(run.device.device_kind, run.config.precision)
    planned = timed.program.memory_analysis()
    return {
        "device": run.device.device_kind,
        "devices": run.mesh.size,
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
        "flops_formula": flops and run.task.flops_formula,
        "peak_flops": peak,
        "mfu": mfu(timed.units / median, flops, run.mesh.size, peak),
        "memory_bytes": peak_bytes(run.device),
        "argument_bytes": planned.argument_size_in_bytes,
        "temporary_bytes": planned.temp_size_in_bytes,
        "loss": timed.loss,
        "config": run.config.model_dump(mode="json"),
    }
