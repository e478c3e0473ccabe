"""Predict what crosses the mesh between the router and the experts of a layer, as `parallel.experts` sends it.

Over `expert` go the rows of tokens, E C of them for T k choices, and the weights of the chosen experts: to the experts
and back in the forward pass, and once more to them in the backward pass, which brings the gradients of results there
and those of tokens back: 5 f' T k D (n-1)/n elements, where f' = E C / (T k). These are all-to-alls of the first round.
Further rounds are as many as the queues are long, so they are in no prediction.

Where the experts' width is split, all of its devices need every choice and its weight.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from jaxdist.mesh import EXPERT
from jaxdist.mesh.split import compute_width
from jaxdist.models import Model
from jaxdist.parallel.placing import of_sums
from jaxdist.planning.expert_rows import first_round
from jaxdist.planning.frozen import reports_routers
from jaxdist.planning.parameter_layout import Placed
from jaxdist.planning.predicted_collectives import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    F32,
    INT32,
    REDUCE_SCATTER,
    Count,
    Transfer,
    transfer,
)
from jaxdist.planning.runs import Step
from jaxdist.sharding import LAYERS, RESIDUAL, SEQUENCE

ROWS = "tokens to and from experts"
"""`Transfer.what` of the rows of tokens that go to their experts and come back."""


def predict(step: Step) -> Iterator[Transfer]:
    """Yield the transfers between the routers and the experts of the layers; none without experts."""
    sizes = step.config.model
    if not sizes.traits.routed:
        return
    layout = step.layout
    runs = step.runs
    passes = runs.passes
    width = compute_width(step.config)
    seats = first_round(sizes, step.tokens)
    choices = step.tokens * sizes.experts_per_token
    per_row = step.tokens * layout.parts(SEQUENCE) // sizes.sequence * sizes.experts
    # The factor of what the shared experts make goes the same way.
    factors = choices + step.tokens * sizes.gates_shared
    stream = layout.sequence_parallel
    mlp = layout.split("mlp")

    # There and back, and so the gradients; and once more there, for the gradients of weights. Without a pipeline the
    # gradients of tokens wait for these, which are made of frozen weights too.
    learns = not (sizes.frozen and step.staged)
    forward = passes.forward + passes.rerun
    calls = 2 * forward + 2 * passes.backward + runs.merged(learns)
    yield transfer(layout, ROWS, ALL_TO_ALL, {EXPERT}, calls, calls * seats * sizes.embed, width)
    calls = _loads(step)
    yield transfer(layout, "loads of experts", ALL_REDUCE, layout.split(RESIDUAL), calls, calls * per_row, F32)
    what = "weights of chosen experts"
    calls = forward + 2 * passes.backward
    yield transfer(layout, what, ALL_TO_ALL, {EXPERT}, calls, calls * seats, width)
    reduced = passes.backward
    if not stream:
        yield transfer(layout, what, ALL_REDUCE, mlp, reduced, reduced * factors, width)
        return
    calls = forward + passes.backward * step.anew
    yield transfer(layout, "chosen experts", ALL_GATHER, stream, calls, calls * choices, INT32)
    yield transfer(layout, what, ALL_GATHER, stream, calls, calls * factors, width)
    yield transfer(layout, what, REDUCE_SCATTER, stream, reduced, reduced * factors, width)


def _loads(step: Step) -> Count:
    """Return how often rows add up the loads of experts, or the shares of their scores."""
    passes = step.runs.passes
    stage = step.runs.stage
    again = stage * (passes.rerun + passes.recomputed)
    if reports_routers(step.config):
        # Both make the loss that is reported. The backward pass needs the loads, which are kept, or made again with a
        # whole stage.
        return 2 * passes.forward + again
    # The backward pass alone needs the loads.
    return again + (1 - stage) * passes.forward * step.runs.learns


def summed(step: Step, model: Model, balance: Placed) -> Iterator[Transfer]:
    """Yield the sums over the devices of what routers count, once per step, for the layers that have this `balance`."""
    for name, place in of_sums(step.layout, model.aux_shapes, (LAYERS,), step.runs.flush).items():
        elements = balance.layers * math.prod(model.aux_shapes[name])
        for axes in (place.use.reduced - place.deferred, place.deferred):
            if axes:
                yield transfer(step.layout, "counts of routers", ALL_REDUCE, axes, 1, elements, F32)
