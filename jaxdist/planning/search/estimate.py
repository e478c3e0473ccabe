"""Predict the time and the memory of a training step on a cluster, from the configuration alone.

`step_time` adds up the seconds of a step from the parts in `FORMULAS`.
`communication` predicts the bytes and calls of each transfer, and `explain` compares them with the compiled program;
`collective_time` predicts the seconds. How many rows experts compute depends on the router: `expert_rows` says what is
assumed of it. Not included: other jobs on the network, the arithmetic of gradient compression and of outer steps, and
the sort of the tokens by expert.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from jaxdist.config import Config
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
from jaxdist.mesh.split import Split
from jaxdist.models import Model
from jaxdist.output.units import counted
from jaxdist.parallel.pipeline.simulate import Times, lockstep_time
from jaxdist.planning import (
    certainty,
    communication,
    exposure,
    loop_copies,
    memory,
    optimizer_state,
    step_bytes,
    step_time,
    whole_updates,
)
from jaxdist.planning.clusters import Cluster, calibrated
from jaxdist.planning.collective_time import group_over
from jaxdist.planning.communication import purpose
from jaxdist.planning.hardware import GPUS
from jaxdist.planning.layer_time import both_passes, head_seconds, runs_by_matmuls, times_of_layer, update_seconds
from jaxdist.planning.memory import Memory
from jaxdist.planning.predicted_collectives import F32, Transfer
from jaxdist.planning.runs import Step
from jaxdist.planning.search.traffic_time import BETWEEN_SITES, ONCE, step_of
from jaxdist.planning.search.traffic_time import communication as communication_seconds
from jaxdist.planning.sharded_model import ShardedModel
from jaxdist.planning.timing import flops_of_step
from jaxdist.planning.transfer_time import merge_calls, seconds_in
from jaxdist.sharding import Layout

FORMULAS = {
    "arithmetic": "micro-batches x (F + B + recomputed + head); F = layers x (2 tokens x matrices / model axis x "
    "(1 + few / tokens + narrow x model axis / embed) / rate of matmuls + attention / its rate + values x tokens x "
    "embed / memory bandwidth); a split backward pass adds 2 x stashed bytes / memory bandwidth",
    "waiting": "ticks of the schedule x their slots, less the arithmetic; includes the padding of uneven stages",
    CONTEXT: "of a ring's step, max(0, t - its attention) + (overlap - 1) x min(t, its attention) for messages of t, "
    "and the last gradients of keys and values; with Ulysses every all-to-all: nothing overlaps them",
    EXPERT: "all-to-alls of the rows of experts, in the first round and in those that are assumed to follow: nothing "
    "overlaps them",
    MODEL: "exposed share x every collective of the residual stream over the model axis",
    PIPELINE: "messages between stages, and collectives of the vocabulary that all stages share",
    DATA: "all of what is sent once per step; of t sent layer by layer, max(0, t - h) + (overlap - 1) x min(t, h), "
    "where h is the share of the arithmetic that hides it; both at the share of the bandwidth that real steps reach",
    "optimizer": "share x (2 x (parameters + moments) + gradients + copy) / memory bandwidth",
    "other": "seconds of each step, and a share of the rest for each doubling of the devices from 8 on",
}
"""How the seconds of each part of a step are computed."""

MATRIX_FORMULA = "; and the FLOPs of whole matrices / rate of matmuls in float32"
"""What a rule that reads whole matrices adds to the formula of `optimizer`."""

EXPERT_FORMULA = (
    "; of experts, the rows of all rounds, with padding, and what is written to send and weight them; a router in f32"
)
"""What experts add to the formula of `arithmetic`."""

MASKED_FORMULA = (
    "; attention by matmuls, because cuDNN knows no such mask or sizes of heads: at their rate, and its scores at the "
    "rate of the memory"
)
"""What documents, and a window in a ring, add to the formula of `arithmetic` on GPUs."""

UNROLLED_FORMULA = (
    "; less what a loop over layers copies into and out of stacks: bytes / memory bandwidth, {seconds:.3g} s"
)
"""What layers that are written out change in the formula of `arithmetic` on GPUs."""


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
        """Why no run takes the compression, or the moments, that are asked for on this mesh; empty where it does."""
        cut = optimizer_state.cut_blocks(self.config.optimizer, self.sharded.parameters)
        return cut or communication.compression_that_costs(self.sharded)

    @cached_property
    def sending(self) -> Step:
        """How often its parts run, and what they send."""
        return Step.of(self.sharded)

    @cached_property
    def step(self) -> step_time.Step:
        """The seconds that its kernels and transfers take, before they are added up."""
        cluster = self.cluster
        work, lockstep = self._arithmetic(cluster)
        found = communication_seconds(self.sending, self.transfers, self.split.shape, cluster)
        for transfer in merge_calls(self.outer):
            group = group_over(self.split.shape, transfer.axes, cluster)
            name = BETWEEN_SITES if group.sites > 1 else ONCE
            found[name] += seconds_in(group, transfer) / self.split.crossing_traits.every
        learned = self.memory.parameters
        if self.config.model.frozen:
            learned = sum(F32 * p.held for p in self.sharded.parameters if p.trained)
        updated = step_bytes.updated(learned, self.memory.optimizer) + self.memory.copy
        return step_of(
            found,
            arithmetic=work,
            waiting=lockstep - work,
            updated=updated / cluster.bandwidth,
            products=update_seconds(self.config, cluster, whole_updates.flops(self.sharded)),
            devices=self.devices,
        )

    def seconds_on(self, cluster: Cluster) -> float:
        """Return the seconds of a step on a cluster that differs in its efficiency alone."""
        work, lockstep = self._arithmetic(cluster)
        step = replace(self.step, arithmetic=work, waiting=lockstep - work)
        rates = exposure.rates_in(cluster, self.memory.total)
        return float(sum(step_time.parts(step, rates, cluster.overlap - 1).values()))

    def _arithmetic(self, cluster: Cluster) -> tuple[float, float]:
        """Return the seconds of one device's arithmetic, and those until all devices have done theirs."""
        work, lockstep = _arithmetic(self.sending, cluster)
        spared = float(loop_copies.spared(self.sharded)) / cluster.bandwidth
        return work - spared, lockstep - spared

    def at(self, price: str) -> dict[str, float]:
        """Return the seconds of a step by part, at one of `step_time.PRICES`."""
        rates = exposure.rates_in(self.cluster, self.memory.total)
        found = step_time.parts(self.step, rates, self.cluster.overlap - 1, price)
        return {part: float(took) for part, took in found.items()}

    @cached_property
    def parts(self) -> Mapping[str, float]:
        """The seconds of a step by part, at the middle price."""
        return self.at(step_time.MIDDLE)

    @cached_property
    def pessimistic(self) -> float:
        """The seconds of a step if weights cross hosts as slowly as they did in print: plans are chosen by it."""
        return sum(self.at(step_time.PESSIMISTIC).values())

    @cached_property
    def kind(self) -> str:
        """The kind of step, among those of published ones (`certainty`)."""
        shape = self.shape
        by_layer = self.config.parallel.zero >= 2 and shape[DATA] * shape[CONTEXT] * shape[EXPERT] > 1
        leaves_host = bool(np.any(self.step.by_layer_one_card > self.step.by_layer))
        return certainty.kind_of(by_layer, leaves_host, self.split.pipelined, shape[MODEL] > 1)

    @cached_property
    def interval(self) -> certainty.Interval:
        """The seconds between which a step lies, as far as published ones of its kind say."""
        found = certainty.interval(self.kind, self.seconds, self.config.numbers.float8)
        return found._replace(high=max(found.high, self.pessimistic))

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
        flops = flops_of_step(self.config) * self.tokens_per_second
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
        if self.config.optimizer.rule.matrices is not None:
            found["optimizer"] += MATRIX_FORMULA
        if runs_by_matmuls(self.config, self.cluster, self.split.ring):
            found["arithmetic"] += MASKED_FORMULA
        copied = float(loop_copies.spared(self.sharded))
        if copied:
            found["arithmetic"] += UNROLLED_FORMULA.format(seconds=copied / self.cluster.bandwidth)
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


