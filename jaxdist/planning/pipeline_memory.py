"""Predict what a pipeline rank holds during a step: estimates, as in `memory`, from the depths of the buffers.

A rank has its own chunks of the layers, and its part of what all ranks share (embedding, head, last norm). Weights are
gathered and gradients summed for all micro-batches of a step, so neither grows with their number; nor do activations
in 1F1B.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from jaxdist.config import Config
from jaxdist.config.stacks import stacks_of
from jaxdist.mesh.split import compute_width
from jaxdist.planning import step_bytes
from jaxdist.planning.activations import saved_per_token, stashed_per_token, working
from jaxdist.planning.memory_habits import STASH_IN_BRANCH, Arrays, as_held
from jaxdist.planning.parameter_layout import Placed, by_precision, elements_of
from jaxdist.planning.pipelines import Pipeline
from jaxdist.planning.predicted_collectives import F32, Count
from jaxdist.planning.sharded_model import ShardedModel
from jaxdist.planning.step_bytes import Elements
from jaxdist.sharding import Layout


def _apart(config: Config, parameters: list[Placed]) -> tuple[Elements, Elements]:
    """Return the elements of the layers, and of the parameters that all ranks share."""
    layers = [p for p in parameters if p.stacked]
    shared = [p for p in parameters if not p.stacked]
    return elements_of(config, layers), elements_of(config, shared)


def gradients(config: Config, parameters: list[Placed], zero: Count) -> Count:
    """Return the bytes of gradients: f32 sums, and what the head or the backward pass of a layer makes.

    `step_bytes.pipeline_gradients` has the equation.
    """
    layers, shared = _apart(config, [p for p in parameters if p.trained])
    return step_bytes.pipeline_gradients(zero, compute_width(config), layers, shared)


def weights(config: Config, parameters: list[Placed], zero: Count, layout: Layout, virtual: Count) -> Count:
    """Return the bytes of weights that are cast or gathered, once per step; at stage 3 one layer at a time.

    `step_bytes.pipeline_weights` has the equation.
    """
    total: Count = 0
    for (precision, width), group in by_precision(config, parameters).items():
        layers, shared = _apart(config, group)
        total = total + step_bytes.pipeline_weights(zero, width, layers, shared, virtual, precision, layout)
    return total


class Depths(NamedTuple):
    """Slots of a rank's buffers."""

    messages: Count
    """Of the residual stream and its gradient, where stages meet."""
    residuals: Count
    """Of what a chunk keeps for its backward pass."""
    stash: Count
    """Of what a split backward pass leaves for W."""


def depths(pipe: Pipeline) -> Depths:
    """Return the slots of a pipeline's table, some of which has one more than the schedule needs."""
    slots = pipe.table.slots
    # The two more are the messages, one in each direction.
    messages = slots["acts"] + slots["cots"] + 2
    return Depths(messages, slots["residuals"], slots["stash"] if pipe.schedule.split else 0)


ROUGH_MESSAGES = 3
"""`Depths.messages` of nearly all schedules, without the slots that a table adds."""


def rough_stash(name: str, S: int, M: int, v: int) -> int:
    """Return about how many chunks leave something for W at a time, for `Depths.stash` without a table."""
    if name == "zb-h1":
        return min(v * M, v * S)
    if name == "zb-u":
        return min(v * M, S)
    return 0


def copies_in_branch(layout: Layout) -> int:
    """Return how many stashes there are where ranks take branches of their own."""
    return as_held(Arrays(STASH_IN_BRANCH, 1, F32), layout).count


class Unit(NamedTuple):
    """What a chunk of layers holds of one micro-batch on one device, in bytes; or of one token, in values."""

    stream: Count
    """The residual stream."""
    saved: Count
    """What its layers save for their backward pass."""
    stashed: Count
    """What its split backward pass leaves for W."""

    def kept(self, recomputes: Count) -> Count:
        """Return what F keeps for B: the input alone, where B runs the chunk again."""
        return np.where(recomputes, self.stream, self.saved)


def buffers(slots: Depths, unit: Unit, recomputes: Count) -> Count:
    """Return what all buffers of a rank hold."""
    return slots.messages * unit.stream + slots.residuals * unit.kept(recomputes) + slots.stash * unit.stashed


def recomputed(unit: Unit, recomputes: Count) -> Count:
    """Return what exists for one micro-batch at a time, while its B runs: all that the chunk saves, if it runs again.

    Otherwise the layers write and read their buffers.
    """
    return np.where(recomputes, unit.saved, 0)


def activations(sharded: ShardedModel, pipe: Pipeline) -> dict[str, int]:
    """Return the fields `activations` and `working` of `memory.Memory`: the buffers, and what one unit needs."""
    split = sharded.split
    unit = _unit(sharded, pipe)
    stacks = stacks_of(sharded.config.model).values()
    moment = max(working(stack, sharded.layout, split.rows, split.width, split.saved) for stack in stacks)
    slots = depths(pipe)
    if pipe.schedule.split and not pipe.schedule.uniform:
        slots = slots._replace(stash=copies_in_branch(sharded.layout) * slots.stash)
    return {
        "activations": int(buffers(slots, unit, pipe.recomputes)),
        "working": int(recomputed(unit, pipe.recomputes)) + moment,
    }


def _unit(sharded: ShardedModel, pipe: Pipeline) -> Unit:
    """Return the bytes of one micro-batch in a chunk."""
    split = sharded.split
    layout = sharded.layout
    sizes = sharded.config.model
    each = split.width * split.tokens
    stacks = [(pipe.stages.stacks[name].depth, stack) for name, stack in stacks_of(sizes).items()]
    return Unit(
        stream=each * sizes.embed // layout.size(*layout.sequence_parallel),
        saved=each * sum(depth * saved_per_token(stack, layout, split.saved) for depth, stack in stacks),
        stashed=each * sum(depth * stashed_per_token(stack, layout) for depth, stack in stacks),
    )


def in_flight(sharded: ShardedModel, pipe: Pipeline) -> int:
    """Return the bytes that an asynchronous pipeline holds between steps (weight stashing).

    All buffers are as deep as those of the first rank. Each batch in flight has the weights of its forward pass and
    what that pass has saved; each batch that has passed the head has the gradient of the shared parameters; and there
    is one message in each direction.
    """
    split = sharded.split
    weights_held = sum(p.rest for p in sharded.parameters if p.stacked)
    shared_in_use = sum(p.use for p in sharded.parameters if p.trained and not p.stacked)
    S = pipe.stages.ranks
    unit = _unit(sharded, pipe)
    # Dropout needs two words of keys for each row.
    batch = step_bytes.micro_batch(split, drawn=2)
    # The batch's number and count of tokens, its loss, and the square of its gradient's norm.
    numbers = 4 * F32
    of_batch = split.width * weights_held + unit.kept(pipe.recomputes) + batch + numbers
    round_number = F32
    return int(S * of_batch + (S // 2 + 1) * F32 * shared_in_use + 2 * unit.stream + round_number)
