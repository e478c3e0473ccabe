"""How long a step would take on a cluster, and what it would hold: predicted from the configuration alone.

A step is its arithmetic, what nobody computes behind of what crosses the mesh, and the optimizer's update:

    arithmetic    products with weights, in whole rounds of tiles (`products`), and attention's at their rate; what the
                  others read and write, and a backward pass in two pieces hands on, at the rate of the memory; layers
                  run k times, or in a pipeline as often as the ticks of its schedule
    waiting       ticks in which a rank has nothing to do, and the padding of uneven stages
    model         over `model`, each layer needs the sum before it goes on
    pipeline      between stages
    data          weights and gradients: hidden behind the arithmetic where they go layer by layer (ZeRO 2 and 3), and
                  behind nothing where they go once a step (0 and 1)
    optimizer     reads and writes parameters, moments and gradients once

Bytes and calls of each transfer are those of `communication`, which `explain` holds against the compiled program; the
times of collectives those of `collective_time`. What is not in here: launches, the input, other jobs on the network.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from jaxdist.config import Config, ModelConfig
from jaxdist.mesh import AXES, BATCH_AXES, DATA, MODEL, PIPELINE, MeshShape, abstract_mesh, micro_batches, parse_mesh
from jaxdist.models import Model
from jaxdist.parallel.pipeline.simulate import Times, lockstep_time
from jaxdist.planning import collective_time, communication, memory
from jaxdist.planning.activations import saved_per_token, stashed_per_token
from jaxdist.planning.clusters import Cluster
from jaxdist.planning.collective_time import inside_of
from jaxdist.planning.hardware import GPUS
from jaxdist.planning.memory import Memory
from jaxdist.planning.parameter_layout import compute_width
from jaxdist.planning.pipelines import Pipeline, pipeline_of
from jaxdist.planning.predicted_collectives import Transfer
from jaxdist.planning.search.products import layer_products
from jaxdist.planning.timing import flops_per_token
from jaxdist.sharding import Layout, rules

PASSES = 2
"""Each value that a layer keeps is written and read once going forward, and its gradient once going backward."""

FORMULAS = {
    "arithmetic": "micro-batches x (F + B + recomputed + head); F = layers x (2 tokens x (matrices, in whole rounds of "
    "tiles, + sequence x embed / 0.65) / (model axis x matmul x peak) + 2 x kept bytes / memory bandwidth); "
    "where B is two passes, 2 x stashed bytes / memory bandwidth too",
    "waiting": "ticks of the schedule x its slots, less the arithmetic; padding of uneven stages is in it",
    MODEL: "every collective of the residual stream over the model axis: nothing runs beside it",
    PIPELINE: "messages between stages, and what all stages share of the vocabulary",
    DATA: "what goes once; of t that goes layer by layer, max(0, t - arithmetic) + (overlap - 1) x min(t, arithmetic)",
    "optimizer": "(2 x (parameters + moments) + gradients + copy) / memory bandwidth",
}
"""Of the seconds of a step's parts."""

ATTENTION = 0.65
"""Of the rate of a product with weights, what fused attention reaches: on A100 50 to 73 % of the peak (Dao 2023), where
a product reaches 82 %; on H100, by cuDNN from 2048 tokens on, 49 to 54 % forward and 47 to 52 % backward (Shah et al.
2024, figures 5 and 6), where a product reaches 80 %."""

BACK = 2.5
"""Times its forward pass, what attention's backward pass takes: it makes the scores again (Dao 2023, section 2.3)."""

UPDATE = 2
"""What the optimizer holds is read and written."""


