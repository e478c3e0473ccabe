"""Predict what crosses the mesh between the router and the experts of a layer, as `parallel.experts` sends it.

Over `expert` go the rows of tokens, E C of them for T k choices, and the weights of the chosen experts: to the experts
and back in the forward pass, and once more to them in the backward pass, which brings the gradients of results there
and those of tokens back: 5 f' T k D (n-1)/n elements, where f' = E C / (T k). These are all-to-alls of the first round.
Further rounds are as many as the queues are long, so they are in no prediction.

Where the experts' width is split, all of its devices need every choice and its weight.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from jaxdist.config import Config
from jaxdist.mesh import EXPERT
from jaxdist.planning.expert_rows import first_round
from jaxdist.planning.parameter_layout import compute_width
from jaxdist.planning.predicted_collectives import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    F32,
    REDUCE_SCATTER,
    Transfer,
    transfer,
)
from jaxdist.sharding import RESIDUAL, SEQUENCE, Layout

INT32 = 4
"""Bytes of the number of an expert."""


@dataclass(frozen=True)
class Calls:
    """How often the layers of a device run each collective in a step."""

    rows: int
    """All-to-alls of the rows of tokens, or of their gradients."""
    weights: int
    """All-to-alls of the weights of the chosen experts, or of their gradients."""
    choices: int
    """All-gathers of the choices, where the sequence is split; those of their weights are as many."""
    gradients: int
    """Reductions of the gradients of these weights, where the experts' width is split."""
    sums: int
    """All-reduces of a number for each row and expert, where the sequence is split."""


def predict(config: Config, layout: Layout, tokens: int, calls: Calls) -> Iterator[Transfer]:
    """Yield the transfers of a step whose micro-batches have so many `tokens` on a device; none without experts."""
    sizes = config.model
    if not sizes.traits.routed:
        return
    width = compute_width(config)
    seats = first_round(sizes, tokens)
    choices = tokens * sizes.experts_per_token
    per_row = tokens * layout.parts(SEQUENCE) // sizes.sequence * sizes.experts
    stream = layout.sequence_parallel
    mlp = layout.split("mlp")
    rows = calls.rows * seats * sizes.embed
    yield transfer(layout, "tokens to and from experts", ALL_TO_ALL, {EXPERT}, calls.rows, rows, width)
    of_rows = calls.sums * per_row
    yield transfer(layout, "loads of experts", ALL_REDUCE, layout.split(RESIDUAL), calls.sums, of_rows, F32)
    what = "weights of chosen experts"
    yield transfer(layout, what, ALL_TO_ALL, {EXPERT}, calls.weights, calls.weights * seats, width)
    if not stream:
        yield transfer(layout, what, ALL_REDUCE, mlp, calls.gradients, calls.gradients * choices, width)
        return
    yield transfer(layout, "chosen experts", ALL_GATHER, stream, calls.choices, calls.choices * choices, INT32)
    yield transfer(layout, what, ALL_GATHER, stream, calls.choices, calls.choices * choices, width)
    yield transfer(layout, what, REDUCE_SCATTER, stream, calls.gradients, calls.gradients * choices, width)
