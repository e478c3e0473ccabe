"""Predict the collectives of one step, from the configuration and the abstract parameters alone.

Over the batch axes and `context` move weights and gradients; the ZeRO paper counts their elements per parameter
(Rajbhandari et al. 2020, section 7). Over the model axis moves the residual stream (Shoeybi et al. 2019, section 3;
Korthikanti et al. 2022, section 4.2.2). `context_traffic` and `expert_traffic` predict what attention and experts send.
Scalars (loss, norm, counts) are left out. Nothing here reads a compiled program: `tests/communication` compares the
two.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import jax

from jaxdist.config import Config
from jaxdist.mesh import AXES, EXPERT, REPLICA
from jaxdist.mesh.split import Split
from jaxdist.models import Model
from jaxdist.models.foreign import Foreign
from jaxdist.models.loss import chunk_length
from jaxdist.planning import context_traffic, expert_traffic, pipeline_traffic
from jaxdist.planning.adapters import WHOLE_BLOCK, enters_again, learns_tables
from jaxdist.planning.parameter_layout import Placed, compute_width, placed
from jaxdist.planning.pipeline_traffic import (
    between_replicas,
    gathered,
    has_whole_positions,
    looks_up_positions,
    norms_of_all_heads,
    scattered_with_vectors,
)
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
from jaxdist.sharding import SEQUENCE, Layout


def unpredicted(config: Config, layout: Layout) -> str:
    """Return why `predict` cannot predict the collectives of a step; empty where it can."""
    if layout.ranks == 1 or not config.model.all_rows_at_once:
        return ""
    return (
        "collectives are not predicted: with dropout a classifier runs all rows of a micro-batch at once, so that its "
        "dropout masks are those of one device, and the compiler chooses where gradients and statistics are reduced; "
        "set model.dropout to 0 for one reduction of each"
    )


def predict(config: Config, model: Model | Foreign, layout: Layout) -> list[Transfer]:
    """Return every transfer of a train step, without scalars; with local steps, of the step of a replica.

    `config.precision` is resolved, no longer `auto`, and `unpredicted` is empty.
    """
    assert not unpredicted(config, layout)
    if config.train.local_steps:
        config = Split(config, {axis: layout.size(axis) for axis in AXES}).of_one_replica.config
        layout = layout.without(REPLICA)
    parameters = placed(config, model, layout)
    pipe = pipeline_of(config, layout)
    if pipe:
        found = list(pipeline_traffic.predict(config, parameters, layout, pipe))
    else:
        found = list(_parameters(config, parameters, layout))
        if isinstance(model, Foreign):
            found.append(_statistics(config, model, layout))
        else:
            found += _stream(config, layout)
            found.append(_loss(config, layout))
    return [one for one in found if one.devices > 1 and one.calls]


def outer(config: Config, model: Model | Foreign, layout: Layout) -> list[Transfer]:
    """Return every transfer of the outer step that ends a round of local steps, without scalars; else none."""
    if not config.train.local_steps:
        return []
    parameters = placed(config, model, layout)
    return [one for p in parameters for one in between_replicas(config, p, layout) if one.devices > 1]


def compression_that_costs(config: Config, model: Model | Foreign, layout: Layout) -> str:
    """Return why the rule of `parallel.gradient_compression` is worse than bfloat16; empty where it is not."""
    rule = config.parallel.gradient_compression
    if rule in ("exact", "bfloat16") or layout.size(REPLICA) == 1:
        return ""
    parameters = placed(config, model, layout)
    crossing = sum(math.prod(p.shard) for p in parameters if p.place.deferred and p.trained)
    sent = []
    for name in (rule, "bfloat16"):
        parallel = config.parallel.model_copy(update={"gradient_compression": name})
        asked = config.model_copy(update={"parallel": parallel})
        found = [one for p in parameters for one in between_replicas(asked, p, layout)]
        sent.append(sum(one.wire_bytes for one in found if one.axes == (REPLICA,)))
    if not crossing or sent[0] <= sent[1]:
        return ""
    mine, plain = (f"{wire / crossing:.2f}" for wire in sent)
    return (
        f"parallel.gradient_compression {rule} sends {mine} bytes per parameter over {REPLICA}="
        f"{layout.size(REPLICA)}, and bfloat16 only {plain}; set it to int8 or bfloat16"
    )


def data_parallel(config: Config, model: Model | Foreign, layout: Layout) -> float:
    """Return the elements that plain data parallelism sends: 2 (N-1)/N for each parameter of a stage and model rank.

    N are the devices that share the tokens of a batch. A frozen parameter has no gradient to send.

    Without expert parallelism, each of its devices has all experts.
    """
    whole = 0
    for p in placed(config, model, layout):
        if not p.trained:
            continue
        splits = any(EXPERT in layout.split(name) for name in p.axes)
        whole += p.use * (layout.size(EXPERT) if splits else 1)
    devices = layout.size(*layout.tokens_over)
    return 2 * whole * (devices - 1) / devices


def _parameters(config: Config, parameters: list[Placed], layout: Layout) -> Iterator[Transfer]:
    """Yield the transfers of `gather` and `reduce` of `parallel.zero`, for the layers and for all other parameters."""
    parallel = config.parallel
    k = config.train.accumulation
    # At stages 2 and 3, micro-batches outside the layers move everything once for each of them.
    outside = parallel.micro_batches == "outside" or config.model.images
    groups = k if parallel.zero >= 2 and outside else 1
    for p in parameters:
        calls = groups
        if parallel.zero >= 2:
            calls *= p.layers
        if p.stacked:
            name = "layers"
        elif config.model.images:
            name = "parameters"
        else:
            name = "table and the like"
        if p.trained:
            yield from _reduce(config, p, name, layout, calls, groups)
        yield from _gather(config, p, name, layout, groups)
        yield from between_replicas(config, p, layout)


def _gather(config: Config, p: Placed, name: str, layout: Layout, groups: int) -> Iterator[Transfer]:
    """Yield the transfers that bring a weight from how it lies at rest to how it lies in use."""
    times = 1
    calls = 1
    if config.parallel.zero == 3:
        times = _gathers(p, layout, groups)
        calls = times * p.layers
    yield from gathered(config, p, layout, name, calls, elements=times * p.use)


def _gathers(p: Placed, layout: Layout, groups: int) -> int:
    """Return how often a step gathers each layer's weight at stage 3, with `groups` of micro-batches one by one.

    The loop over layers gathers a weight in the forward pass, and again in the backward pass where a gradient needs its
    value. A parameter outside this loop, or the only layer of a model, is gathered once for both. Nothing changes that
    gather from one group to the next, so XLA:CPU moves it out of the loop over groups; XLA:GPU leaves it there.
    """
    if p.layers > 1:
        passes = 1 if p.forward_only else 2
        return groups * passes
    if layout.platform == "cpu":
        return 1
    return groups


def _reduce(config: Config, p: Placed, name: str, layout: Layout, calls: int, times: int) -> Iterator[Transfer]:
    """Yield the transfers that sum a gradient in each replica, and bring it to how the parameter lies there."""
    what = f"gradients of {name}"
    summed = set(p.place.use.reduced - p.place.deferred)
    held = p.use
    if p.place.scatter_dim is not None:
        yield transfer(layout, what, REDUCE_SCATTER, p.place.over, calls, times * p.use, F32)
        summed -= set(p.place.over)
        held = p.use // layout.size(*p.place.over)
    if summed:
        if layout.platform != "cpu" and p.layers == 1 and not p.place.dealt:
            # XLA:GPU moves the all-reduce behind a loop that only adds to a sum.
            calls = 1
            times = 1
        yield transfer(layout, what, ALL_REDUCE, summed, calls, times * held, F32)
    if p.place.dealt:
        yield _collect_heads(config, p, what, layout, calls, times * held)


def _collect_heads(config: Config, p: Placed, what: str, layout: Layout, calls: int, elements: int) -> Transfer:
    """Return the transfer that brings the gradients of the copies of key/value heads together."""
    # A gradient that was added to nothing is still in the dtype of its matmul.
    added = bool(layout.tokens_over) or config.train.accumulation > 1
    width = F32 if added else compute_width(config)
    heads = layout.split("heads")
    if p.place.exchanged:
        return transfer(layout, what, ALL_TO_ALL, heads, calls, elements, width)
    return transfer(layout, what, ALL_GATHER, heads, calls, elements * layout.parts("heads"), width)


def _statistics(config: Config, model: Foreign, layout: Layout) -> Transfer:
    """Return the all-reduces of batch statistics: each channel's sum and sum of squares.

    They are reduced forward; their gradients backward; and then the running ones.
    """
    k = config.train.accumulation
    channels = sum(a.size for a in jax.tree.leaves(model.variables))
    axes = layout.split("batch")
    return transfer(layout, "batch statistics", ALL_REDUCE, axes, k, 3 * k * channels, F32)


def _stream(config: Config, layout: Layout) -> Iterator[Transfer]:
    """Yield the moves of the residual stream [B, S, D], over the axes that split layers, vocabulary and sequence."""
    yield from _layers(config, layout)
    split = layout.sequence_parallel
    vocab = layout.split("vocab")
    if vocab and not split:
        moves = {ALL_REDUCE: 1}
    else:
        moves = {ALL_GATHER: int(bool(split)), REDUCE_SCATTER: int(bool(split and vocab))}
    for kind, calls in moves.items():
        yield _streamed(config, layout, "last hidden states", kind, split or vocab, calls)
    learns = learns_tables(config)
    for kind, calls in moves.items():
        # Only the gradient of a table needs that of all looked-up vectors.
        if kind == ALL_GATHER and not learns:
            continue
        yield _streamed(config, layout, "looked-up vectors", kind, split or vocab, calls)
    if has_whole_positions(config, layout):
        # Each device takes its part of what it looked up in a whole table. Where it looks up tokens so too, one gather
        # of the gradient serves both.
        yield _streamed(config, layout, "looked-up positions", ALL_GATHER, split, int(bool(vocab and learns)))
    elif looks_up_positions(config):
        scatters = 0 if scattered_with_vectors(layout) else 1
        # The backward pass of the vocabulary's lookup gathers the same gradient already.
        gathers = 0 if vocab or not learns else 1
        yield _streamed(config, layout, "looked-up positions", REDUCE_SCATTER, split, scatters)
        yield _streamed(config, layout, "looked-up positions", ALL_GATHER, split, gathers)


def _layers(config: Config, layout: Layout) -> Iterator[Transfer]:
    """Yield the moves of the residual stream between a layer's matmuls: tensor and sequence parallelism."""
    sizes = config.model
    whole_block = sizes.remat in WHOLE_BLOCK
    keeps_all = sizes.remat == "none" and config.parallel.zero < 2
    for logical in ("heads", "mlp"):
        reductions = 2
        gathers = 3
        if not enters_again(config, logical):
            gathers -= 1
        # Experts have no gather of their own that is repeated: where a layer keeps all, it keeps what they gathered.
        if logical == "mlp" and sizes.traits.routed and keeps_all:
            gathers -= 1
        # With a whole block recomputed, attention's output is computed again; the MLP's is not needed.
        if logical == "heads" and whole_block:
            reductions += 1
        if layout.sequence_parallel:
            moves = {REDUCE_SCATTER: reductions, ALL_GATHER: gathers}
        else:
            moves = {ALL_REDUCE: reductions}
        for kind, calls in moves.items():
            what = "residual stream of the layers"
            yield _streamed(config, layout, what, kind, layout.split(logical), calls * sizes.layers)
        if logical == "heads":
            # The sum of all heads' squares is made, and its gradient, as often as attention's output is.
            calls = reductions * sizes.layers * config.train.accumulation
            yield from norms_of_all_heads(config, layout, calls, _tokens(config, layout))
    times = sizes.layers * config.train.accumulation
    # XLA:CPU does not merge what a recomputed block sends to its experts with what the gradients of weights need.
    again = int(whole_block and layout.platform == "cpu")
    expert_calls = expert_traffic.Calls(
        rows=(5 + again) * times,
        weights=3 * times,
        choices=times if keeps_all else 2 * times,
        gradients=times,
        # The backward pass needs the loads for the loss and, where it makes them again, for what is reported.
        sums=3 * times if keeps_all else 2 * times,
    )
    yield from expert_traffic.predict(config, layout, _tokens(config, layout), expert_calls)
    passes = context_traffic.Passes(
        forward=times,
        # Only with remat none are the results of attention kept.
        recomputed=0 if sizes.remat == "none" else times,
        backward=times,
        documents=_gathers_of_starts(config, layout, times, keeps_all),
    )
    yield from context_traffic.predict(config, layout, _tokens(config, layout), passes)