def took_about(candidate: Estimate) -> str:
    """Return the predicted time of a step, and its interval; `~` marks a cluster without measurements."""
    seconds = f"{candidate.seconds:.3g} s"
    if not calibrated(candidate.cluster):
        return f"~{seconds}"
    low, high = candidate.interval
    return f"{seconds}, {low:.3g} to {high:.3g}"


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


def _arithmetic(step: Step, cluster: Cluster) -> tuple[float, float]:
    """Return the seconds of one device's arithmetic in a step, and those until all devices have done theirs."""
    config = step.config
    layout = step.layout
    pipe = step.pipe
    k = step.split.micro_batches
    head = float(head_seconds(config, cluster, step.tokens, layout.parts("vocab")))
    if pipe is None:
        layers = 0.0
        for one in step.stacks:
            times = times_of_layer(one.config, layout, step.tokens, cluster).times(one.config.model.layers)
            layers += float(both_passes(config, times.F, times.B))
        work = k * (layers + head)
        return work, work
    # Work is that of evenly split layers; the schedule runs stages with their padding.
    even = padded = Times(0, 0, 0)
    for one in step.stacks:
        times = times_of_layer(one.config, layout, step.tokens, cluster, pipe.schedule.split)
        even = even.plus(times.times(one.config.model.layers / pipe.stages.ranks))
        padded = padded.plus(times.times(one.runs.layers * pipe.stages.virtual))
    lockstep = lockstep_time(pipe.schedule, padded) + pipe.ticks("H") * head
    if config.refers_in_step:
        # Its pass runs the ticks of F, each of one chunk.
        lockstep += pipe.ticks("F") * padded.F / pipe.stages.virtual
    return k * (float(both_passes(config, even.F, even.B)) + head), lockstep


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
