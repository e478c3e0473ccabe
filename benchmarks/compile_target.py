"""How long it takes, and how much memory, to compile shipped configs for GPUs that are not there.

    python benchmarks/compile_target.py [--out RESULTS.txt] [ROW ...]

Each row is compiled in a process of its own, one after the other. The promise: under 60 s and 10 GiB on 2 cores.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

from jaxdist.explain import explain
from jaxdist.request import load

PIPELINE = {"parallel.zero": "1", "model.remat": "stage", "pipeline.schedule": "1f1b", "pipeline.microbatches": "16"}
"""Gradients are reduced once per step, after the loops."""

LOOP = {"model.remat": "block", "model.unroll_layers": "false", "parallel.micro_batches": "inside"}

ROWS = [
    ("llama_8b", "h100", 64, {**LOOP, "mesh": "64x1x1", "train.accumulation": "8"}),
    ("llama_8b", "h100", 512, {**LOOP, "mesh": "512x1x1"}),
    ("llama_8b", "h100", 512, {**LOOP, "mesh": "64x8x1"}),
    ("llama_70b", "h100", 512, {"mesh": "512x1x1"}),
    ("llama_70b", "h100", 512, {"mesh": "64x8x1", "train.accumulation": "8", "parallel.sequence": "true"}),
    ("llama_8b", "h100", 512, {"mesh": "16x8x4", **PIPELINE}),
    ("llama_70b", "h100", 512, {"mesh": "16x8x4", **PIPELINE, "parallel.sequence": "true"}),
]
"""All with ZeRO 3, remat block, `mixed` and 512 rows of 8192 tokens, as the files have it, but for what is named."""

GIB = 2**30


def row(name: str, target: str, count: int, overrides: dict[str, str]) -> list[str]:
    """Compile it, and tell in lines."""
    start, before = time.perf_counter(), os.times()
    report = explain(load(name, overrides), target)
    program = report.program
    wall, after = time.perf_counter() - start, os.times()
    cpu = sum(after[2:4]) - sum(before[2:4])  # of children
    asked = " ".join(f"{knob}={value}" for knob, value in overrides.items())
    as_predicted = "; ".join(f"{'+'.join(row.axes)} {row.kind}: {row.remark}" for row in report.differences)
    return [
        f"{name} {count} x {target} {asked}",
        f"    in all {wall:.1f} s wall, {cpu:.1f} s CPU: lower {program.lower_seconds:.1f} s, compile "
        f"{program.compile_seconds:.1f} s; process {program.process_bytes / GIB:.2f} GiB; jax {program.jax}",
        f"    per device: arguments {program.argument_bytes / GIB:.2f} GiB, temporary "
        f"{program.temporary_bytes / GIB:.2f} GiB, in all {program.peak_bytes / GIB:.2f} of "
        f"{report.gpu.memory / GIB:.1f} GiB: {report.too_large or 'fits'}",
        f"    collectives: {as_predicted or 'as predicted, to the element'}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", type=int, help="which rows, from 0; all by default")
    parser.add_argument("--out", type=Path, help="add the lines to this file too")
    asked = parser.parse_args()
    load_now = lambda: f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
    for number in asked.rows or range(len(ROWS)):
        lines = [load_now(), *row(*ROWS[number])]
        print("\n".join(lines), flush=True)
        if asked.out:
            with asked.out.open("a") as file:
                file.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