def _gathers_of_starts(config: Config, layout: Layout, times: int, keeps_all: bool) -> int:
    """Return how often a step gathers where documents start, for Ulysses; layers run attention `times` times."""
    k = config.train.accumulation
    inside = config.parallel.zero >= 2 and config.parallel.micro_batches == "inside"
    # They are the same for all layers, so XLA gathers them before the loop over layers, if no loop over micro-batches
    # is inside it: for XLA:CPU, one of a single turn is none. XLA:GPU leaves them in the loop of the backward pass.
    lifted = not inside or (k == 1 and layout.platform == "cpu")
    forward = k if lifted else times
    if keeps_all or (lifted and layout.platform == "cpu"):
        return forward
    return forward + times


def _streamed(config: Config, layout: Layout, what: str, kind: str, axes: tuple[str, ...], calls: int) -> Transfer:
    """Move the residual stream `calls` times in each micro-batch."""
    calls *= config.train.accumulation
    elements = calls * _tokens(config, layout) * config.model.embed
    return transfer(layout, what, kind, axes, calls, elements, compute_width(config))


def _loss(config: Config, layout: Layout) -> Transfer:
    """Return a maximum, a sum and the label's logit for each token, where the vocabulary is split."""
    tokens = _tokens(config, layout)
    k = config.train.accumulation
    sequence = config.model.sequence // layout.parts(SEQUENCE)
    chunks = sequence // chunk_length(layout, sequence, tokens // sequence)
    axes = layout.split("vocab")
    return transfer(layout, "statistics of the loss", ALL_REDUCE, axes, 3 * chunks * k, 3 * tokens * k, F32)


def _tokens(config: Config, layout: Layout) -> int:
    """Return the tokens of a micro-batch on one device."""
    train = config.train
    rows = train.global_batch_size // train.accumulation // layout.ranks
    return rows * config.model.sequence // layout.parts(SEQUENCE)
