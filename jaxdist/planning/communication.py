"""What crosses the mesh in one step, predicted from the configuration and the abstract parameters alone.

Over the batch axes go weights and gradients, whose elements per parameter the ZeRO paper counts (Rajbhandari et al.
2020, section 7); over the model axis the residual stream, as in Shoeybi et al. 2019, section 3, and Korthikanti et al.
2022, section 4.2.2. Scalars (loss, norm, counts) are left out. Nothing here looks at a program: `tests/communication`
holds one against the other.
"""

from __future__ import annotations

from collections.abc import Iterator

import jax

from jaxdist.config import Config
from jaxdist.mesh import DATA
from jaxdist.models import Model, images
from jaxdist.models.foreign import Foreign
from jaxdist.models.loss import chunk_length
from jaxdist.planning import pipeline_traffic
from jaxdist.planning.parameter_layout import Placed, compute_width, placed
from jaxdist.planning.pipeline_traffic import NOT_NEEDED_BACKWARD, looks_up_positions, scattered_with_vectors
from jaxdist.planning.pipelines import pipeline_of
from jaxdist.planning.predicted_collectives import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    F32,
    REDUCE_SCATTER,
    Transfer,
    transfer,
)
from jaxdist.sharding import Layout


def unpredicted(config: Config, layout: Layout) -> str:
    """Why `predict` cannot tell what crosses the mesh; empty where it can."""
    if layout.ranks == 1 or not config.model.images or images.scope(config.model) == "rows":
        return ""
    return (
        "what crosses the mesh is not predicted: with dropout a classifier is called with all rows of a micro-batch at "
        "once, so that its masks are those of one device, and the compiler chooses where gradients and statistics are "
        "added up; set model.dropout to 0 for one reduction of each"
    )


def predict(config: Config, model: Model | Foreign, layout: Layout) -> list[Transfer]:
    """Every transfer of a train step but those of scalars; `config.precision` is not `auto` any more, and `unpredicted`
    is empty."""
    assert not unpredicted(config, layout)
    parameters = placed(config, model, layout)
    if pipe := pipeline_of(config, layout):
        found = [*pipeline_traffic.predict(config, parameters, layout, pipe)]
    else:
        found = [
            *_parameters(config, parameters, layout),
            *(_statistics(config, model, layout) if config.model.images else _decoder(config, layout)),
        ]
    return [one for one in found if one.devices > 1 and one.calls]


def data_parallel(config: Config, model: Model, layout: Layout) -> float:
    """Elements that plain data parallelism would send: 2 (N-1)/N for each parameter of a stage and model rank."""
    whole = sum(p.use for p in placed(config, model, layout))
    return 2 * whole * (layout.ranks - 1) / layout.ranks


def _parameters(config: Config, parameters: list[Placed], layout: Layout) -> Iterator[Transfer]:
    """`gather` and `reduce` of `parallel.zero`, for the layers and for what is none."""
    parallel, k = config.parallel, config.train.accumulation
    outside = parallel.micro_batches == "outside" or config.model.images
    groups = k if parallel.zero >= 2 and outside else 1
    for p in parameters:
        calls = groups * (p.layers if parallel.zero >= 2 else 1)
        name = "layers" if p.stacked else "parameters" if config.model.images else "table and the like"
        yield from _reduce(config, p, name, layout, calls, groups)
        yield from _gather(config, p, name, layout, groups)


def _gather(config: Config, p: Placed, name: str, layout: Layout, groups: int) -> Iterator[Transfer]:
    times, arrays = 1, 1
    if config.parallel.zero == 3:
        times, arrays = _gathered(p, layout, groups), p.layers
    what, calls, moved, width = f"weights of {name}", times * arrays, times * p.use, compute_width(config)
    if p.place.exchanged:
        heads, own = layout.split("heads"), moved if p.whole else moved // layout.size(DATA)
        yield transfer(layout, what, ALL_TO_ALL, heads, calls, own, width)
    if not p.whole:
        yield transfer(layout, what, ALL_GATHER, {DATA}, calls, moved, width)


def _gathered(p: Placed, layout: Layout, groups: int) -> int:
    """How often a step gathers each layer's weight at stage 3, with `groups` of micro-batches one after the other.

    The loop over layers gathers a weight forward, and again backward where a gradient needs its value. What stands in
    no such loop, and the only layer of a model, is gathered once for both. Nothing changes that gather from one group
    to the next, so XLA:CPU moves it out of the loop over groups; XLA:GPU leaves it there.
    """
    if p.layers > 1:
        again = p.name not in NOT_NEEDED_BACKWARD
        return groups * (2 if again else 1)
    if layout.platform == "cpu":
        return 1
    return groups


