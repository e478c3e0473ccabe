"""What devices and links reach in real steps: constants that are fitted to published times of steps.

`rates.toml` has them, each with its spread; `scripts/fit_planner.py` fits and writes that file. They are shares of what
a cluster can do at best, so that a cluster of which only that is known has its own times.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from jaxdist.planning.hardware import GPUS

FILE = Path(__file__).with_name("rates.toml")

GENERATIONS = {7: "v100", 8: "a100", 9: "h100", 10: "b200", 12: "b200"}
"""The GPU whose steps were measured, by the major number of the CUDA compute capability."""

NEWEST = "h100"
"""The GPU that stands for one of which the generation is not known."""


@dataclass(frozen=True)
class Rates:
    """The constants of the time of a step. Those without a unit are shares or factors."""

    matmul: float
    """The rate of large matmuls in a step, over that of the best matmul (`Cluster.matmul`)."""
    float8: float
    """The rate of large matmuls in fp8, and of scaling and rounding what they multiply, over twice the peak in 16 bits.
    """
    attention: float
    """The rate of fused attention's forward pass over the peak."""
    few_tokens: float
    """The time of a matmul grows by this over its rows."""
    narrow: float
    """It grows by this times the `model` axis over the model's width."""
    scores: float
    """Bytes that attention by matmuls moves for each score in its forward pass."""
    values: float
    """Bytes that all other kernels move for a token, over the model's width: of one layer, in 16 bits, forward."""
    launch: float
    """Seconds to launch the kernels of a layer, forward and backward: no layer is faster."""
    tensor: float
    """The part of the collectives over `model` for which a step waits."""
    tensor_hidden: float
    """The same of programs that compute while they send tensors, piece by piece."""
    network: float
    """The bandwidth of collectives of weights and gradients over that of the links."""
    hiding: float
    """The part of a step behind which gathers and sums of layers hide."""
    messages: float
    """The time of messages between stages over that of the links."""
    update: float
    """Bytes that the optimizer moves, over those of its state and masters."""
    step: float
    """Seconds of each step whatever it computes: input, clipping, the end of the schedule."""
    stragglers: float
    """The part of a step that each doubling of the devices adds from 8 on."""


NEUTRAL = Rates(
    matmul=1,
    float8=1,
    attention=0.65,
    few_tokens=0,
    narrow=0,
    scores=16,
    values=0,
    launch=0,
    tensor=1,
    tensor_hidden=1,
    network=1,
    hiding=1,
    messages=1,
    update=1,
    step=0,
    stragglers=0,
)
"""The rates of CPUs, of which no steps are published: as good as what was measured of the cluster. Their kernels move
as much as those of GPUs."""


@cache
def table() -> dict[str, Any]:
    """Return the contents of `rates.toml`."""
    return tomllib.loads(FILE.read_text())


def published_rates(gpu: str) -> Rates:
    """Return the rates that published steps reached on this GPU."""
    if gpu == "cpu":
        return replace(NEUTRAL, values=table()["values"]["value"])
    generation = NEWEST
    if gpu in GPUS:
        generation = GENERATIONS[GPUS[gpu].capability[0]]
    found: dict[str, float] = {}
    for field in fields(Rates):
        value = table()[field.name]["value"]
        found[field.name] = value[generation] if isinstance(value, dict) else value
    return Rates(**found)
