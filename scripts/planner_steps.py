"""What the measured programs do, and the rows of `planner_rows` as steps whose time `planning.step_time` adds up."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from jaxdist.planning import kernels_time
from jaxdist.planning.clusters import Link
from jaxdist.planning.collective_time import START, Group, Links, seconds_of
from jaxdist.planning.kernels_time import Both, Speed, Units
from jaxdist.planning.predicted_collectives import ALL_GATHER, ALL_REDUCE, PERMUTE, REDUCE_SCATTER
from jaxdist.planning.rates import GENERATIONS, Rates
from jaxdist.planning.step_time import Step, over_one_card
from scripts.planner_rows import KERNELS, Row, like

EAGER_NORMS = (105 - 8 + 72) / 105
"""What norms in eager PyTorch add to the bytes of a layer's other kernels, of which there are about 105 for a value of
the residual stream: in place of 4 bytes, each of the two norms moves 36, since it computes in float32 step by step."""

BYTES_UPDATED = 30
"""Bytes that Adam reads and writes for a parameter: masters, two moments, a gradient, and a copy in 16 bits."""

WEIGHTS_OF_LAYER, OTHER_WEIGHTS = 7, 3
"""The matrices and norms of a layer of InternLM, and of the rest of it: a rank owns whole ones."""

INTERFERENCE = 0.126
"""What computing and communicating at once add, of the shorter one: that of the clusters' files."""


@dataclass(frozen=True)
class Programs:
    """What the measured programs reach where jaxdist has no such program."""

    flash1: float = 0.30
    """The rate of the first FlashAttention over the peak, on A100; on H100 it is as fast."""
    flash2: float = 0.50
    """That of the second one on A100."""
    flash2_h100: float = 0.28
    """That of the second one on H100, without its new instructions."""
    cudnn: float = 0.50
    softmax: float = 0.5
    """What attention with a fused softmax moves of that by matmuls."""


