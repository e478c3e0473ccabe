"""What a run checks on its own devices before its first step."""

from __future__ import annotations

import jax

from jaxdist.config import RequestError
from jaxdist.models import numerics
from jaxdist.models.attention import AttentionCall
from jaxdist.training.run import Run

WINDOW = 100
"""Longest sliding window of the comparison: shorter than its rows, so that the window hides something."""


def attention_call(run: Run, window: int) -> AttentionCall:
    """Return what decides about attention in a layer with this window, for a micro-batch on the whole mesh."""
    return AttentionCall.of(run.config.model, window, run.layout, run.split.rows * run.split.ranks, run.dtype)


def check_attention(run: Run) -> str:
    """Compare cuDNN's attention with the plain form in float32; return the result, or "" where cuDNN is not used.

    This runs on one device of each process, with the run's dtype, head size and grouped-query ratio, on few tokens.
    Raises `RequestError` where it is wrong.
    """
    model = run.config.model
    if model.images:
        return ""
    if attention_call(run, model.window).why_not_cudnn:
        return ""
    group = model.heads // model.key_value_heads
    device = jax.local_devices()[0]
    sizes = numerics.Sizes(heads=2 * group, kv_heads=2, size=model.head_size, window=min(model.window, WINDOW))
    found = numerics.attention_of(run.layout, sizes, run.dtype, device)
    for one in found:
        if not one.fine:
            raise RequestError(
                f"cuDNN's attention is wrong on this {device.device_kind}: {one.what} is off by {one.error:.2g} of its "
                f"largest value, where {run.dtype.name} explains {one.bound:.2g}; install another cuDNN or driver, or "
                f"train with --model.attention blocks, which does without it"
            )
    worst = max(one.error for one in found)
    return f"cuDNN's attention and its gradients are off by {worst:.2g} of their largest value from plain float32"
