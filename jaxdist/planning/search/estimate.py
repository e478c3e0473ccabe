"""Predict the time and the memory of a training step on a cluster, from the configuration alone.

The time of a step is the sum of its arithmetic, the communication that nothing overlaps, and the optimizer's update:

    arithmetic    matmuls with weights, in whole waves of tiles (`products`), and attention at its own rate; what other
                  operations read and write, and what a split backward pass hands on, at the rate of the memory; layers
                  run k times, or in a pipeline as often as the ticks of its schedule
    waiting       ticks in which a rank has nothing to do, and the padding of uneven stages
    context       attention over `context`: what the work on keys that are there does not hide of a ring, and all of
                  what Ulysses exchanges (`attention_time`)
    expert        all-to-alls over `expert`: the experts wait for their rows, and the next layer for theirs
    model         collectives over `model`: each layer needs their results before it goes on
    pipeline      messages between stages
    data          weights and gradients: overlapped with the arithmetic where they are sent layer by layer (ZeRO 2 and
                  3), and with nothing where they are sent once per step (0 and 1, and over the replicas always, but
                  for delayed gradients); of H local steps, each pays a part of the outer step
    optimizer     reads and writes parameters, moments and gradients once

`communication` predicts the bytes and calls of each transfer, and `explain` compares them with the compiled program;
`collective_time` predicts the seconds. How many rows experts compute depends on the router: `expert_rows` says what is
assumed of it. Not included: kernel launches, the input, other jobs on the network, and the
arithmetic of gradient compression and of outer steps, and the sort of the tokens by expert.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import numpy as np

from jaxdist.config import Config, ModelConfig
from jaxdist.mesh import (
    AXES,
    CONTEXT,
    DATA,
    EXPERT,
    MODEL,
    PIPELINE,
    MeshShape,
    abstract_mesh,
    crossing,
    parse_mesh,
)
from jaxdist.mesh.context import Choice
from jaxdist.mesh.split import Split, compute_width
from jaxdist.models import Model
from jaxdist.output.units import counted
from jaxdist.parallel.pipeline.simulate import Times, lockstep_time
from jaxdist.planning import communication, expert_rows, memory, step_bytes
from jaxdist.planning.activations import saved_per_token, stashed_per_token
from jaxdist.planning.clusters import Cluster
from jaxdist.planning.collective_time import Numbers
from jaxdist.planning.communication import purpose
from jaxdist.planning.hardware import GPUS
from jaxdist.planning.memory import Memory
from jaxdist.planning.predicted_collectives import F32, Transfer
from jaxdist.planning.runs import Step
from jaxdist.planning.search.attention_time import ATTENTION_BACKWARD, attention_seconds, runs_by_matmuls
from jaxdist.planning.search.products import layer_products, matmul_rate
from jaxdist.planning.search.traffic_time import communication as communication_seconds
from jaxdist.planning.sharded_model import ShardedModel
from jaxdist.planning.timing import flops_per_token
from jaxdist.planning.transfer_time import exposed, merge_calls, seconds
from jaxdist.sharding import Layout

PASSES = 2
"""Each value that a layer saves is written and read once in the forward pass, and its gradient once in the backward
pass."""

FORMULAS = {
    "arithmetic": "micro-batches x (F + B + recomputed + head); F = layers x (2 tokens x (matrices, in whole waves of "
    "tiles, + 2 x keys seen x heads x head size / 0.65) / (model axis x matmul x peak) + 2 x saved bytes / memory "
    "bandwidth); a split backward pass adds 2 x stashed bytes / memory bandwidth",
    "waiting": "ticks of the schedule x their slots, less the arithmetic; includes the padding of uneven stages",
    CONTEXT: "of a ring's step, max(0, t - its attention) + (overlap - 1) x min(t, its attention) for messages of t, "
    "and the last gradients of keys and values; with Ulysses every all-to-all: nothing overlaps them",
    EXPERT: "all-to-alls of the rows of experts, in the first round and in those that are assumed to follow: nothing "
    "overlaps them",
    MODEL: "every collective of the residual stream over the model axis: nothing overlaps them",
    PIPELINE: "messages between stages, and collectives of the vocabulary that all stages share",
    DATA: "all of what is sent once per step; of t sent layer by layer, max(0, t - arithmetic) + (overlap - 1) x "
    "min(t, arithmetic)",
    "optimizer": "(2 x (parameters + moments) + gradients + copy) / memory bandwidth",
}
"""How the seconds of each part of a step are computed."""

EXPERT_FORMULA = (
    "; of experts, the rows of all rounds, with padding, and what is written to send and weight them; a router in f32"
)
"""What experts add to the formula of `arithmetic`."""

MASKED_FORMULA = (
    "; attention by matmuls, because cuDNN knows no such mask: at their rate, with 16 bytes of each score at the rate "
    "of the memory"
)
"""What documents, and a window in a ring, add to the formula of `arithmetic` on GPUs."""


@dataclass(frozen=True)
class Estimate:
    """A candidate. Its memory, transfers and time are predicted when they are asked for: of one that fits, all are."""

    sharded: ShardedModel
    cluster: Cluster

    @property
    def split(self) -> Split:
        """How its mesh splits its configuration."""
        return self.sharded.split

    @cached_property
    def memory(self) -> Memory:
        """The bytes of a device."""
        return memory.predict(self.sharded)

    @cached_property
    def transfers(self) -> tuple[Transfer, ...]:
        """The transfers of a step: with local steps, of one replica, priced where it lies on the whole mesh."""
        return tuple(communication.predict(self.sharded))

    @cached_property
    def outer(self) -> tuple[Transfer, ...]:
        """The transfers of the outer step, once in `train.local_steps` steps; none without local steps."""
        return tuple(communication.outer(self.sharded))

    @cached_property
    def refused(self) -> str:
        """Why no run takes the compression that is asked for on this mesh; empty where it does."""
        return communication.compression_that_costs(self.sharded)

    @cached_property
    def parts(self) -> Mapping[str, float]:
        """The seconds of a step by part, as listed at the top of this file."""
        cluster = self.cluster
        step = Step.of(self.sharded)
        work, lockstep = _arithmetic(step, cluster)
        found = communication_seconds(step, self.transfers, self.split.shape, cluster)
        exposed_seconds = found.exposed
        for transfer in merge_calls(self.outer):
            exposed_seconds[DATA] += seconds(transfer, self.split.shape, cluster) / self.split.crossing_traits.every
        exposed_seconds[DATA] += exposed(found.overlapping, lockstep, cluster)
        learned = self.memory.parameters
        if self.config.model.frozen:
            learned = sum(F32 * p.held for p in self.sharded.parameters if p.trained)
        updated = step_bytes.updated(learned, self.memory.optimizer) + self.memory.copy
        return {
            "arithmetic": work,
            "waiting": lockstep - work,
            **{part: float(took) for part, took in exposed_seconds.items()},
            "optimizer": float(updated / cluster.bandwidth),
        }

    @property
    def config(self) -> Config:
        """The configuration."""
        return self.split.config

    @property
    def shape(self) -> MeshShape:
        """The mesh."""
        return dict(self.split.shape)

    @cached_property
    def seconds(self) -> float:
        """The seconds of a step."""
        return sum(self.parts.values())

    @property
    def devices(self) -> int:
        """The number of devices of the mesh."""
        return self.split.size(*AXES)

    @property
    def micro(self) -> int:
        """The number of micro-batches in a step."""
        return self.split.micro_batches

    @property
    def tokens_per_second(self) -> float:
        """The throughput of all devices together."""
        return self.config.train.global_batch_size * self.config.model.sequence / self.seconds

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation: recomputation is not counted (PaLM, appendix B)."""
        flops = flops_per_token(self.config.model) * self.tokens_per_second
        return flops / (self.devices * self.cluster.peak)

    @property
    def fits(self) -> bool:
        """Whether the step fits into the memory of a device, and is not refused."""
        return self.memory.total <= self.cluster.memory and not self.refused

    @property
    def in_force(self) -> str:
        """What changes the loss, such as `int8`; empty where it is that of one device."""
        return crossing.in_force(self.config, self.shape)

    @property
    def attention(self) -> Choice | None:
        """How attention runs over `context`, and why; None where that axis is 1."""
        return self.split.attention if self.split.row_parts > 1 else None

    def sent(self, part: str) -> float:
        """Return the bytes that a device sends per step for a part of it: for `data`, weights and gradients."""
        each_step = sum(transfer.wire_bytes for transfer in self.transfers if purpose(transfer) == part)
        of_round = sum(transfer.wire_bytes for transfer in self.outer if purpose(transfer) == part)
        return each_step + of_round / crossing.asked(self.config).every

    @property
    def formulas(self) -> dict[str, str]:
        """How the seconds of each part are computed."""
        found = dict(FORMULAS)
        if self.config.model.traits.routed:
            found["arithmetic"] += EXPERT_FORMULA
        if runs_by_matmuls(self.config, self.cluster, self.split.ring):
            found["arithmetic"] += MASKED_FORMULA
        found[DATA] += crossing.asked(self.config).formula
        return found

    def share(self, part: str) -> float:
        """Return the share of the step's time that a part of it takes."""
        return self.parts[part] / self.seconds


