"""Predict what a pipeline rank holds during a step: estimates, as in `memory`, from the depths of the buffers.

A rank has its own chunks of the layers, and its part of what all ranks share (embedding, head, last norm). Weights are
gathered and gradients summed for all micro-batches of a step, so neither grows with their number; nor do activations
in 1F1B.
"""

from __future__ import annotations

from jaxdist.config import Config
from jaxdist.mesh.split import compute_width
from jaxdist.planning import step_bytes
from jaxdist.planning.activations import saved_per_token, stashed_per_token, working
from jaxdist.planning.parameter_layout import Placed, by_precision
from jaxdist.planning.pipelines import Pipeline
from jaxdist.planning.predicted_collectives import F32
from jaxdist.planning.sharded_model import ShardedModel
from jaxdist.planning.step_bytes import Elements


def _elements(parameters: list[Placed], stacked: bool) -> Elements:
    """Return the elements of the layers, or of the parameters that belong to none."""
    group = [p for p in parameters if p.stacked == stacked]
    return Elements(
        held=sum(p.held for p in group),
        rest=sum(p.rest for p in group),
        use=sum(p.use for p in group),
        layer=sum(p.at_once for p in group) if stacked else 0,
        outside=0 if stacked else sum(p.use for p in group),
    )


def gradients(config: Config, parameters: list[Placed]) -> int:
    """Return the bytes of gradients: f32 sums, and what the head or the backward pass of a layer makes.

    `step_bytes.pipeline_gradients` has the equation.
    """
    learned = [p for p in parameters if p.trained]
    layers = _elements(learned, stacked=True)
    shared = _elements(learned, stacked=False)
    return int(step_bytes.pipeline_gradients(config.parallel.zero, compute_width(config), layers, shared))


def weights(sharded: ShardedModel, pipe: Pipeline) -> int:
    """Return the bytes of weights that are cast or gathered, once per step; at stage 3 one layer at a time.

    `step_bytes.pipeline_weights` has the equation.
    """
    config = sharded.config
    zero = config.parallel.zero
    width = compute_width(config)
    virtual = pipe.stages.virtual
    total = 0
    for precision, group in by_precision(config, sharded.parameters).items():
        layers = _elements(group, stacked=True)
        shared = _elements(group, stacked=False)
        total += int(step_bytes.pipeline_weights(zero, width, layers, shared, virtual, precision, sharded.layout))
    return total


def activations(sharded: ShardedModel, pipe: Pipeline) -> dict[str, int]:
    """Return the fields `activations` and `working` of `memory.Memory`: the buffers, and what one unit needs.

    Some buffers have a slot more than the schedule needs (`table`). With remat stage only the inputs of chunks are
    kept, and what a chunk saves for its backward pass exists for one micro-batch at a time, while its B runs;
    otherwise the layers write and read their buffers.
    """
    split = sharded.split
    layout = sharded.layout
    sizes = sharded.config.model
    slots = pipe.table.slots
    stream = _stream(sharded)
    chunk = _saved_by_chunk(sharded, pipe)
    if pipe.recomputes:
        kept = stream
        recomputed = chunk
    else:
        kept = chunk
        recomputed = 0
    # The two more are the messages, one in each direction.
    buffers = (slots["acts"] + slots["cots"] + 2) * stream + slots["residuals"] * kept
    if pipe.schedule.split:
        stash = split.width * split.tokens * pipe.stages.depth * stashed_per_token(sizes, layout)
        buffers += slots["stash"] * stash
    return {
        "activations": buffers,
        "working": recomputed + working(sizes, layout, split.rows, split.width, split.saved),
    }


def _stream(sharded: ShardedModel) -> int:
    """Return the bytes of what a device has of a micro-batch's residual stream."""
    split = sharded.split
    layout = sharded.layout
    return split.width * split.tokens * sharded.config.model.embed // layout.size(*layout.sequence_parallel)


def _saved_by_chunk(sharded: ShardedModel, pipe: Pipeline) -> int:
    """Return the bytes that the layers of a chunk save for the backward pass of a micro-batch."""
    split = sharded.split
    each = saved_per_token(sharded.config.model, sharded.layout, split.saved)
    return split.width * split.tokens * pipe.stages.depth * each


def in_flight(sharded: ShardedModel, pipe: Pipeline) -> int:
    """Return the bytes that an asynchronous pipeline holds between steps (weight stashing).

    All buffers are as deep as those of the first rank. Each batch in flight has the weights of its forward pass and
    what that pass has saved; each batch that has passed the head has the gradient of the shared parameters; and there
    is one message in each direction.
    """
    split = sharded.split
    layers = _elements(sharded.parameters, stacked=True)
    learned = [p for p in sharded.parameters if p.trained]
    shared = _elements(learned, stacked=False)
    sizes = sharded.config.model
    S = pipe.stages.ranks
    stream = _stream(sharded)
    saved = stream if pipe.recomputes else _saved_by_chunk(sharded, pipe)
    # Tokens, labels and, where documents are kept apart, the starts of documents; dropout needs two words of keys.
    arrays = 3 if sizes.documents == "apart" else 2
    keys = 2 if sizes.drops else 0
    batch = F32 * split.rows * (arrays * split.length + keys)
    # The batch's number and count of tokens, its loss, and the square of its gradient's norm.
    numbers = 4 * F32
    of_batch = split.width * layers.rest + saved + batch + numbers
    round_number = F32
    return int(S * of_batch + (S // 2 + 1) * F32 * shared.use + 2 * stream + round_number)
