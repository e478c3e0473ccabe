"""Compile shipped models for H100s that are not there, and write how much of what they send overlaps compute.

python scripts/measure_overlap.py            write jaxdist/planning/exposure.toml; about six minutes on two cores
python scripts/measure_overlap.py NAME ...   print the rows of these cases, and write nothing
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import jax

sys.path.insert(0, str(Path(__file__).parent.parent))

from jaxdist.explain import explain
from jaxdist.planning.communication import purpose
from jaxdist.planning.exposure import FILE
from jaxdist.planning.hardware import GPUS
from jaxdist.programs.overlap import Sent, overlapped
from jaxdist.request import load

TARGET = "h100"

ZERO3 = {"parallel.zero": "3", "precision": "bfloat16"}
ZERO2 = {"parallel.zero": "2", "precision": "bfloat16"}
ZERO1 = {"parallel.zero": "1", "precision": "bfloat16"}
BLOCK = {"model.remat": "block"}

LOOP = {"model.unroll_layers": "false", "parallel.micro_batches": "inside"}
"""Loops over layers, and over micro-batches in each of them, whatever the shipped configuration has."""


@dataclass(frozen=True)
class Case:
    """A shipped model, its mesh, and what else is asked for."""

    model: str
    mesh: str
    rows: int
    options: dict[str, str]

    @property
    def text(self) -> str:
        """What is asked for, beside model and mesh."""
        return " ".join(f"--{knob} {value}" for knob, value in self.overrides.items() if knob != "mesh")

    @property
    def overrides(self) -> dict[str, str]:
        """All knobs."""
        return {"mesh": self.mesh, **LOOP, **self.options, "train.global_batch_size": str(self.rows)}


CASES = {
    "1b": Case("llama_1b", "8x1x1", 64, ZERO3),
    "1b block": Case("llama_1b", "8x1x1", 64, {**ZERO3, **BLOCK}),
    "1b full": Case("llama_1b", "8x1x1", 192, ZERO3),
    "1b hosts": Case("llama_1b", "64x1x1", 256, ZERO3),
    "1b zero 2": Case("llama_1b", "8x1x1", 64, ZERO2),
    "1b zero 1": Case("llama_1b", "8x1x1", 64, ZERO1),
    "1b micro": Case("llama_1b", "8x1x1", 128, {**ZERO3, "train.accumulation": "4"}),
    "3b": Case("llama_3b", "8x1x1", 16, ZERO3),
    "8b": Case("llama_8b", "8x1x1", 8, {**ZERO3, **BLOCK}),
    "8b none": Case("llama_8b", "8x1x1", 8, {**ZERO3, "model.remat": "none"}),
    "8b full": Case("llama_8b", "8x1x1", 16, {**ZERO3, "model.remat": "none"}),
    "8b hosts": Case("llama_8b", "64x1x1", 64, {**ZERO3, **BLOCK}),
    "8b tensors": Case("llama_8b", "8x8x1", 64, {**ZERO1, **BLOCK}),
    "8b sequence": Case("llama_8b", "4x2x1", 8, {**ZERO3, **BLOCK, "parallel.sequence": "true"}),
    "8b ring": Case("llama_8b", "data=2,context=4", 2, {**ZERO3, **BLOCK, "model.sequence": "32768"}),
    "qwen": Case("qwen3_4b", "8x1x1", 16, ZERO3),
    "experts": Case("olmoe_1b_7b", "data=2,expert=4", 16, ZERO3),
}


def rows(case: Case) -> Iterator[str]:
    """Compile a case, and yield a line for each part of its step that sends something."""
    report = explain(load(case.model, case.overrides), TARGET)
    found = defaultdict(list)
    for one in report.collectives:
        # What no loop runs is sent once per step, beside no layer.
        found[purpose(one), one.depth > 0].append(one)
    memory = report.peak_bytes / GPUS[TARGET].memory
    for (part, by_layer), collectives in sorted(found.items()):
        sent: Sent = overlapped(collectives)
        # Scalars are too few to say anything.
        if sent.total < 2**20:
            continue
        shares = ", ".join(
            f"{name} = {getattr(sent, name) / sent.total:.3f}" for name in ("products", "kernels", "exposed")
        )
        yield (
            f'    {{ part = "{part}", by_layer = {str(by_layer).lower()}, {shares}, memory = {memory:.2f}, '
            f'step = "{case.model} --mesh {case.mesh} {case.text}" }},'
        )


def main(names: list[str]) -> None:
    """Print the rows of these cases; without names, write those of all."""
    lines = []
    for name, case in CASES.items():
        if names and name not in names:
            continue
        found = list(rows(case))
        print(name, *found, sep="\n", flush=True)
        lines += found
    if not names:
        head = f"# Written by scripts/measure_overlap.py, from steps compiled for {TARGET} by jax {jax.__version__}.\n"
        FILE.write_text("\n".join([head + "steps = [", *lines, "]\n"]))


if __name__ == "__main__":
    main(sys.argv[1:])