def label(candidate: Estimate) -> str:
    """Return a candidate in a few words, such as `8x1x1, ZeRO 2, 4 micro-batches, remat none`."""
    config = candidate.config
    words = [config.mesh]
    if candidate.attention:
        words.append(candidate.attention.form)
    if config.parallel.zero:
        words.append(f"ZeRO {config.parallel.zero}")
    if candidate.split.pipelined:
        words.append(config.pipeline.schedule)
    words += [counted(candidate.micro, "micro-batch"), f"remat {config.model.remat}"]
    if candidate.in_force:
        words.append(candidate.in_force)
    return ", ".join(words)


def estimate(config: Config, model: Model, cluster: Cluster) -> Estimate:
    """Predict a step of `config` on `cluster`.

    `config.mesh` names every axis and fits; `config.precision` is not `auto`; `model` is that of `config.model`.
    """
    return Estimate(sharded_model(Split(config, parse_mesh(config.mesh)), model, cluster), cluster)


def sharded_model(split: Split, model: Model, cluster: Cluster) -> ShardedModel:
    """Return a model on a mesh of the cluster's devices."""
    return ShardedModel(split, model, layout_of(split, cluster))


def layout_of(split: Split, cluster: Cluster) -> Layout:
    """Return the layout that `split` asks for on a mesh of the cluster's devices."""
    return Layout.of(split, abstract_mesh(split.shape), Device(cluster))


