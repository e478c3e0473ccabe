"""What a loop over layers copies, and what layers that are written out do without (`model.unroll_layers`).

What a loop leaves for another one lies in stacks. XLA:GPU fills each stack with zeros, copies into it what a layer
saves for the backward pass, and copies out of it what matmuls and attention take; other kernels read it where it lies.
Either pass copies the weights of a layer out of a stack, and the backward pass copies their gradients into one.

The rates of the planner are those of other programs, whose kernels move more than ours do beside these copies
(docs/explanation/planner.md). So a loop has no further price, and layers that are written out take the time of the
copies less.
"""

from __future__ import annotations

import numpy as np

from jaxdist.config.stacks import stacks_of
from jaxdist.planning import step_bytes
from jaxdist.planning.activations import copied_per_token
from jaxdist.planning.habit import PREDICTED, Habit
from jaxdist.planning.parameter_layout import elements_of
from jaxdist.planning.predicted_collectives import Numbers
from jaxdist.planning.sharded_model import ShardedModel
from jaxdist.planning.step_bytes import Elements
from jaxdist.sharding import Layout

FILLED = 1
"""How often each number of a stack is written before a loop."""

COPIED = 2
"""How often a copy moves each number: it reads and writes."""

STACKS = Habit(
    name="stacks of a loop",
    platforms=("gpu",),
    reason="XLA:GPU copies into and out of the stacks of a loop over layers, in kernels of their own",
)


def occur(layout: Layout) -> bool:
    """Return whether a loop over layers copies on the platform of a layout."""
    return STACKS.occurs(layout.platform, PREDICTED)


def of_weights(zero: Numbers, width: int, layers: Elements, learned: Elements) -> Numbers:
    """Return the bytes that both passes through all layers copy of weights, and of gradients of those that learn."""
    weights = 2 * COPIED * width * np.where(np.asarray(zero) == 3, layers.rest, layers.use)
    return weights + (FILLED + COPIED) * step_bytes.stacked_gradients(zero, width, learned)


def spared(sharded: ShardedModel) -> Numbers:
    """Return the bytes that a device copies less in a step than with a loop over the layers."""
    split = sharded.split
    config = sharded.config
    if not (split.unrolled and occur(sharded.layout)):
        return 0
    stacks = stacks_of(config.model).values()
    per_token = sum(stack.layers * copied_per_token(stack, sharded.layout, split.saved) for stack in stacks)
    loops = 1 if split.inside else split.micro_batches
    layers = [p for p in sharded.parameters if p.stacked]
    learned = [p for p in layers if p.trained]
    weights = of_weights(config.parallel.zero, split.width, elements_of(config, layers), elements_of(config, learned))
    return split.width * split.tokens * split.micro_batches * per_token + loops * weights
