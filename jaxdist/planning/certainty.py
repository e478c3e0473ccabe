"""How sure a predicted time is: by how much those of published steps of the same kind were wrong.

`scripts/fit_planner.py` predicts every published step by constants that are fitted to the other sources, and writes
what it finds into `rates.toml`, beside these constants.
"""

from __future__ import annotations

from typing import NamedTuple

from jaxdist.planning.rates import table

ACROSS = "ZeRO 3 across hosts"
IN_HOST = "ZeRO 3 in a host"
PIPELINE = "pipeline"
TENSORS = "tensors split"
DATA = "data alone"
FLOAT8 = "fp8"
"""Of steps of any kind in 8 bits: how fast fp8 is differs more than how steps are split."""


class Interval(NamedTuple):
    """Seconds between which nine in ten of the published steps of a kind lay, if predicted as this one."""

    low: float
    high: float


def kind_of(by_layer: bool, leaves_host: bool, pipelined: bool, tensors_split: bool) -> str:
    """Return the kind of a step: how it is split says most about how its prediction is wrong.

    `by_layer` is whether weights are gathered layer by layer, over a group that `leaves_host` or does not.
    """
    if by_layer and leaves_host:
        return ACROSS
    if pipelined:
        return PIPELINE
    if tensors_split:
        return TENSORS
    return IN_HOST if by_layer else DATA


def interval(kind: str, seconds: float, float8: bool = False) -> Interval:
    """Return the interval of a predicted time of a kind of step; in fp8 it is also that of such steps of any kind."""
    names = [kind, FLOAT8] if float8 else [kind]
    found = [table()["errors"][name] for name in names]
    low, high = min(one["low"] for one in found), max(one["high"] for one in found)
    return Interval(low * seconds, high * seconds)


def coverage() -> float:
    """Return the share of a source's steps in the intervals that the steps of others make; the mean over sources."""
    return table()["coverage"]["left_out"]


def tie(one: str, other: str) -> float:
    """Return the difference of two times below which they are a tie, as a share of the shorter one.

    Of two steps of one model on as many devices, what both have in common cancels: this is the median error of such
    differences, between kinds of steps and within one.
    """
    return table()["ties"]["same_kind" if one == other else "other_kind"]
