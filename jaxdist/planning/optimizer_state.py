"""Predict what an update rule keeps of each parameter between steps, from its row of the optimizer table."""

from __future__ import annotations

import math
from collections.abc import Iterable

from jaxdist.config import OptimizerConfig
from jaxdist.optimizers.blocks import BLOCK, blocks, cut_by, has_blocks
from jaxdist.planning.parameter_layout import Placed
from jaxdist.planning.predicted_collectives import F32, Count

WIDTHS = {"float32": 4, "bfloat16": 2, "int8": 1}
"""The bytes of a number of a moment, by `optimizer.moments`."""


def bytes_of(config: OptimizerConfig, p: Placed) -> Count:
    """Return the bytes of what is kept of a parameter, on its device or in the host's memory, without counters.

    One without a gradient has nothing.
    """
    moments = config.rule.moments_of(p.place.role)
    each = _in_blocks(p) if config.moments == "int8" else WIDTHS[config.moments] * p.held
    # Of large matrices, for which a parameter without a shape stands, the means are few.
    kept = [mean.dims for mean in config.rule.means_of(p.place.role, len(p.shape)) if mean.kept] if p.shape else []
    return moments * each + F32 * sum(math.prod(p.part[dim] for dim in dims) for dims in kept)


def _in_blocks(p: Placed) -> Count:
    """Return the bytes of a moment in blocks: a code for each number, and a scale in f32 for each block."""
    if not p.shape:
        # It stands for parameters of several shapes, nearly all of them in large matrices.
        return p.held * (WIDTHS["int8"] + F32 / BLOCK)
    last = p.shape[-1]
    if not has_blocks(p.place.role, last):
        return F32 * p.held
    return WIDTHS["int8"] * p.held + F32 * (p.held * blocks(last) // last)


def cut_blocks(config: OptimizerConfig, parameters: Iterable[Placed]) -> str:
    """Return why a mesh cannot hold moments in blocks: it would cut some; empty where it cuts none."""
    if config.moments != "int8":
        return ""
    for p in parameters:
        role = p.place.role
        if role.differentiated and has_blocks(role, p.shape[-1]) and cut_by(p.shape[-1], p.part[-1]):
            return (
                f"optimizer.moments int8 has blocks of {BLOCK} numbers along the last dim of a parameter, and this "
                f"mesh splits the {p.shape[-1]} of {p.name} into parts of {p.part[-1]}; choose a mesh, or a "
                f"parallel.zero, whose parts are multiples of {BLOCK}, or set optimizer.moments to bfloat16"
            )
    return ""