Number = TypeVar("Number", float, np.ndarray)


def head_flops(m: ModelConfig, tokens: Number) -> Number:
    """Return the FLOPs of the matmul with the output table: forward, and backward for its operands that are trained."""
    passes = 2 if m.frozen else 3
    return passes * 2 * tokens * m.vocab * m.embed


def router_seconds(config: Config, cluster: Cluster, tokens: Numbers) -> Numbers:
    """Return the seconds of a router's matmul: of the forward pass, and of a half of the backward pass.

    It is in f32 in any precision, which the matrix units of a GPU do not compute.
    """
    sizes = config.model
    if not sizes.traits.routed:
        return 0.0
    rate = matmul_rate(config, cluster)
    if cluster.gpu in GPUS:
        rate = GPUS[cluster.gpu].peak_f32 * cluster.matmul
    return 2 * tokens * sizes.embed * sizes.experts / rate


def moved_by_dispatch(m: ModelConfig, tokens: Numbers, parts: Numbers, expert_parts: Numbers) -> Numbers:
    """Return the values that a pass writes to send rows to their experts and back, and to weight what these compute.

    Rows are lined up for their experts and come back, and an exchange over several devices writes them once more.
    """
    if not m.traits.routed:
        return 0.0
    rows = m.experts * expert_rows.rows_of_queue(m, tokens)
    exchanged = 2 * m.embed * np.where(np.asarray(expert_parts) > 1, 2, 1)
    return rows * (exchanged + m.expert_size / parts)