def _reduce(config: Config, p: Placed, name: str, layout: Layout, calls: int, times: int) -> Iterator[Transfer]:
    what, summed, held = f"gradients of {name}", set(p.place.use.reduced), p.use
    if not p.whole:
        yield transfer(layout, what, REDUCE_SCATTER, {DATA}, calls, times * p.use, F32)
        summed, held = summed - {DATA}, p.use // layout.size(DATA)
    if summed:
        if layout.platform != "cpu" and p.layers == 1 and not p.place.dealt:
            calls = times = 1  # XLA:GPU adds up first, and sends once, what a loop only adds to its sum
        yield transfer(layout, what, ALL_REDUCE, summed, calls, times * held, F32)
    if p.place.dealt:  # the copies of key/value heads are brought together
        added = layout.ranks > 1 or config.train.accumulation > 1
        heads, width = layout.split("heads"), F32 if added else compute_width(config)  # as the product left them
        kind, parts = (ALL_TO_ALL, 1) if p.place.exchanged else (ALL_GATHER, layout.parts("heads"))
        yield transfer(layout, what, kind, heads, calls, times * held * parts, width)


def _decoder(config: Config, layout: Layout) -> Iterator[Transfer]:
    yield from _stream(config, layout)
    yield from _loss(config, layout)


def _statistics(config: Config, model: Foreign, layout: Layout) -> Iterator[Transfer]:
    """Sum and sum of squares of every channel, forward and, of their gradients, backward; then the running ones."""
    k, channels = config.train.accumulation, sum(a.size for a in jax.tree.leaves(model.variables))
    axes = layout.split("batch")
    yield transfer(layout, "batch statistics", ALL_REDUCE, axes, k, 3 * k * channels, F32)


def _stream(config: Config, layout: Layout) -> Iterator[Transfer]:
    """The residual stream [B, S, D] of k micro-batches, over the axes that split layers, vocabulary and sequence."""
    split, sizes, width = layout.split("residual"), config.model, compute_width(config)
    for logical in ("heads", "mlp"):
        whole = sizes.remat in ("block", "stage", "offload")
        # then attention's output is computed again, and the MLP's is not needed
        again = logical == "heads" and whole
        moves = {REDUCE_SCATTER: 2 + again, ALL_GATHER: 3} if split else {ALL_REDUCE: 2 + again}
        for kind, calls in moves.items():
            what, calls = "residual stream of the layers", calls * sizes.layers
            yield _streamed(config, layout, what, kind, layout.split(logical), calls, width)
    vocab = layout.split("vocab")
    moves = {ALL_REDUCE: 1} if vocab and not split else {ALL_GATHER: bool(split), REDUCE_SCATTER: bool(split and vocab)}
    for what in ("looked-up vectors", "last hidden states"):
        for kind, calls in moves.items():
            yield _streamed(config, layout, what, kind, split or vocab, calls, width)
    if looks_up_positions(config):  # what the vocabulary's lookup gathers backward serves theirs too
        moves = {REDUCE_SCATTER: not scattered_with_vectors(layout), ALL_GATHER: not vocab}
        for kind, calls in moves.items():
            yield _streamed(config, layout, "looked-up positions", kind, split, calls, width)


def _streamed(config: Config, layout: Layout, what: str, kind: str, axes, calls: int, width: int) -> Transfer:
    """`calls` in each micro-batch."""
    calls *= config.train.accumulation
    elements = calls * _tokens(config, layout) * config.model.embed
    return transfer(layout, what, kind, axes, calls, elements, width)


def _loss(config: Config, layout: Layout) -> Iterator[Transfer]:
    """A maximum, a sum and the label's logit for each token, where the vocabulary is split."""
    tokens, k, sequence = _tokens(config, layout), config.train.accumulation, config.model.sequence
    chunks = sequence // chunk_length(layout, sequence, tokens // sequence)
    axes = layout.split("vocab")
    yield transfer(layout, "statistics of the loss", ALL_REDUCE, axes, 3 * chunks * k, 3 * tokens * k, F32)


def _tokens(config: Config, layout: Layout) -> int:
    """Of a micro-batch, on one device."""
    train = config.train
    return train.global_batch_size // train.accumulation // layout.ranks * config.model.sequence
