"""How many rows the experts compute for the tokens of a device: a first round of fixed capacity, and further ones.

`parallel.experts` gives each expert a queue of a device's tokens and takes equally many rows of every queue in a round.
How long the queues get depends on the router, so that a prediction has to assume it.
"""

from __future__ import annotations

import math

import numpy as np

from jaxdist.config import ModelConfig
from jaxdist.parallel.experts import rounds_for
from jaxdist.planning.predicted_collectives import Count, Numbers

IMBALANCE = 1.25
"""The longest queue over the mean, as predictions of time assume it. With popularities that differ by about 10 %, 8192
tokens have a longest queue of 1.16 times the mean where each chooses 2 of 8 experts, and of 1.24 where each chooses 8
of 64."""


def assumption(m: ModelConfig) -> str:
    """Return what predictions of time assume of the router of `m`, in a sentence; empty without one."""
    if not m.traits.routed:
        return ""
    return (
        f"the experts are taken to be balanced: on each device the longest of the {m.experts} queues has {IMBALANCE:g} "
        f"times the mean, and a router that is less balanced takes further rounds"
    )


def first_round(m: ModelConfig, tokens: Count) -> Count:
    """Return the rows of the first round, over all queues: E C."""
    return m.experts * all_rounds(m, tokens)[0]


def padding(m: ModelConfig, tokens: float) -> float:
    """Return the rows of the first round over those that tokens ask for (f'): the capacity factor, rounded up."""
    return first_round(m, tokens) / (m.experts_per_token * tokens)


def all_rounds(m: ModelConfig, tokens: Numbers) -> tuple[Numbers, Numbers, Numbers]:
    """Return (rows of a queue in the first round, further rounds, rows of a queue in each of these).

    Each is a number, or an array of the shape of `tokens`. The longest queue has the assumed `IMBALANCE`.
    """
    if isinstance(tokens, np.ndarray):
        counts, kinds = np.unique(tokens, return_inverse=True)
        found = np.array([all_rounds(m, count) for count in counts.tolist()], float).reshape(-1, 3)
        first, times, further = found.T[:, kinds]
        return first, times, further
    first, further = rounds_for(round(tokens), m.experts_per_token, m.experts, m.capacity_factor)
    longest = IMBALANCE * tokens * m.experts_per_token / m.experts
    return first, math.ceil(max(0.0, longest - first) / further), further


def rows_of_queue(m: ModelConfig, tokens: Numbers) -> Numbers:
    """Return the rows that all rounds together take of each queue."""
    first, times, further = all_rounds(m, tokens)
    return first + times * further
