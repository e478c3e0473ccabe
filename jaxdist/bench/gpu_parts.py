"""Split the time of a step on a GPU by what its kernels are for, and compare it with the time of a good step."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from jaxdist.config import ModelConfig
from jaxdist.planning.timing import flops_per_token, matrices_per_layer
from jaxdist.programs.trace import Kernel, covered

ATTENTION = "attention"
MATMUL = "matmul"
OTHER = "other"

NAMES = {
    ATTENTION: re.compile("sdpa|fmha|flash|attention|compute_dot_do_o|convert_dq", re.IGNORECASE),
    MATMUL: re.compile(r"gemm|gemv|nvjet|xmma|cutlass|cublas|matmul|split_?k|(^|_)dot(_|\.|$)", re.IGNORECASE),
}
"""Patterns of kernel names; the first match counts.

They match cuDNN's flash attention and its helpers, and the matmuls of cuBLAS, Triton and CPUs.
"""

TARGET = 0.65
"""MFU that a step should reach."""


def part(name: str) -> str:
    """Return the part of the step, such as `MATMUL`, that a kernel of this name belongs to.

    `NAMES` is searched in its order, and the first kind that matches counts; `OTHER` if none does.
    """
    for kind, names in NAMES.items():
        if names.search(name):
            return kind
    return OTHER


def shares(ran: Iterable[Kernel], steps: int, longest: int = 10) -> dict[str, Any]:
    """Return seconds of a step by part, and the `longest` kernels, from the kernels that `ran` in `steps` steps.

    The kernels ran on one device. Where kernels overlap, the time counts as matmul first, then as attention, so
    that the parts add up to the busy time. Raises `ValueError` if there are no kernels.
    """
    ran = list(ran)
    if not ran:
        raise ValueError("the trace holds no kernels of the device")
    microseconds = 1e6
    seconds = {}
    counted = []
    before = 0.0
    for kind in (MATMUL, ATTENTION, OTHER):
        counted += [kernel for kernel in ran if part(kernel.name) == kind]
        # Time in which any kernel counted so far runs; overlap counts once.
        busy = covered(counted)
        seconds[kind] = (busy - before) / steps / microseconds
        before = busy
    calls: dict[str, list[float]] = {}
    for kernel in ran:
        calls.setdefault(kernel.name, []).append(kernel.end - kernel.start)
    rows = []
    for name, times in calls.items():
        each_step = sum(times) / steps / microseconds
        rows.append({"name": name, "part": part(name), "calls": len(times) / steps, "seconds": each_step})
    rows.sort(key=lambda row: row["seconds"], reverse=True)
    return {"seconds": seconds, "longest": rows[:longest]}


PARTS_OF_A_STEP = (
    "products with weights, at the measured rate",
    "products, beyond that",
    "attention",
    "other kernels",
    "no kernel runs",
    "step",
    f"step at {TARGET:.0%} of the peak",
)


def gap(
    model: ModelConfig, tokens: int, step: float, kernels: Mapping[str, float], rate: float, peak: float | None
) -> dict[str, float | None]:
    """Return the seconds of `PARTS_OF_A_STEP` of a step of `tokens`.

    All but the last two add up to `step`, the seconds of a step without a trace. `rate` is that of a matmul alone, in
    FLOP/s. The last, the seconds of a step at the target MFU, is None without a `peak`.
    """
    # Forward and backward pass multiply each weight three times, 2 FLOPs each.
    flops = 6 * (model.layers * matrices_per_layer(model) + model.vocab * model.embed) * tokens
    ideal = flops / rate
    # Tracing slows steps down, so gaps between kernels are what is left of a step without a trace.
    idle = step - sum(kernels.values())
    target = peak and flops_per_token(model) * tokens / (TARGET * peak)
    seconds = (ideal, kernels[MATMUL] - ideal, kernels[ATTENTION], kernels[OTHER], idle, step, target)
    return dict(zip(PARTS_OF_A_STEP, seconds, strict=True))
