"""What programs of experts for H100s that are not there copy, send and hold, beside what was predicted.

    python benchmarks/experts_target.py [--out RESULTS.txt]

`olmoe_1b_7b` in bfloat16, with a row of 4096 tokens on each device and blocks recomputed.
"""

from __future__ import annotations

import argparse
from importlib.metadata import version
from pathlib import Path

from jaxdist.explain import explain
from jaxdist.request import load

ROWS = [
    {"mesh": "expert=8", "parallel.zero": "3", "train.global_batch_size": "8"},
    {"mesh": "data=2,expert=4", "parallel.zero": "3", "train.global_batch_size": "8"},
    {"mesh": "data=4,expert=2", "parallel.zero": "1", "train.global_batch_size": "8"},
    {"mesh": "data=8,expert=8", "parallel.zero": "3", "train.global_batch_size": "64"},
]

COMMON = {"precision": "bfloat16", "model.remat": "block", "model.sequence": "4096", "train.accumulation": "1"}

GIB = 2**30


def row(overrides: dict[str, str]) -> list[str]:
    """Compile it, and tell in lines."""
    report = explain(load("olmoe_1b_7b", COMMON | overrides), "h100")
    program = report.program
    kernels = report.kernels
    predicted = report.memory.total - report.memory.arguments
    asked = " ".join(f"{knob}={value}" for knob, value in overrides.items())
    return [
        f"olmoe_1b_7b on H100s, {asked}",
        f"    copies and transposes: {kernels.copied / kernels.bytes:.2%} of {kernels.bytes / 1e9:.0f} GB accessed",
        f"    collectives that are not as predicted: {len(report.unknown)}",
        f"    arguments {program.argument_bytes:,} bytes, predicted {report.memory.arguments:,}",
        f"    temporaries {program.temporary_bytes / GIB:.2f} GiB, predicted over compiled "
        f"{predicted / program.temporary_bytes:.2f}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the lines to this file too")
    asked = parser.parse_args()
    lines = [f"jax {version('jax')}"]
    for overrides in ROWS:
        lines += row(overrides)
    print("\n".join(lines))
    if asked.out:
        asked.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
