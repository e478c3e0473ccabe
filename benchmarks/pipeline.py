"""What a pipeline costs beside its schedule, on CPU devices: time over the ideal, compile time, memory.

    python benchmarks/pipeline.py [time] [compile] [memory] [curve]

time      2 stages on 2 devices, one for each core. A unit (F and B of a stage) is measured, not assumed: 2 devices run
          the layers of one stage as data parallelism, both at once as in the pipeline. Ideal is (M + S - 1) units.
          What a backward pass in two pieces costs more is measured too: a stage's layers alone, with B or with I and W.
compile   the step of a pipeline beside that of the same model on one device, for 8 and for 64 micro-batches; CPU time,
          which depends less on what else runs.
memory    temporaries of loss and gradients by schedule and micro-batches, and of GPipe as JAX differentiates it: the
          gradient of the executor's forward pass alone.
curve     the quickstart on 4 stages, 1F1B against PipeDream, whose gradients are late; nothing is clipped in either.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from functools import partial
from importlib.metadata import version
from pathlib import Path
from statistics import median

import jax
import jax.numpy as jnp

from jaxdist.bench.measuring import Timed, measure_together, random_work
from jaxdist.config import Config
from jaxdist.data.batches import Batch
from jaxdist.mesh import PIPELINE, devices_asked, parse_mesh
from jaxdist.models import Params
from jaxdist.parallel import region
from jaxdist.parallel.pipeline.executor import Carry, Region
from jaxdist.training.run import Run

SIZES = dict(embed=256, heads=4, vocab=256, sequence=128)
ROWS = 8
"""Rows of a micro-batch."""


def run_on(mesh: str, layers: int, micro: int, schedule: str = "1f1b", virtual: int = 0, remat: str = "none") -> Run:
    shape = parse_mesh(mesh)
    stages = shape["pipeline"]
    config = Config(
        mesh=mesh,
        precision="float32",
        model=dict(layers=layers, remat=remat, **SIZES),
        pipeline=dict(schedule=schedule, virtual_stages=virtual, microbatches=micro) if stages > 1 else {},
        train=dict(global_batch_size=ROWS * micro * shape["data"], accumulation=1 if stages > 1 else micro, steps=10),
        optimizer=dict(name="sgd"),
    )
    return Run(config, devices=jax.devices()[: devices_asked(shape)])


def times() -> None:
    print("time        schedule     M  step ms  unit ms  ideal ms  over the ideal")
    cases = ("1f1b", 1, 8), ("1f1b", 1, 32), ("gpipe", 1, 8), ("interleaved", 2, 8), ("zb-u", 1, 8)
    for schedule, virtual, micro in cases:
        pipe = Timed.compile(run_on("1x1x2", 8, micro, schedule, virtual))
        unit = Timed.compile(run_on("2x1x1", 4, micro))
        measure_together([pipe, unit], warmup=2, repeats=8)
        step, each = pipe.quartiles[1], unit.quartiles[1] / micro
        waiting = 2 / 3 if schedule == "zb-u" else 1 / virtual  # of S - 1 = 1 unit: W has no bubble
        _print_time(schedule, micro, step, each, (micro + waiting) * each)
        if schedule == "zb-u":
            whole, split = layers_alone(micro)
            print(
                f"            a stage's layers: {1e3 * whole:.1f} ms with B, {1e3 * split:.1f} ms with I and W, so of"
            )
            each *= split / whole
            _print_time("split units", micro, step, each, (micro + waiting) * each)


def _print_time(name: str, micro: int, step: float, unit: float, ideal: float) -> None:
    figures = f"{1e3 * step:7.0f}  {1e3 * unit:7.1f}  {1e3 * ideal:8.0f}  {step / ideal - 1:+.1%}"
    print(f"            {name:<11} {micro:>2}  {figures}")


def layers_alone(micro: int, repeats: int = 8) -> tuple[float, float]:
    """Median seconds of F and B of a stage's layers and a micro-batch, on both devices at once, without a schedule: B
    in one piece, and in two."""
    runs = [run_on("1x1x2", 8, micro, schedule) for schedule in ("1f1b", "zb-u")]
    seconds, programs = ([], []), []
    for run in runs:
        with jax.set_mesh(run.mesh):
            arguments = run.engine.init().params, random_work(run)
            programs.append((jax.jit(partial(_one_after_another, run)).lower(*arguments).compile(), arguments))
    for _ in range(repeats + 1):  # the first is not counted
        for (program, arguments), found in zip(programs, seconds, strict=True):
            started = time.perf_counter()
            jax.block_until_ready(program(*arguments))
            found.append((time.perf_counter() - started) / micro)
    return median(seconds[0][1:]), median(seconds[1][1:])


def _one_after_another(run: Run, params: Params, batch: Batch) -> jax.Array:
    """Each stage runs its layers on all micro-batches, each with what the one before has left."""
    batch = run.forward.with_keys(batch, jnp.asarray(0))
    executor = run.forward.executor(batch)

    def all_of_them(rows, weights, batch):
        device = Region(executor, weights, batch, backward=True)
        carry = device.start()

        def one(carry: Carry, number: jax.Array) -> tuple[Carry, None]:
            unit, layers = device.unit(0, device.part(number)), device.layers
            kept, y = layers.forward_keeping(unit, carry["sent"], carry["residuals"], 0)
            if "stash" not in carry:
                sums, dx = layers.backward(unit, y, kept, 0, carry["blocks"], True)
                return carry | dict(residuals=kept, sent=dx, blocks=sums), None
            stash, dx = layers.of_input(unit, y, kept, 0, carry["stash"], 0)
            sums = layers.of_weights(unit, stash, 0, carry["blocks"], True)
            return carry | dict(residuals=kept, stash=stash, sent=dx, blocks=sums), None

        numbers = region.vary(jnp.arange(run.config.pipeline.micro), (PIPELINE,))
        carry = jax.lax.scan(one, carry, numbers)[0]
        return sum(jnp.sum(leaf) for leaf in jax.tree.leaves(carry["blocks"]))[None]

    return executor.in_region(all_of_them, jax.P(PIPELINE))(*executor.arguments(params, batch))


def compiles() -> None:
    print("compile     mesh   schedule     M  seconds  CPU seconds")
    for mesh, schedule, virtual, micro in (
        *(("1x1x1", "none", 0, micro) for micro in (8, 64)),
        *(("1x1x4", "1f1b", 1, micro) for micro in (8, 64)),
        *(("1x1x4", name, 2, 8) for name in ("interleaved", "zb-u")),
        ("1x1x4", "zb-h1", 1, 8),
    ):
        run = run_on(mesh, 8, micro, *(() if schedule == "none" else (schedule, virtual)))
        started, busy = time.perf_counter(), time.process_time()
        with jax.set_mesh(run.mesh):
            run.lower().compile()
        seconds, busy = time.perf_counter() - started, time.process_time() - busy
        print(f"            {mesh}  {schedule:<11} {micro:>2}  {seconds:7.1f}  {busy:11.1f}")


def temporaries(run: Run, by_jax: bool = False) -> int:
    """Bytes on a device."""
    forward = run.forward

    def step(weights, batch):
        if by_jax:
            return jax.value_and_grad(lambda w: forward.evaluate(w, {}, batch)[0])(weights)
        return forward.gradients(weights, {}, batch, jnp.asarray(0))[:2]

    with jax.set_mesh(run.mesh):
        compiled = jax.jit(step).lower(run.engine.abstract().params, run.batch()).compile()
    return compiled.memory_analysis().temp_size_in_bytes


def memory() -> None:
    print("memory      MiB of temporaries on a device, 4 stages, by micro-batches")
    counts = (8, 16, 32, 64)
    print("            schedule      remat " + "".join(f"{micro:>9}" for micro in counts))
    rows = [("gpipe by JAX", "none"), ("gpipe", "none"), ("1f1b", "none"), ("zb-u", "none"), ("zb-h1", "none")]
    rows += [("gpipe", "stage"), ("1f1b", "stage"), ("1f1b", "block"), ("1f1b", "dots"), ("interleaved", "none")]
    for name, remat in rows:
        schedule, _, by_jax = name.partition(" ")
        found = [
            temporaries(run_on("1x1x4", 8, micro, schedule, remat=remat), bool(by_jax)) / 2**20
            for micro in (counts if schedule in ("gpipe", "1f1b") else (8, 32))
        ]
        print(f"            {name:<13} {remat:<6}" + "".join(f"{size:9.1f}" for size in found))


def curves() -> None:
    told = (25, 50, 75, 100, 125, 150)
    print("curve       loss by step; validation loss in the end")
    print("            schedule      rate " + "".join(f"{step:>8}" for step in told) + "  validation")
    for rate in (4e-3, 1e-3):
        for schedule in ("1f1b", "pipedream"):
            losses, last, summary = _curve(schedule, rate)
            of_steps = "".join(f"{losses[step]:8.3f}" for step in told)
            print(f"            {schedule:<11} {rate:.4f} {of_steps}{last:12.4f}")
    print(f"            {summary}")


def _curve(schedule: str, rate: float) -> tuple[dict[int, float], float, str]:
    """(step -> loss, last validation loss, what the summary says of the pipeline)."""
    with tempfile.TemporaryDirectory() as folder:
        options = {"mesh": "1x1x4", "pipeline.schedule": schedule, "optimizer.clip": 0, "log.every": 25}
        options |= {"optimizer.learning-rate": rate, "run-dir": f"{folder}/run"}
        words = [f"--{name}={value}" for name, value in options.items()]
        command = [sys.executable, "-m", "jaxdist.train", *words]
        said = subprocess.run(command, check=True, capture_output=True, text=True).stderr
        lines = [json.loads(line) for line in Path(folder, "run/metrics.jsonl").read_text().splitlines()]
    losses = {line["step"]: line["loss"] for line in lines if "loss" in line}
    (pipeline,) = (line for line in said.splitlines() if line.startswith("pipeline"))
    return losses, lines[-1]["validation_loss"], pipeline


def main() -> None:
    asked = sys.argv[1:] or ["time", "compile", "memory", "curve"]
    wide = 4 if {"compile", "memory"} & set(asked) else 2
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", wide)
    print(f"jax {version('jax')}, {' '.join(f'{k}={v}' for k, v in SIZES.items())}, {ROWS} rows a micro-batch")
    for name, measure in (("time", times), ("compile", compiles), ("memory", memory), ("curve", curves)):
        if name in asked:
            measure()


if __name__ == "__main__":
    main()
