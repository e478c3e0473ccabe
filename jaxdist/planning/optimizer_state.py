"""Predict what an update rule keeps of each parameter between steps, from its row of the optimizer table."""

from __future__ import annotations

from jaxdist.config import OptimizerConfig
from jaxdist.planning.parameter_layout import Placed
from jaxdist.planning.predicted_collectives import Count

WIDTHS = {"float32": 4, "bfloat16": 2}
"""The bytes of a number of a moment, by `optimizer.moments`."""


def bytes_of(config: OptimizerConfig, p: Placed) -> Count:
    """Return the bytes of what is kept of a parameter, on its device or in the host's memory, without counters.

    One without a gradient has nothing.
    """
    return WIDTHS[config.moments] * config.rule.moments_of(p.place.role) * p.held
