"""What options of XLA's change in the schedule of a step for several GPUs, which are not there.

    python benchmarks/flags_target.py [--out RESULTS.txt] [CASE ...] [--only 'VARIANT+VARIANT']

Each variant is compiled in a process of its own. For the axes that are sent over, the bytes of one device in a step, by
what runs beside them: matrix products / smaller kernels / nothing; what copies and transposes read and write; how many
products there are; and what the program holds. Which options jaxdist sets is chosen by these numbers
(`jaxdist/cluster/xla_options.py`).
"""

from __future__ import annotations

import argparse
import importlib
import os
from collections.abc import Sequence
from pathlib import Path

import jax

from jaxdist.cluster import xla_options
from jaxdist.config import Config
from jaxdist.explain import explain
from jaxdist.output.units import size
from jaxdist.programs.overlap import by_axes
from jaxdist.request import load
from jaxdist.training import run

TARGET = "h100"

CASES = {
    "data": ("llama_8b", {"mesh": "8x1x1"}),
    "kept": ("llama_8b", {"mesh": "8x1x1", "model.remat": "none"}),
    "accumulation": ("llama_8b", {"mesh": "8x1x1", "train.accumulation": "2", "train.global_batch_size": "16"}),
    "hosts": ("llama_8b", {"mesh": "64x1x1", "train.global_batch_size": "64"}),
    "sequence": (
        "llama_8b",
        {"mesh": "16x8x1", "parallel.sequence": "true", "train.accumulation": "4", "train.global_batch_size": "64"},
    ),
    "tensor": ("llama_8b", {"mesh": "4x2x1", "parallel.sequence": "true"}),
    "1b": ("llama_1b", {"mesh": "8x1x1", "train.global_batch_size": "64"}),
    "small": ("llama_1b", {"mesh": "8x1x1", "model.remat": "block", "model.sequence": "2048"}),
    "zero2": ("llama_1b", {"mesh": "8x1x1", "model.remat": "block", "model.sequence": "2048", "parallel.zero": "2"}),
}
"""As the files have it, but for what is named: 8B in `mixed`, ZeRO 3 and remat block, 8192 tokens a row."""

COMMON = {"precision": "bfloat16", "train.global_batch_size": "8", "parallel.zero": "3"}
"""A row or two for each device, so that the step fits: where memory is short, XLA lets nothing run beside anything."""

SCHEDULER = "--xla_gpu_enable_latency_hiding_scheduler"
GATHER, SCATTER, REDUCE = (
    f"--xla_gpu_enable_pipelined_{kind}" for kind in ("all_gather", "reduce_scatter", "all_reduce")
)
DOUBLE = "--xla_gpu_enable_while_loop_unrolling=WHILE_LOOP_UNROLLING_DOUBLE_BUFFER"
COMBINE = " ".join(f"--xla_gpu_{kind}_combine_threshold_bytes=1000000000" for kind in ("all_gather", "reduce_scatter"))
VARIANTS = {
    "as it comes": {},
    "no scheduler": {SCHEDULER: "false"},
    "scheduler": {SCHEDULER: "true"},
    "gather": {GATHER: "true"},
    "scatter": {SCATTER: "true"},
    "no scatter": {SCATTER: "false"},
    "gather, no scatter": {GATHER: "true", SCATTER: "false"},
    "gather, scatter": {GATHER: "true", SCATTER: "true"},
    "scheduler, gather, scatter": {SCHEDULER: "true", GATHER: "true", SCATTER: "true"},
    "reduce": {REDUCE: "true"},
    "double buffer": {DOUBLE: ""},
    "combined": {COMBINE: ""},
}
"""What is asked for in XLA_FLAGS. What is not asked for stays as XLA has it, which is not the same as `false`: jaxlib
0.11 and 0.12 schedule otherwise where the scheduler is off, on, or not named."""


def plain_step(config: Config, devices: Sequence[jax.Device]) -> jax.stages.Lowered:
    """The train step, without jaxdist's own options. For the process that compiles."""
    xla_options.OPTIONS.clear()
    return run.lower_step(config, devices)


def measured(name: str, overrides: dict[str, str], variant: str) -> str:
    """A line."""
    os.environ["XLA_FLAGS"] = " ".join(f"{name}={value}".rstrip("=") for name, value in VARIANTS[variant].items())
    try:
        report = explain(load(name, {**COMMON, **overrides}), TARGET)
    except RuntimeError as error:
        return f"    {variant:<27} died: {str(error)[-150:]!r}"
    sent = by_axes(report.collectives)
    parts = [
        f"{axes} {size(one.products)} / {size(one.kernels)} / {size(one.exposed)}"
        for axes, one in sent.items()
        if one.total >= 2**20
    ]
    kernels, program = report.kernels, report.program
    copies = f"copies {kernels.copied / kernels.bytes:.1%} of {size(kernels.bytes)}"
    products = f"{sum(kernels.products.values())} products"
    temporaries = f"temporaries {size(program.temporary_bytes)}, compiled in {program.compile_seconds:.0f} s"
    return f"    {variant:<27} {', '.join(parts)}; {copies}; {products}; {temporaries}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", help=f"of {', '.join(CASES)}; all by default")
    parser.add_argument("--only", default="", help="variants, with + between them")
    parser.add_argument("--out", type=Path, help="add the lines to this file too")
    asked = parser.parse_args()

    def tell(line: str) -> None:
        print(line, flush=True)
        if asked.out:
            with asked.out.open("a") as file:
                file.write(line + "\n")

    run.lower_step = importlib.import_module(
        "flags_target"
    ).plain_step  # not of `__main__`, which no other could import
    for case in asked.cases or CASES:
        name, overrides = CASES[case]
        tell(
            f"jax {jax.__version__}, {case}: {name} " + " ".join(f"{k}={v}" for k, v in {**COMMON, **overrides}.items())
        )
        for variant in asked.only.split("+") if asked.only else VARIANTS:
            tell(measured(name, overrides, variant))


if __name__ == "__main__":
    main()