@dataclass(frozen=True)
class Rows:
    """Many rows as arrays; what no constant changes is computed once."""

    rows: list[Row]
    columns: dict[str, np.ndarray] = field(default_factory=dict)

    def __getattr__(self, name: str) -> np.ndarray:
        """Return a column: a number of each row, or of its shape or GPU."""
        if name.startswith("_"):
            raise AttributeError(name)
        if name not in self.columns:
            self.columns[name] = np.array([_number(row, name) for row in self.rows], float)
        return self.columns[name]

    @cached_property
    def kernels(self) -> dict[str, np.ndarray]:
        """Kernel of attention -> whether each row has it."""
        return {name: np.array([row.attention == name for row in self.rows]) for name in KERNELS}

    def of_generation(self, values: dict[str, float]) -> np.ndarray:
        """Return the value of each row's GPU."""
        return sum(value * self.generations[name] for name, value in values.items())

    @cached_property
    def generations(self) -> dict[str, np.ndarray]:
        """Generation -> whether each row's GPU is of it."""
        found = [row.gpu.generation for row in self.rows]
        return {name: np.array([one == name for one in found], float) for name in set(GENERATIONS.values())}

    @cached_property
    def best(self) -> np.ndarray:
        """The share of the peak that the best matmul reaches."""
        return np.array([like(row.gpu).matmul for row in self.rows])

    @cached_property
    def full(self) -> np.ndarray:
        """Whether all of a layer is computed again."""
        return np.array([row.recomputes.startswith(("full", "block")) for row in self.rows], float)

    @cached_property
    def selective(self) -> np.ndarray:
        """Whether attention is."""
        return np.array([row.recomputes.startswith("selective") for row in self.rows], float)

    @cached_property
    def tokens(self) -> np.ndarray:
        """The tokens of a micro-batch on a rank."""
        return self.micro_rows * self.sequence / self.context

    @cached_property
    def links(self) -> Links:
        """The links of each row's cluster."""
        found = [like(row.gpu) for row in self.rows]
        inside = Link(*(np.array([getattr(one.inside, name) for one in found]) for name in ("bandwidth", "latency")))
        across = Link(self.across, np.array([one.across.latency for one in found]))
        return Links(inside, across)

    def group(self, ranks: np.ndarray, stride: np.ndarray) -> Group:
        """Return groups of ranks whose neighbours are `stride` devices apart."""
        inside = np.clip(self.per_host // stride, 1, ranks)
        return Group(np.asarray(ranks, float), inside, self.links)

    @cached_property
    def of_tensors(self) -> np.ndarray:
        """The seconds of the collectives over tensor ranks of a layer and micro-batch, as if nothing hid them."""
        one = seconds_of(ALL_REDUCE, 2 * self.tokens * self.hidden, self.group(self.tensor, np.ones(len(self.rows))))
        return (4 + 1.5 * self.full) * one

    @cached_property
    def of_context(self) -> np.ndarray:
        """The seconds of a layer's messages of keys and values over context, as if nothing hid them."""
        size = 2 * self.tokens * 2 * self.kv_heads * self.hidden / self.heads / self.tensor
        one = seconds_of(PERMUTE, size, self.group(self.context, self.tensor))
        return np.where(self.context > 1, 2 * 3 * (self.context - 1) * one, 0)

    @cached_property
    def of_stages(self) -> np.ndarray:
        """The seconds of messages between stages."""
        rate = np.minimum(self.across, self.links.inside.bandwidth)
        size = 2 * self.tokens * self.hidden / np.where(self.splits_residual, self.tensor, 1)
        sent = 2 * (self.micro * self.chunks + self.pipeline) * size / rate
        return np.where(self.pipeline > 1, sent, 0)

    @cached_property
    def weights(self) -> np.ndarray:
        """The weights in use of a rank."""
        tables = np.where(self.gated, 2, 1) * self.vocab * self.hidden
        return (self.layers * self.of_layer + tables) / self.tensor / self.pipeline

    @cached_property
    def shards(self) -> np.ndarray:
        """The ranks over which ZeRO shards."""
        ranks = self.data * self.context
        return np.where(self.shard > 0, np.minimum(self.shard, ranks), ranks)

    @cached_property
    def of_gradients(self) -> np.ndarray:
        """The seconds of gradients that are summed once per step."""
        one = self._over(REDUCE_SCATTER, self.everyone)
        # Ranks that do not own all of what they have summed need the sums of the others.
        whole = (self.zero < 1) | self.shards_in_part
        one = one + np.where(whole, self._over(ALL_GATHER, self.everyone), 0)
        return np.where(self.sharded, 0, one)

    @cached_property
    def of_updated(self) -> np.ndarray:
        """The seconds in which the owners of updated weights send them to the others, once per step."""
        group = self.group(self.shards, self.tensor)
        gathered = self._over(ALL_GATHER, group)
        # As many broadcasts as ranks that own a weight, around a ring, which is NCCL's only one.
        owners = np.minimum(self.shards, self.layers / self.pipeline * WEIGHTS_OF_LAYER + OTHER_WEIGHTS)
        sent = owners * (START + group.around) + group.ring_share * 2 * self.weights / group.rate
        each = np.where(self.broadcasts, sent, gathered)
        return np.where(self.sharded | (self.zero < 1) | (self.shards == 1), 0, each)

    @cached_property
    def of_layers(self) -> tuple[np.ndarray, np.ndarray]:
        """The seconds of weights and gradients sent layer by layer: over all network cards, and over one of a host."""
        group = self.group(self.shards, self.tensor)
        calls = self.layers / self.pipeline
        each = 2 * self._over(ALL_GATHER, group, calls) + self._over(REDUCE_SCATTER, group, calls)
        took = np.where(self.sharded, self.micro * each, 0)
        return took, took * over_one_card(group)

    @cached_property
    def sharded(self) -> np.ndarray:
        """Whether weights lie in shards while they are not in use (ZeRO 3)."""
        return self.zero >= 3

    @cached_property
    def shards_in_part(self) -> np.ndarray:
        """Whether each group of some data ranks has all shards."""
        return (self.shard > 0) & (self.shard < self.data)

    @cached_property
    def everyone(self) -> Group:
        """The ranks that sum gradients."""
        return self.group(self.data * self.context, self.tensor)

    def _over(self, kind: str, group: Group, calls: np.ndarray | None = None) -> np.ndarray:
        """Return the seconds of a collective of all weights of a rank, in so many calls: by default, of four layers."""
        calls = np.maximum(self.layers / self.pipeline / 4, 1) if calls is None else calls
        return calls * seconds_of(kind, 2 * self.weights / calls, group)

    def step(self, rates: Rates, matmuls: dict[str, float], programs: Programs) -> Step:
        """Return the steps; `matmuls` is each generation's share of the best matmul."""
        plain = self.peak * self.best * self.of_generation(matmuls)
        eight = self.peak * 2 * rates.float8 * np.where(self.bits == 4, 1.5, 1)
        h100 = self.generations["h100"]
        flash = self.kernels["cudnn"] * programs.cudnn
        flash = flash + self.kernels["flash1"] * programs.flash1 * np.where(h100, 312 / 989 * 1.66, 1)
        flash = flash + self.kernels["flash2"] * np.where(h100, programs.flash2_h100, programs.flash2)
        fused = flash > 0
        speed = Speed(np.where(self.bits < 16, eight, plain), self.peak * np.where(fused, flash, 1), self.bandwidth)

        flops = 2 * self.tokens * self.of_layer / self.tensor
        one = kernels_time.matmul(flops, self.tokens, self.tensor, self.hidden, speed, rates)
        core = 2 * self.tokens * self.sequence * self.hidden / self.tensor
        by_kernel = kernels_time.fused_attention(core, speed)
        scores = self.heads / self.tensor * self.sequence * self.tokens
        scores = scores * np.where(self.kernels["softmax"], programs.softmax, 1)
        by_matmuls = kernels_time.matmul_attention(core, scores, speed, rates)
        attention = Both(*(np.where(fused, *each) for each in zip(by_kernel, by_matmuls, strict=True)))
        moves = kernels_time.moved(self.tokens, self.hidden, self.tensor, self.splits_residual, speed, rates)
        moves = moves * np.where(self.eager_norms, EAGER_NORMS, 1)
        forward = one + attention.forward + moves
        again = self.full * forward + self.selective * np.where(fused, 0.25 * forward, attention.forward)
        launch = rates.launch * np.where(self.eager, 2, 1)
        unit = sum(kernels_time.units(Units(one, one, one), attention, moves, again, self.full, launch))

        head = 3 * 2 * self.tokens * self.hidden * self.vocab / self.tensor / plain
        layers = self.layers / self.pipeline
        context = 0.3 * self.of_context
        tensor = np.where(self.overlaps, rates.tensor_hidden / rates.tensor, 1) * self.of_tensors
        of_micro = layers * (unit + context + rates.tensor * tensor)
        by_layer, by_layer_one_card = self.of_layers
        # Programs that overlap send updated weights during the next forward pass.
        updated = np.where(self.overlaps, 0, self.of_updated)
        hidden = np.where(self.overlaps, (self.of_gradients + self.of_updated) / 1.5, self.of_gradients)
        held = self.weights / np.where(self.zero >= 1, self.shards, 1)
        return Step(
            arithmetic=self.micro * (layers * unit + head),
            waiting=np.where(self.pipeline > 1, (self.pipeline - 1) / self.chunks * of_micro, 0),
            model=self.micro * layers * tensor,
            others={"context": self.micro * layers * context},
            messages=self.of_stages,
            once=updated,
            once_hidden=hidden,
            by_layer=by_layer,
            by_layer_one_card=by_layer_one_card,
            updated=BYTES_UPDATED * held / self.bandwidth,
            micro=self.micro,
            devices=self.devices,
        )


def _number(row: Row, name: str) -> float:
    """Return what a row, its shape or its GPU has under this name."""
    for home in (row, row.shape, row.gpu):
        if hasattr(home, name):
            return getattr(home, name)
    raise AttributeError(name)
