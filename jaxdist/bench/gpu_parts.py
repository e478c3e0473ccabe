"""What a step on a GPU consists of: the time of its kernels by what they are for, and the gap to a good one."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from jaxdist.config import ModelConfig
from jaxdist.planning.timing import flops_per_token, matrices_per_layer
from jaxdist.planning.trace import Kernel, covered

ATTENTION, MATMUL, OTHER = "attention", "matmul", "other"

NAMES = {
    ATTENTION: re.compile("sdpa|fmha|flash|attention|compute_dot_do_o|convert_dq", re.IGNORECASE),
    MATMUL: re.compile(r"gemm|gemv|nvjet|xmma|cutlass|cublas|matmul|split_?k|(^|_)dot(_|\.|$)", re.IGNORECASE),
}
"""Of kernels, the first that fits: cuDNN's flash attention and its helpers; products of cuBLAS, Triton and CPUs."""

TARGET = 0.65
"""MFU that a step should reach."""


def part(name: str) -> str:
    """What a kernel of this name is for."""
    return next((one for one, names in NAMES.items() if names.search(name)), OTHER)


def shares(ran: Iterable[Kernel], steps: int, longest: int = 10) -> dict[str, Any]:
    """Seconds of a step in which a product runs, else attention, else another kernel; and the longest kernels.

    Of one device, on which these kernels `ran` in so many steps. Raises `ValueError` where there are none.
    """
    ran = list(ran)
    if not ran:
        raise ValueError("the trace holds no kernels of the device")
    calls: dict[str, list[float]] = {}
    for one in ran:
        calls.setdefault(one.name, []).append(one.end - one.start)
    seconds, seen, before = {}, [], 0.0
    for kind in (MATMUL, ATTENTION, OTHER):
        seen += [one for one in ran if part(one.name) == kind]
        seconds[kind], before = covered(seen) - before, covered(seen)
    rows = [
        {"name": name, "part": part(name), "calls": len(times) / steps, "seconds": sum(times) / steps / 1e6}
        for name, times in calls.items()
    ]
    rows.sort(key=lambda row: row["seconds"], reverse=True)
    return {"seconds": {kind: time / steps / 1e6 for kind, time in seconds.items()}, "longest": rows[:longest]}


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
    """Seconds of `PARTS_OF_A_STEP` of so many `tokens`: all but the last two add up to `step`, that of one without a
    trace.

    `rate` is that of a product alone, in FLOP/s; the last, of a step as it should be, is None without a `peak`.
    """
    weights = 6 * (model.layers * matrices_per_layer(model) + model.vocab * model.embed) * tokens
    ideal, good = weights / rate, peak and flops_per_token(model) * tokens / (TARGET * peak)
    idle = step - sum(kernels.values())
    found = ideal, kernels[MATMUL] - ideal, kernels[ATTENTION], kernels[OTHER], idle, step, good
    return dict(zip(PARTS_OF_A_STEP, found, strict=True))
