"""What rings and Ulysses send, overlap and hold in programs for H100s that are not there, beside what was predicted.

    python benchmarks/context_target.py [--out RESULTS.txt] [CASE ...]

Llama 8B at 32k and 128k tokens, in `mixed`, with ZeRO 3 and blocks recomputed, as its file has it, and with one row
for each part of `data`. The case `flat` is a small model whose devices hold 1024 tokens each, whatever the axis.
"""

from __future__ import annotations

import argparse
from importlib.metadata import version
from pathlib import Path

from jaxdist.explain import explain
from jaxdist.explaining.report import Report
from jaxdist.programs.overlap import by_axes, line
from jaxdist.request import load

SMALL = {
    "precision": "bfloat16",
    "model.family": "llama",
    "model.layers": "4",
    "model.embed": "1024",
    "model.heads": "16",
    "model.kv_heads": "4",
    "model.mlp": "2048",
    "model.vocab": "8192",
    "parallel.zero": "0",
    "train.global_batch_size": "1",
}

CASES = {
    "flat": [
        ("", SMALL | {"mesh": f"context={n}", "model.sequence": str(1024 * n), "model.documents": documents})
        for documents in ("joined", "apart")
        for n in (2, 4, 8)
    ],
    "32k": [
        ("llama31_8b", {"mesh": "data=2,context=4", "model.sequence": "32768", "train.global_batch_size": "2"}),
    ],
    "128k": [
        ("llama31_8b", {"mesh": "data=4,context=16", "model.sequence": "131072", "train.global_batch_size": "4"}),
    ],
}
FORMS = {"flat": ("ring",), "32k": ("ring", "ulysses"), "128k": ("ring", "ulysses")}

MIB = 2**20


def row(name: str, overrides: dict[str, str], form: str) -> list[str]:
    """Compile it, and return lines about it."""
    asked = overrides | {"parallel.context": form, "train.accumulation": "1"}
    report = explain(load(name or None, asked), "h100")
    program = report.program
    kernels = report.kernels
    predicted = report.memory.total - report.memory.arguments
    knobs = " ".join(f"{knob}={value}" for knob, value in asked.items())
    return [
        f"{name or 'a small llama'} on H100s, {knobs}",
        *exchanged(report),
        f"    collectives that are not as predicted: {len(report.unknown)}",
        f"    calls of cuDNN attention: {kernels.flash_forward} forward, {kernels.flash_backward} backward",
        f"    copies and transposes: {kernels.copied / kernels.bytes:.2%} of {kernels.bytes / 1e9:.0f} GB accessed",
        f"    arguments {program.argument_bytes:,} bytes, predicted {report.memory.arguments:,}",
        f"    temporaries {program.temporary_bytes / MIB:,.1f} MiB, predicted over compiled "
        f"{predicted / program.temporary_bytes:.2f}",
        f"    compiled in {program.compile_seconds:.0f} s",
    ]


def exchanged(report: Report) -> list[str]:
    """Return a line about each kind of exchange over `context` alone: elements, and what overlaps them.

    ZeRO's collectives are over `data` too, or of other kinds.
    """
    lines = []
    for one in report.rows:
        if one.axes != ("context",) or one.kind not in ("collective-permute", "all-to-all"):
            continue
        places = [found for found in report.collectives if (found.axes, found.kind) == (one.axes, one.kind)]
        beside = sum(found.overlapped.matmuls > 0 for found in places)
        sent = line("context", by_axes(places)["context"])
        lines += [
            f"    {one.kind} over context: {one.elements:,} elements, predicted {one.predicted_elements:,}",
            f"    {beside} of {len(places)} places in the program overlap matmuls; {sent}",
        ]
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", help=f"of {', '.join(CASES)}; all by default")
    parser.add_argument("--out", type=Path, help="add the lines to this file too")
    asked = parser.parse_args()

    def tell(text: str) -> None:
        print(text, flush=True)
        if asked.out:
            with asked.out.open("a") as file:
                file.write(text + "\n")

    tell(f"jax {version('jax')}")
    for case in asked.cases or CASES:
        for form in FORMS[case]:
            for name, overrides in CASES[case]:
                tell("\n".join(row(name, overrides, form)))


if __name__ == "__main__":
    main()
