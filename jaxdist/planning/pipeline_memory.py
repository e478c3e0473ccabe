"""What a device of a pipeline holds during a step: estimates, as those of `memory`, by the depths of the buffers.

A rank has its own chunks of the layers, and its part of what all ranks share. Weights are gathered and gradients added
up for all micro-batches of a step, so neither grows with them; nor do activations in 1F1B.
"""

from __future__ import annotations

from jaxdist.config import Config
from jaxdist.planning.activations import saved_per_token, stashed_per_token, working
from jaxdist.planning.parameter_layout import Placed, compute_width
from jaxdist.planning.pipelines import Pipeline
from jaxdist.planning.predicted_collectives import F32
from jaxdist.sharding import Layout


def gradients(config: Config, parameters: list[Placed], pipe: Pipeline) -> int:
    """Accumulators in f32, those of layers from stage 2 on shards; beside them what the head, or B of a layer, makes.

    In stage 1 the sums are reduced to shards at the end.
    """
    layers, tops = _split(parameters)
    sums = layers["rest"] if config.parallel.zero >= 2 else layers["use"]
    return 2 * F32 * tops["use"] + F32 * sums + (F32 + compute_width(config)) * layers["at_once"]


def weights(config: Config, parameters: list[Placed], pipe: Pipeline) -> int:
    """Cast, and gathered once per step; at stage 3 one layer at a time. One of several chunks is cut out to be used."""
    layers, tops = _split(parameters)
    width, v = compute_width(config), pipe.stages.virtual
    rest, use = layers["rest"] + tops["rest"], layers["use"] + tops["use"]
    cast = width * rest if config.precision == "bfloat16" else 0
    if config.parallel.zero == 3:
        return cast + width * (tops["use"] + layers["at_once"] + (layers["rest"] // v if v > 1 else 0))
    chunk = width * layers["use"] // v if v > 1 else 0
    return cast + chunk + (width * use if use != rest else 0)


def activations(config: Config, layout: Layout, pipe: Pipeline, rows: int) -> dict[str, int]:
    """Bytes by the names of `memory.Memory`: buffers, and what one unit makes on its way.

    Some have a slot more than the schedule needs (`table`). With remat stage only inputs of chunks are kept, and
    what a chunk keeps of one micro-batch exists once, while its B runs; else layers write and read their buffers.
    """
    sizes, width, table = config.model, compute_width(config), pipe.table
    tokens = rows * sizes.sequence
    stream = width * tokens * sizes.embed // layout.parts("residual")
    named = "named" if sizes.remat in ("none", "stage") else sizes.remat
    chunk = width * tokens * pipe.stages.depth * saved_per_token(sizes, layout, named)
    kept = stream if pipe.recomputes else chunk
    buffers = (table.slots["acts"] + table.slots["cots"] + 2) * stream + table.slots["residuals"] * kept
    stash = table.slots["stash"] if pipe.schedule.split else 0
    buffers += stash * width * tokens * pipe.stages.depth * stashed_per_token(sizes, layout)
    again = chunk if pipe.recomputes else 0
    return dict(activations=buffers, working=again + working(sizes, layout, rows, width, named))


def in_flight(config: Config, layout: Layout, parameters: list[Placed], pipe: Pipeline, rows: int) -> int:
    """What an asynchronous pipeline holds between steps, all buffers as deep as those of the first rank.

    For each batch in flight the weights of its F and what that has kept; for those that have passed the head, the
    gradient of that; one message each way.
    """
    layers, tops = _split(parameters)
    sizes, width, S = config.model, compute_width(config), pipe.stages.ranks
    tokens = rows * sizes.sequence
    stream = width * tokens * sizes.embed // layout.parts("residual")
    named = "named" if sizes.remat == "none" else sizes.remat
    kept = stream if pipe.recomputes else width * tokens * pipe.stages.depth * saved_per_token(sizes, layout, named)
    arrays = 3 if sizes.documents == "apart" else 2  # tokens, labels, starts of documents
    batch = F32 * rows * (arrays * sizes.sequence + (2 if sizes.dropout else 0))  # and keys
    numbers = 4 * F32  # the batch's number and count, its loss, the square of its norm
    of_batch = width * layers["rest"] + kept + batch + numbers
    return S * of_batch + (S // 2 + 1) * F32 * tops["use"] + 2 * stream + F32  # and the number of the round


def _split(parameters: list[Placed]) -> tuple[dict[str, int], dict[str, int]]:
    """Elements of the layers and of what is none: at rest, in use, and of one layer."""
    count = lambda stacked: {
        name: sum(getattr(p, name) for p in parameters if p.stacked == stacked) for name in ("rest", "use", "at_once")
    }
    return count(True), count(False)
