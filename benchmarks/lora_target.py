"""What fine-tuning Llama 3.1 8B by LoRA takes on GPUs that are not there: bytes held and moved, beside full training.

    python benchmarks/lora_target.py [--out RESULTS.txt] [ROW ...]

Each row is compiled in a process of its own, one after the other, and held against its prediction.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from jaxdist.explain import explain
from jaxdist.explaining.report import Report
from jaxdist.request import load

ROWS_OF_4096 = {"model.sequence": "4096", "model.remat": "block"}
ADAPTERS = {"model.lora_rank": "16", "model.lora_base": "bfloat16"}
EIGHT = {"mesh": "8x1x1", "parallel.zero": "3", "train.global_batch_size": "8", **ROWS_OF_4096}
ONE = {"mesh": "1x1x1", "parallel.zero": "0", "train.global_batch_size": "1", **ROWS_OF_4096}

ROWS = [
    ("llama31_8b", 8, {**EIGHT, **ADAPTERS}),
    ("llama31_8b", 8, EIGHT),
    ("llama31_8b", 1, {**ONE, **ADAPTERS}),
    ("llama31_8b", 1, {**ONE, **ADAPTERS, "model.lora_base": "float32"}),
    *(
        ("llama31_8b", 1, {**ONE, **ADAPTERS, "model.lora_base": base, "model.sequence": "2048"}, "rtx4090")
        for base in ("bfloat16", "int8", "nf4")
    ),
]
"""Adapters of all seven weights; `mixed`, as the file has it; a row of 4096 tokens an H100, 2048 an RTX 4090."""

GIB = 2**30


def row(name: str, count: int, overrides: dict[str, str], target: str = "h100") -> list[str]:
    """Compile a row, and describe it in lines."""
    report = explain(load(name, overrides), target)
    program = report.program
    asked = " ".join(f"{knob}={value}" for knob, value in overrides.items())
    temporary = report.memory.total - report.memory.arguments
    return [
        f"{name} {count} x {target} {asked} (jax {program.jax}, compiled in {program.compile_seconds:.0f} s)",
        f"    arguments {program.argument_bytes:,} bytes, predicted {report.memory.arguments:,}",
        f"    temporary {program.temporary_bytes / GIB:.2f} GiB, predicted {temporary / GIB:.2f}",
        f"    peak {program.peak_bytes / GIB:.2f} of {report.gpu.memory / GIB:.1f} GiB: {report.too_large or 'fits'}",
        *(f"    {line}" for line in _moved(report)),
    ]


def _moved(report: Report) -> list[str]:
    lines = []
    for one in report.rows:
        purposes = ", ".join(one.what) or "scalars"
        lines.append(
            f"{one.kind} over {'+'.join(one.axes)}: {one.payload_bytes:,} bytes, predicted {one.predicted_bytes:,} "
            f"({purposes})"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", type=int, help="which rows, from 0; all by default")
    parser.add_argument("--out", type=Path, help="add the lines to this file too")
    asked = parser.parse_args()
    for number in asked.rows or range(len(ROWS)):
        lines = row(*ROWS[number])
        print("\n".join(lines), flush=True)
        if asked.out:
            with asked.out.open("a") as file:
                file.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
