"""`python -m jaxdist.bench step [CONFIG]`: time, throughput, MFU and memory of the compiled train step."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from jaxdist.config import Count, CountOrZero
from jaxdist.request import Extra, arguments

if TYPE_CHECKING:
    from jaxdist.config import Config
    from jaxdist.data.batches import Batch
    from jaxdist.training.run import Run

DESCRIPTION = "Measure the train step of a configuration on random tokens: no data is read, nothing is saved."
KNOBS = [
    "mesh",
    "precision",
    "parallel",
    "model",
    "optimizer",
    "train.global_batch_size",
    "train.accumulation",
    "train.seed",
]
EXTRAS = [
    Extra("json", False, "Print one JSON object on standard output, and nothing else."),
    Extra("warmup", 3, "Steps before the measurement.", CountOrZero),
    Extra("repeats", 20, "Steps that are measured, each one waited for.", Count),
]


def main(argv: list[str] | None = None) -> int:
    asked = arguments(argv, "bench step", DESCRIPTION, extras=EXTRAS, knobs=KNOBS)
    result = measure(asked.config, asked.extras["warmup"], asked.extras["repeats"])
    if asked.extras["json"]:
        print(json.dumps(result))
        return 0
    for name, value in result.items():
        print(f"{name:<22} {value}")
    return 0


def measure(config: Config, warmup: int, repeats: int) -> dict[str, object]:
    """Step seconds (median, quartiles), tokens per second, MFU and bytes per device, with what they were taken on."""
    import time
    from importlib.metadata import version

    import jax
    import numpy as np

    from jaxdist.cluster.runtime import peak_bytes
    from jaxdist.mesh import describe
    from jaxdist.planning.hardware import peak_flops
    from jaxdist.planning.timing import FLOPS_FORMULA, flops_per_token, mfu
    from jaxdist.training.run import Run

    run = Run(config)
    run.steps = max(config.train.steps, 1)  # of the schedule alone: no data tells how many rows an epoch has
    device, count = run.mesh.devices.flat[0], run.mesh.devices.size
    with jax.set_mesh(run.mesh):
        state, batch = run.init(), _random_batch(run)
        started = time.perf_counter()
        step = run.lower().compile()
        compile_seconds = time.perf_counter() - started
        seconds = []
        for _ in range(warmup + repeats):
            started = time.perf_counter()
            state, metrics = step(state, batch)
            jax.block_until_ready(state)
            seconds.append(time.perf_counter() - started)
    low, median, high = np.percentile(seconds[warmup:], [25, 50, 75])
    tokens = config.train.global_batch_size * config.model.sequence
    flops, peak = flops_per_token(config.model), peak_flops(device.device_kind, run.config.precision)
    planned = step.memory_analysis()
    return {
        "device": device.device_kind,
        "devices": count,
        "mesh": describe(run.mesh.shape),
        "precision": run.config.precision,
        "jax": version("jax"),
        "repeats": repeats,
        "compile_seconds": round(compile_seconds, 3),
        "step_seconds": float(median),
        "step_seconds_quartiles": [float(low), float(high)],
        "tokens_per_step": tokens,
        "tokens_per_second": tokens / float(median),
        "flops_per_token": flops,
        "flops_formula": FLOPS_FORMULA,
        "peak_flops": peak,
        "mfu": mfu(tokens / float(median), flops, count, peak),
        "memory_bytes": peak_bytes(device),
        "argument_bytes": planned.argument_size_in_bytes,
        "temporary_bytes": planned.temp_size_in_bytes,
        "loss": float(metrics.loss) if np.isfinite(metrics.loss) else None,
    }


def _random_batch(run: Run) -> Batch:
    """A global batch of random tokens, by the way that real ones take."""
    import numpy as np

    from jaxdist.data.batches import train_batch
    from jaxdist.data.tokens import Tokens, TokenWriter

    config, sequence = run.config, run.config.model.sequence
    rows = np.arange(config.train.global_batch_size)
    ids = np.random.default_rng(0).integers(0, config.model.vocab, rows.size * sequence + 1)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tokens.bin"
        with TokenWriter(path, "uint32") as writer:
            writer.write(ids)
        tokens = Tokens.open(path, "uint32")
        return train_batch(tokens, rows, sequence, config.train.accumulation, run.mesh, run.layout)