@dataclass(frozen=True)
class Estimate:
    config: Config
    shape: MeshShape
    cluster: Cluster
    memory: Memory
    transfers: tuple[Transfer, ...]
    parts: Mapping[str, float]
    """Seconds of a step by what they go to, as above."""

    @cached_property
    def seconds(self) -> float:
        return sum(self.parts.values())

    @property
    def devices(self) -> int:
        return abstract_mesh(self.shape).size

    @property
    def micro(self) -> int:
        """Micro-batches of a step."""
        return micro_batches(self.config, self.shape)

    @property
    def tokens_per_second(self) -> float:
        return self.config.train.global_batch_size * self.config.model.sequence / self.seconds

    @property
    def mfu(self) -> float:
        """Of the arithmetic that the model needs, recomputation not counted (PaLM, appendix B)."""
        flops = flops_per_token(self.config.model) * self.tokens_per_second
        return flops / (self.devices * self.cluster.peak)

    @property
    def fits(self) -> bool:
        return self.memory.total <= self.cluster.memory

    def sent(self, part: str) -> float:
        """Bytes that a device sends in a step for this part: weights and gradients for `data`."""
        return sum(one.wire_bytes for one in self.transfers if purpose(one) == part)

    def share(self, part: str) -> float:
        """Of the step's time."""
        return self.parts[part] / self.seconds


def told(one: Estimate) -> str:
    """A candidate in a few words."""
    config, zero = one.config, f", ZeRO {one.config.parallel.zero}" if one.config.parallel.zero else ""
    cut = f", {config.pipeline.schedule}" if one.shape[PIPELINE] > 1 else ""
    return f"{config.mesh}{zero}{cut}, {one.micro} micro-batch(es), remat {config.model.remat}"


def estimate(config: Config, model: Model, cluster: Cluster) -> Estimate:
    """`config.mesh` names every axis and fits; `config.precision` is not `auto`; `model` is `config.model`'s."""
    shape = parse_mesh(config.mesh)
    layout = layout_of(config, shape, cluster)
    held = memory.predict(config, model, layout)
    transfers = tuple(communication.predict(config, model, layout))
    pipe = pipeline_of(config, layout)
    work, lockstep = _arithmetic(config, layout, pipe, cluster)
    over, beside = dict.fromkeys((MODEL, PIPELINE, DATA), 0.0), 0.0
    for one in together(transfers):
        took = seconds(one, shape, cluster)
        if _layer_by_layer(one, config, shape):
            beside += took
        else:
            over[purpose(one)] += took
    if pipe and not pipe.schedule.uniform:  # a rank takes those of its own units, not of every tick
        over[MODEL] *= pipe.schedule.micro_batches * pipe.schedule.virtual / pipe.ticks("F")
    over[DATA] += exposed(beside, lockstep, cluster)
    update = UPDATE * (held.parameters + held.optimizer) + held.parameters + held.copy
    parts = dict(arithmetic=work, waiting=lockstep - work, **over, optimizer=update / cluster.bandwidth)
    return Estimate(config, shape, cluster, held, transfers, parts)


def layout_of(config: Config, shape: MeshShape, cluster: Cluster) -> Layout:
    return Layout.on(abstract_mesh(shape), rules(config, shape), Device(cluster))


def together(transfers: Iterable[Transfer]) -> list[Transfer]:
    """As the compiler sends them: in one call what goes the same way for the same purpose at the same time."""
    found: dict[tuple, Transfer] = {}
    for one in transfers:
        key = one.axes, one.kind, one.what, one.width
        if other := found.get(key):
            one = replace(one, calls=max(one.calls, other.calls), elements=one.elements + other.elements)
        found[key] = one
    return list(found.values())


def seconds(transfer: Transfer, shape: Mapping[str, int], cluster: Cluster) -> float:
    """All calls of it."""
    inside = ranks_inside(shape, transfer.axes, cluster.per_host)
    size = transfer.payload_bytes / transfer.calls
    return transfer.calls * _call(transfer.kind, size, transfer.devices, inside, cluster)


@lru_cache(maxsize=4096)
def _call(kind: str, size: float, ranks: int, inside: int, cluster: Cluster) -> float:
    """The candidates of a search have most of theirs in common."""
    return float(collective_time.seconds(kind, size, ranks, inside, cluster))


def ranks_inside(shape: Mapping[str, int], axes: tuple[str, ...], per_host: int) -> int:
    """How many of a group over these axes share a host: its devices are neighbours, innermost axis first."""
    found, stride = 1, 1
    for axis in reversed(AXES):
        if axis in axes:
            found *= int(inside_of(shape[axis], stride, per_host))
        stride *= shape[axis]
    return found


