"""Predict what moves with the parameters of a step: weights from how they rest to how they are used, gradients back.

The ZeRO paper counts these elements per parameter (Rajbhandari et al. 2020, section 7). Stages 0 to 2 gather weights
and reduce gradients once per step, stage 2 reduces those of each layer in each loop over layers, and stage 3 gathers
there too. What crosses the replicas is in `replica_traffic`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from jaxdist.config import Config
from jaxdist.config.lora import is_adapter
from jaxdist.mesh.split import compute_width
from jaxdist.planning.parameter_layout import Placed
from jaxdist.planning.predicted_collectives import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    F32,
    REDUCE_SCATTER,
    Count,
    Transfer,
    transfer,
)
from jaxdist.planning.runs import Step
from jaxdist.sharding import Layout

WEIGHTS = "weights of "
"""How `Transfer.what` begins where weights are gathered."""

GRADIENTS = "gradients of "
"""How it begins where gradients are reduced in each replica."""


def predict(step: Step, p: Placed) -> Iterator[Transfer]:
    """Yield the transfers of `gather` and `reduce` of `parallel.zero` for a parameter."""
    if p.stacked:
        name = "layers"
    else:
        name = "parameters" if step.config.model.images else "table and the like"
    if p.differentiated:
        yield from _reduced(step, p, GRADIENTS + name)
    loops, by_layer = _gathers(step, p)
    if by_layer and not is_adapter(p.name):
        # What stands outside the layers is gathered once for both.
        loops = loops + sum(reference.runs.loops.forward for reference in step.references)
    calls, elements = _moved(step, p, loops, by_layer)
    yield from gathered(step.config, p, step.layout, WEIGHTS + name, calls, elements)


def _moved(step: Step, p: Placed, loops: Count, by_layer: bool) -> tuple[Count, Count]:
    """Return the calls, and the elements in use, where a parameter moves in a number of loops.

    With `by_layer` each of them moves the layers that it runs, one by one; otherwise all at once.
    """
    if not by_layer:
        return loops, loops * p.use
    chunks = step.runs.chunks
    return loops * p.layers // chunks, loops * p.use // chunks


def _gathers(step: Step, p: Placed) -> tuple[Count, bool]:
    """Return in how many loops a weight is gathered, and whether by layer.

    The backward pass gathers it again where a gradient needs its value.
    """
    runs = step.runs
    by_layer = step.config.parallel.zero == 3
    if p.stacked and by_layer:
        backward = 0 if p.forward_only else runs.loops.backward
        return runs.loops.forward + runs.loops.rerun + backward, True
    if p.stacked and not runs.flush:
        # Weights change between F and B, so each gathers its own version of the whole stack.
        backward = 0 if p.forward_only and not runs.loops.rerun else runs.loops.backward
        return runs.loops.forward + backward, False
    return (runs.outside if by_layer else 1), False


def _reduced(step: Step, p: Placed, what: str) -> Iterator[Transfer]:
    """Yield the transfers that sum a gradient in each replica, and bring it to how the parameter lies there."""
    layout = step.layout
    summed = set(p.place.use.reduced - p.place.deferred)
    loops, by_layer = _reductions(step, p)
    calls, elements = _moved(step, p, loops, by_layer)
    if p.place.scatter_dim is not None:
        yield transfer(layout, what, REDUCE_SCATTER, p.place.group, calls, elements, F32)
        summed -= set(p.place.group)
        elements = elements // layout.size(*p.place.group)
    if summed:
        yield transfer(layout, what, ALL_REDUCE, summed, calls, elements, F32)
    if p.place.deal is not None:
        yield _collected_heads(step, p, what, calls, elements)


def _reductions(step: Step, p: Placed) -> tuple[Count, bool]:
    """Return in how many loops a gradient is reduced, and whether by layer."""
    runs = step.runs
    by_layer = step.config.parallel.zero >= 2
    if p.stacked and by_layer:
        return runs.loops.weights, True
    if p.stacked and not runs.flush:
        return runs.loops.backward, False
    return (runs.outside if by_layer else 1), False


def _collected_heads(step: Step, p: Placed, what: str, calls: Count, elements: Count) -> Transfer:
    """Return the transfer that brings the gradients of the copies of key/value heads together."""
    layout = step.layout
    heads = layout.split("heads")
    # A gradient that was added to nothing is still in the dtype of its matmul.
    added = step.staged or layout.tokens_over or step.config.train.accumulation > 1
    width = F32 if added else compute_width(step.config)
    if p.place.exchanged:
        return transfer(layout, what, ALL_TO_ALL, heads, calls, elements, width)
    whole = elements * layout.parts("heads")
    if not step.staged:
        return transfer(layout, what, ALL_GATHER, heads, calls, whole, width)
    # Each device puts its heads' gradients where they belong, and all are summed.
    whole = whole * p.elements // math.prod(p.place.in_use(p.shape))
    return transfer(layout, what, ALL_REDUCE, heads, calls, whole, width)


def gathered(config: Config, p: Placed, layout: Layout, what: str, calls: int, elements: int) -> Iterator[Transfer]:
    """Yield the transfers that bring a weight from how it lies at rest to how it lies in use.

    `elements` are those in use, of all calls.
    """
    width = p.width(config)
    if p.place.exchanged:
        # The heads are dealt before the all-gather, so each device sends only its own part.
        own = elements
        if not p.whole:
            own = elements // layout.size(*p.place.group)
        yield transfer(layout, what, ALL_TO_ALL, layout.split("heads"), calls, own, width)
    if not p.whole:
        yield transfer(layout, what, ALL_GATHER, p.place.group, calls, elements, width)
