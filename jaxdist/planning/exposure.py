"""What runs beside the communication of our own programs, and where XLA lets nothing run beside it.

`exposure.toml` has it of steps of shipped models, compiled for H100s that were not there: of the bytes that a device
sends for a part of its step, the shares that `products` (matmuls) run beside, that only smaller `kernels` do, and that
are `exposed`; `by_layer` says whether a loop over layers sends them, and `memory` what the step needs of the GPU's.
`scripts/measure_overlap.py` compiles the steps and writes the file. It counts bytes, not time.

XLA's scheduler stops where a step would not fit otherwise: with more than `CROWDED` of the memory in use, what is sent
layer by layer waits for nothing, and the layers wait for it. XLA gives the temporaries 95 % of what inputs and outputs
leave of 80 % of the GPU's memory (`GetSchedulerMemoryLimit`), so that steps of 76 to 80 % reach its limit. Of the
compiled steps two lie above, at 0.87 and 1.08, and the others below, up to 0.76.
"""

from __future__ import annotations

import tomllib
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from jaxdist.mesh import DATA, ZERO_AXES
from jaxdist.mesh.split import Split
from jaxdist.planning.clusters import Cluster
from jaxdist.planning.hardware import GPUS, Gpu
from jaxdist.planning.kernels_time import Numbers
from jaxdist.planning.rates import Rates

FILE = Path(__file__).with_name("exposure.toml")

CROWDED = 0.76
"""The share of a GPU's memory above which XLA overlaps hardly anything."""


@cache
def compiled_steps() -> list[dict[str, Any]]:
    """Return the rows of `exposure.toml`."""
    return tomllib.loads(FILE.read_text())["steps"]


def crowded(needed: Numbers, gpu: Gpu | None) -> Numbers:
    """Return whether a step that needs so many bytes is too large for XLA to overlap what it sends."""
    return needed > (CROWDED * gpu.memory if gpu else np.inf)


def rates_in(cluster: Cluster, needed: Numbers) -> Rates:
    """Return the rates of steps that need so many bytes of a device: those that are too large hide nothing."""
    rates = cluster.rates
    waits = crowded(needed, GPUS.get(cluster.gpu))
    # An array where there are many steps.
    return replace(rates, hiding=np.where(waits, 0.0, rates.hiding))  # type: ignore[arg-type]


def note(split: Split, needed: float, gpu: Gpu | None) -> str:
    """Return what a step that needs so many bytes loses by it, in a sentence; empty where it loses nothing.

    Only what is sent layer by layer, over the axes of ZeRO 2 and 3, could run beside the layers.
    """
    if gpu is None or not crowded(needed, gpu):
        return ""
    if split.config.parallel.zero < 2 or split.size(*ZERO_AXES) == 1:
        return ""
    found = [
        row["exposed"]
        for row in compiled_steps()
        if row["by_layer"] and row["part"] == DATA and row["memory"] > CROWDED
    ]
    return (
        f"the step needs {needed / gpu.memory:.0%} of each GPU's memory: above {CROWDED:.0%}, XLA runs hardly anything "
        f"beside what is sent layer by layer ({min(found):.0%} to {max(found):.0%} of it is exposed in compiled "
        f"steps), and its time counts in full"
    )