def exposed(communication: float, arithmetic: float, cluster: Cluster) -> float:
    """What is left to wait for of communication that runs beside arithmetic, which slows both down a little."""
    behind = min(communication, arithmetic)
    return communication - behind + (cluster.overlap - 1) * behind


def attention_flops(m: ModelConfig, tokens: float) -> float:
    """Of its two products of tokens with tokens, forward; half of each is needed, as it is causal."""
    return 2 * tokens * m.sequence * m.embed


def head_flops(m: ModelConfig, tokens: float) -> float:
    """Of the product with the output table: forward, and backward for both of its operands."""
    return 3 * 2 * tokens * m.vocab * m.embed


def rate(config: Config, cluster: Cluster) -> float:
    """FLOP/s of a device: float32 goes through the matrix units of a GPU at half the rate of bfloat16."""
    half = 0.5 if config.precision == "float32" and cluster.gpu != "cpu" else 1.0
    return half * cluster.peak * cluster.matmul


def stage_times(
    config: Config, layout: Layout, layers: float, tokens: float, cluster: Cluster, split: bool = False
) -> Times:
    """Seconds of so many layers and a micro-batch's tokens on one device. Of a `split` backward pass, B writes what W
    reads."""
    sizes, ways, speed = config.model, layout.parts("heads"), rate(config, cluster)
    moved = compute_width(config) * saved_per_token(sizes, layout, "none") * PASSES * tokens / cluster.bandwidth
    products, inputs, weights = (float(each) / speed for each in layer_products(sizes, tokens, ways, cluster.gpu))
    attention = attention_flops(sizes, tokens) / (ways * speed * ATTENTION)
    forward = products + attention + moved
    again = {"none": 0.0, "dots": attention + moved}.get(sizes.remat, forward)
    stashed = split * compute_width(config) * stashed_per_token(sizes, layout) * tokens / cluster.bandwidth
    of_input = inputs + BACK * attention + moved + again + stashed
    return Times(layers * forward, layers * of_input, layers * (weights + moved + stashed))


def _arithmetic(config: Config, layout: Layout, pipe: Pipeline | None, cluster: Cluster) -> tuple[float, float]:
    """Seconds of the arithmetic that a device has in a step; and until all have done theirs, waiting for each other."""
    sizes, k = config.model, micro_batches(config, dict(layout.axes))
    tokens = config.train.global_batch_size / (k * layout.ranks) * sizes.sequence
    head = head_flops(sizes, tokens) / layout.parts("vocab") / rate(config, cluster)
    if pipe is None:
        times = stage_times(config, layout, sizes.layers, tokens, cluster)
        work = k * (times.F + times.B + head)
        return work, work
    layers = lambda count: stage_times(config, layout, count, tokens, cluster, pipe.schedule.split)
    even, held = layers(sizes.layers / pipe.stages.ranks), layers(pipe.stages.depth * pipe.stages.virtual)
    lockstep = lockstep_time(pipe.schedule, held) + pipe.ticks("H") * head
    return k * (even.F + even.B + head), lockstep


def purpose(transfer: Transfer) -> str:
    """Which part of a step it belongs to: the part of its outermost axis, and weights and gradients go over `data`."""
    if set(transfer.axes) & set(BATCH_AXES):
        return DATA
    return MODEL if MODEL in transfer.axes else PIPELINE


def _layer_by_layer(transfer: Transfer, config: Config, shape: Mapping[str, int]) -> bool:
    """Whether it is of weights or gradients, and goes while other layers are computed."""
    often = transfer.calls * shape[PIPELINE] >= config.model.layers
    return purpose(transfer) == DATA and config.parallel.zero >= 2 and often


@dataclass(frozen=True)
class Device:
    """A device of the cluster, as a layout looks at it."""

    cluster: Cluster

    @property
    def platform(self) -> str:
        return "cpu" if self.cluster.gpu == "cpu" else "gpu"

    @property
    def compute_capability(self) -> str:
        gpu = GPUS.get(self.cluster.gpu)
        return gpu.compute_capability if gpu else ""
