"""The seconds of a layer on one device: what `kernels_time` says of the kernels of a configuration.

Sizes may be numbers, or arrays with one entry for each candidate of a search.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from jaxdist.config import Config, ModelConfig
from jaxdist.config.matmuls import Matmul, head_sizes_of, matmuls_of
from jaxdist.config.trained import trained_beside
from jaxdist.mesh.split import compute_width
from jaxdist.parallel.pipeline.simulate import Times
from jaxdist.planning import expert_rows, kernels_time
from jaxdist.planning.activations import stashed_per_token
from jaxdist.planning.clusters import Cluster
from jaxdist.planning.hardware import GPUS
from jaxdist.planning.kernels_time import Both, Speed, Units
from jaxdist.planning.predicted_collectives import Numbers
from jaxdist.planning.rates import Rates
from jaxdist.planning.timing import attention_flops_per_token, has_window
from jaxdist.sharding import Layout


def speed_of(config: Config, cluster: Cluster) -> Speed:
    """Return what a device of the cluster reaches in this precision."""
    rates = cluster.rates
    # The peak of a cluster of CPUs is that of float32.
    rate = 1.0 if cluster.gpu == "cpu" else config.numbers.rate
    peak = rate * cluster.peak
    return Speed(peak * cluster.matmul * rates.matmul, peak * rates.attention, cluster.bandwidth)


def speed_of_layers(config: Config, cluster: Cluster) -> Speed:
    """Return what a device reaches in the matmuls of layers with weights: in fp8, where the precision has it.

    A CPU multiplies the same numbers in a wide dtype.
    """
    speed = speed_of(config, cluster)
    if not config.numbers.float8 or cluster.gpu == "cpu":
        return speed
    return replace(speed, matmul=2 * cluster.peak * cluster.rates.float8)


def update_seconds(config: Config, cluster: Cluster, flops: Numbers) -> Numbers:
    """Return the seconds of the products of an update, which are in f32 in any precision."""
    return flops / speed_of(config.with_knobs({"precision": "float32"}), cluster).matmul


def head_seconds(config: Config, cluster: Cluster, tokens: Numbers, parts: Numbers = 1) -> Numbers:
    """Return the seconds of the matmul with the output table: forward, and backward for what is trained of it.

    The loss of pairs makes logits once more in its backward pass, and the reference of adapters in a pass of its own.
    """
    passes = (2 if config.model.frozen else 3) + config.train.learns_pairs + config.refers_in_step
    return passes * head_pass_seconds(config, cluster, tokens, parts)


def head_pass_seconds(config: Config, cluster: Cluster, tokens: Numbers, parts: Numbers) -> Numbers:
    """Return the seconds of one matmul with the output table."""
    return 2 * tokens * config.model.vocab * config.model.embed / parts / speed_of(config, cluster).matmul


def layer_times(
    config: Config,
    cluster: Cluster,
    tokens: Numbers,
    parts: Numbers,
    splits_residual: Numbers,
    stashed: Numbers,
    recomputes_attention: Numbers,
    recomputes_all: Numbers,
    expert_parts: Numbers = 1,
    ring: Numbers = False,
) -> Units:
    """Return the seconds of one layer for the `tokens` of a micro-batch on one of `parts` devices.

    Experts are spread over `expert_parts` devices; `ring` is that of `attention`. The devices share the residual stream
    too where that is split. A split backward pass leaves `stashed` values for W, otherwise 0. Arguments broadcast.
    """
    sizes = config.model
    rates = cluster.rates
    width = compute_width(config)
    speed = speed_of(config, cluster)
    # Kernels of float32 move twice as many bytes.
    moves = width / 2 * kernels_time.moved(tokens, sizes.embed, parts, splits_residual, speed, rates)
    stash = stashed * width * tokens / cluster.bandwidth
    matmuls = _matmuls(config, cluster, tokens, parts, expert_parts, np.where(splits_residual, parts, 1))
    # B writes what W reads.
    matmuls = Units(matmuls.forward, matmuls.inputs + stash, matmuls.weights + stash)
    attends = attention(config, cluster, tokens, parts, ring)
    forward = matmuls.forward + attends.forward + moves
    again = np.where(recomputes_all, forward, np.where(recomputes_attention, attends.forward + moves, 0.0))
    return kernels_time.units(matmuls, attends, moves, again, np.where(recomputes_all, 1.0, 0.0), rates.launch)


def both_passes(config: Config, forward: Numbers, backward: Numbers) -> Numbers:
    """Return the seconds of all passes of a micro-batch: the reference of adapters is one more forward pass."""
    return forward + backward + config.refers_in_step * forward


def times_of_layer(config: Config, layout: Layout, tokens: float, cluster: Cluster, split: bool = False) -> Times:
    """Return the seconds of F, I and W for one layer and the `tokens` of a micro-batch on one device.

    In a `split` backward pass, B also writes what W reads.
    """
    sizes = config.model
    found = layer_times(
        config,
        cluster,
        tokens,
        parts=layout.parts("heads"),
        splits_residual=config.parallel.sequence,
        stashed=stashed_per_token(sizes, layout) if split else 0,
        recomputes_attention=sizes.remat == "dots",
        recomputes_all=sizes.remat not in ("none", "dots"),
        expert_parts=layout.parts("experts"),
        ring=layout.zigzag,
    )
    return Times(*map(float, found))


def attention(config: Config, cluster: Cluster, tokens: Numbers, parts: Numbers, ring: Numbers = False) -> Both:
    """Return the seconds of attention in one layer, for the `tokens` of one of `parts` devices.

    Devices along `context` share the work evenly. What documents hide is computed all the same, and so is what a window
    hides from a `ring`. On GPUs both run by matmuls (`models.attention`), whose scores go through the memory.
    """
    sizes = config.model
    rates = cluster.rates
    speed = speed_of(config, cluster)
    whole = attention_flops_per_token(sizes.model_copy(update={"window": 0})) * tokens / parts
    fused = np.where(ring, whole, attention_flops_per_token(sizes) * tokens / parts)
    # A score is made of a key, and multiplies a value; causal attention needs one half of them.
    scores = 2 * whole / (2 * sum(head_sizes_of(sizes)))
    by_kernel = kernels_time.fused_attention(fused, speed)
    by_matmuls = kernels_time.matmul_attention(whole, scores, speed, rates)
    chosen = runs_by_matmuls(config, cluster, ring)
    return Both(*(np.where(chosen, *each) for each in zip(by_matmuls, by_kernel, strict=True)))


def runs_by_matmuls(config: Config, cluster: Cluster, ring: Numbers) -> Numbers:
    """Return whether a GPU attends by matmuls, because of a mask or of sizes of heads that cuDNN does not know."""
    sizes = head_sizes_of(config.model)
    always = config.model.documents_apart or sizes.key != sizes.value
    masked = np.logical_or(always, np.logical_and(ring, has_window(config.model)))
    return np.logical_and(masked, cluster.gpu != "cpu")


def _matmuls(
    config: Config, cluster: Cluster, tokens: Numbers, parts: Numbers, expert_parts: Numbers, residual_parts: Numbers
) -> Units:
    """Return the seconds of one layer's matmuls with weights, which `parts` devices split, and of what experts send.

    Weights that nothing splits multiply the residual stream as it lies, split into `residual_parts`.
    Rows that pad the queues of experts are computed too. Frozen weights have no gradients, and what is trained beside
    them counts as arithmetic alone: its matmuls are thin.
    """
    sizes = config.model
    rates = cluster.rates
    speed = speed_of_layers(config, cluster)
    split = [matmul for matmul in matmuls_of(sizes).values() if matmul.split]
    one = sum(_matmul(sizes, each, tokens, parts, expert_parts, speed, rates) for each in split)
    whole = [matmul for matmul in matmuls_of(sizes).values() if not (matmul.split or matmul.exact)]
    one = one + sum(_matmul(sizes, each, tokens / residual_parts, 1, 1, speed, rates) for each in whole)
    router = _router(config, cluster, tokens)
    # Each value is written and read.
    dispatched = 2 * _moved_by_dispatch(sizes, tokens, parts, expert_parts) * compute_width(config) / cluster.bandwidth
    one = one + dispatched
    if not sizes.frozen:
        return Units(one + router, one + router, one + router)
    beside = 2 * tokens * trained_beside(sizes) / parts / speed.matmul
    # A frozen router has no gradients of its weights.
    return Units(one + beside + router, one + beside + router, beside)


def _matmul(
    m: ModelConfig, matmul: Matmul, tokens: Numbers, parts: Numbers, expert_parts: Numbers, speed: Speed, rates: Rates
) -> Numbers:
    """Return the seconds of the product of a device's rows with a weight: one, or those of its experts at once."""
    rows = tokens
    experts: Numbers = 1
    if matmul.stacked:
        rows = expert_rows.rows_of_queue(m, tokens) * expert_parts
        experts = m.experts / expert_parts
    flops = 2 * experts * rows * matmul.into * matmul.out / parts
    return kernels_time.matmul(flops, rows, parts, m.embed, speed, rates)


def _router(config: Config, cluster: Cluster, tokens: Numbers) -> Numbers:
    """Return the seconds of a router's matmul: of the forward pass, and of a half of the backward pass.

    It is in f32 in any precision, which the matrix units of a GPU do not compute.
    """
    sizes = config.model
    if not sizes.traits.routed:
        return 0.0
    rate = speed_of(config, cluster).matmul
    if cluster.gpu in GPUS:
        rate = GPUS[cluster.gpu].peak_f32 * cluster.matmul
    return 2 * tokens * sizes.embed * sizes.experts / rate


def _moved_by_dispatch(m: ModelConfig, tokens: Numbers, parts: Numbers, expert_parts: Numbers) -> Numbers:
    """Return the values that a pass writes to send rows to their experts and back, and to weight what these compute.

    Rows are lined up for their experts and come back, and an exchange over several devices writes them once more.
    """
    if not m.traits.routed:
        return 0.0
    rows = m.experts * expert_rows.rows_of_queue(m, tokens)
    exchanged = 2 * m.embed * np.where(np.asarray(expert_parts) > 1, 2, 1)
    return rows * (exchanged + m.expert_size / parts)
