"""What the steps of a pipeline hold, compiled for four H100s that are not there, beside what is predicted.

    python -m benchmarks.pipeline_target [--out RESULTS.txt] [ROW ...]

Every schedule with every kind of recomputation that it takes, and `zb-h1` with two chunks on each rank too. Each step
is compiled in a process of its own, one after the other. Exit code 1 where a prediction is outside the bounds.
"""

from __future__ import annotations

import argparse
import sys
from importlib.metadata import version
from pathlib import Path

from tests.memory.staged import PAIRS, compiled, temporaries

MIB = 2**20

LOW, HIGH = 0.8, 1.25
"""Bounds of what is predicted over what XLA plans."""

TWO_CHUNKS = {"virtual_stages": "2"}

ROWS = [*((*pair, {}) for pair in PAIRS), *(("zb-h1", remat, TWO_CHUNKS) for remat in ("none", "dots"))]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", type=int, help="which rows, from 0; all by default")
    parser.add_argument("--out", type=Path, help="add the lines to this file too")
    asked = parser.parse_args()
    outside = 0

    def tell(line: str) -> None:
        print(line, flush=True)
        if asked.out:
            with asked.out.open("a") as file:
                file.write(f"{line}\n")

    tell(f"jax {version('jax')}, jaxlib {version('jaxlib')}; temporaries of a device, MiB")
    tell(f"{'schedule':<12} {'chunks':>6}  {'recomputes':<10} {'predicted':>9} {'compiled':>9}  ratio")
    for number in asked.rows or range(len(ROWS)):
        schedule, remat, knobs = ROWS[number]
        report = compiled(schedule, remat, **knobs)
        predicted, planned = temporaries(report)
        ratio = predicted / planned
        remark = ""
        if not LOW < ratio < HIGH:
            outside += 1
            remark = "  outside"
        if report.program.argument_bytes != report.memory.arguments:
            outside += 1
            remark += "  arguments differ"
        chunks = report.pipeline.stages.virtual
        tell(
            f"{schedule:<12} {chunks:>6}  {remat:<10} {predicted / MIB:>9,.0f} {planned / MIB:>9,.0f}  "
            f"{ratio:.2f}{remark}"
        )
    return int(outside > 0)


if __name__ == "__main__":
    sys.exit(main())