def layer_times(
    config: Config,
    cluster: Cluster,
    tokens: Numbers,
    parts: Numbers,
    saved: Numbers,
    stashed: Numbers,
    recomputes_attention: Numbers,
    recomputes_all: Numbers,
    expert_parts: Numbers = 1,
    ring: Numbers = False,
) -> tuple[Numbers, Numbers, Numbers]:
    """Return the seconds of F, I and W for one layer and the `tokens` of a micro-batch on one of `parts` devices.

    Experts are spread over `expert_parts` devices; `ring` is that of `attention_seconds`. `saved` values for each token
    go through the memory in each pass; a split backward pass leaves `stashed` values for W, otherwise 0. Arguments
    broadcast.
    """
    sizes = config.model
    rate = matmul_rate(config, cluster)
    seconds_per_value = compute_width(config) * tokens / cluster.bandwidth
    dispatched = moved_by_dispatch(sizes, tokens, parts, expert_parts) * compute_width(config) / cluster.bandwidth
    kept = PASSES * saved * seconds_per_value
    moved = kept + PASSES * dispatched
    router = router_seconds(config, cluster, tokens)
    of_products = layer_products(sizes, tokens, parts, cluster.gpu, expert_parts)
    products, inputs, weights = (flops / rate for flops in of_products)
    products = products + router
    inputs = inputs + router
    # A frozen router and frozen experts have no gradients.
    if sizes.frozen:
        weights = weights + kept
    else:
        weights = weights + router + moved
    attention = attention_seconds(config, cluster, tokens, parts, ring)
    forward = products + attention + moved
    recomputed = np.where(recomputes_all, forward, np.where(recomputes_attention, attention + moved, 0.0))
    # B writes what W reads.
    stash = stashed * seconds_per_value
    return forward, inputs + ATTENTION_BACKWARD * attention + moved + recomputed + stash, weights + stash


def times_of_layer(config: Config, layout: Layout, tokens: float, cluster: Cluster, split: bool = False) -> Times:
    """Return the seconds of F, I and W for one layer and the `tokens` of a micro-batch on one device.

    In a `split` backward pass, B also writes what W reads.
    """
    sizes = config.model
    saved = saved_per_token(sizes, layout, "none")
    stashed = stashed_per_token(sizes, layout) if split else 0
    attention = sizes.remat == "dots"
    everything = sizes.remat not in ("none", "dots")
    parts = layout.parts("heads")
    expert_parts = layout.parts("experts")
    units = layer_times(
        config, cluster, tokens, parts, saved, stashed, attention, everything, expert_parts, layout.zigzag
    )
    return Times(*map(float, units))


def _arithmetic(step: Step, cluster: Cluster) -> tuple[float, float]:
    """Return the seconds of one device's arithmetic in a step, and those until all devices have done theirs."""
    config = step.config
    layout = step.layout
    sizes = config.model
    pipe = step.pipe
    k = step.split.micro_batches
    head = head_flops(sizes, step.tokens) / layout.parts("vocab") / matmul_rate(config, cluster)
    if pipe is None:
        layers = 0.0
        for one in step.stacks:
            times = times_of_layer(one.config, layout, step.tokens, cluster).times(one.config.model.layers)
            layers += times.F + times.B
        work = k * (layers + head)
        return work, work
    # Work is that of evenly split layers; the schedule runs stages with their padding.
    times = times_of_layer(config, layout, step.tokens, cluster, pipe.schedule.split)
    even = times.times(sizes.layers / pipe.stages.ranks)
    padded = times.times(pipe.stages.depth * pipe.stages.virtual)
    lockstep = lockstep_time(pipe.schedule, padded) + pipe.ticks("H") * head
    return k * (even.F + even.B + head), lockstep


@dataclass(frozen=True)
class Device:
    """A device of a cluster, with the attributes that `Layout.on` reads."""

    cluster: Cluster

    @property
    def platform(self) -> str:
        """The platform, as JAX names it."""
        return "cpu" if self.cluster.gpu == "cpu" else "gpu"

    @property
    def compute_capability(self) -> str:
        """The CUDA compute capability, such as `9.0`; empty where the GPU is not known."""
        gpu = GPUS.get(self.cluster.gpu)
        return gpu.compute_capability if gpu else ""
