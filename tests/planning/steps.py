"""A published step as `planning.search.estimate` predicts it.

A row becomes a request for jaxdist on a cluster, where it tells enough; `published.NOT_JUDGED` has the others. What the
measured programs do otherwise than jaxdist is in `Program`, each with its source: none of it is fitted, and none of it
is in the planner.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache, cached_property

from jaxdist.config import Config, ModelConfig
from jaxdist.mesh import BATCH_AXES, DATA, MODEL, PIPELINE, parse_mesh
from jaxdist.mesh.split import Split
from jaxdist.models import Model, build
from jaxdist.planning import collective_time
from jaxdist.planning.clusters import Cluster, cluster
from jaxdist.planning.predicted_collectives import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, Transfer
from jaxdist.planning.search import attention_time
from jaxdist.planning.search import estimate as ours
from jaxdist.planning.timing import attention_flops_per_token
from tests.planning.published import Row

ARITHMETIC, WAITING = "arithmetic", "waiting"

KEPT = 5
"""Bytes of a score that unfused attention keeps: softmax, mask of dropout, what is left (Korthikanti 2022, 4.1)."""

FLASH_1 = {"a100": 0.325, "h100": 0.325 * 312 / 989 * 335 / 230}
"""Share of the peak that the first FlashAttention reaches: 25 to 40 % on A100 (Dao 2023, abstract). For H100 nothing is
published; version 2 went from 230 to 335 TFLOP/s there without the new instructions (Dao 2023, sections 1 and 4.1)."""

FLASH_2 = {"h100": 0.30}
"""298 TFLOP/s forward and 291 backward, causal, 2048 tokens, heads of 128 (Shah et al. 2024, figures 5 and 6)."""


@dataclass(frozen=True)
class Program:
    """What a measured program does otherwise than jaxdist."""

    attention: dict[str, float] | None = None
    """GPU -> the share of its peak that fused attention reaches. None: it is not fused, nor causal: all of its products
    at the rate of others, and scores go through the memory."""
    late: bool = False
    """Backward, it gathers a layer's weights when the last one is done, and nothing hides that."""
    apart: bool = False
    """It computes nothing while weights and gradients travel, and these are 16 bits wide."""
    own_ticks: bool = False
    """Each rank of a pipeline has a program of its own: it waits (p-1)/(vm) of its work, the last has all logits, and
    each of the t ranks that split tensors sends a part to the next stage (Narayanan et al. 2021, 2.2 and 4.1)."""


MEGATRON = Program(own_ticks=True)

ALPA = Program(own_ticks=True, apart=True)
"""It runs XLA with xla_gpu_enable_async_all_reduce=false (alpa 8350d91, alpa/global_env.py), and takes gradients of
parameters in float16, of which a master is kept (alpa/model/model_util.py)."""


def program_of(row: Row) -> Program:
    """MosaicML's first tables are made with Triton's FlashAttention and BACKWARD_POST, both defaults then (llm-foundry
    b2a43a1, submit_benchmarks.py; Composer 0.16.4, dist_strategy.py), those of 128 H100s and more with what is told for
    each model (llm-foundry 5e85bd6, sweep.py)."""
    if row.source != "MosaicML llm-foundry":
        return ALPA if row.source == "Alpa" else MEGATRON
    if row.gpu == "h100_80gb" and row.gpus >= 128:
        return Program(attention=FLASH_2 if row.model in ("MPT-7b", "MPT-70b") else FLASH_1)
    return Program(attention=FLASH_1, late=True)


# -- a row as a request


def cluster_of(row: Row) -> Cluster:
    """Hosts of 8; 200 Gb/s for each A100, as all three papers and MosaicML tell; 400 for H100."""
    gpu = row.gpu.lower()[:4]
    found = cluster({"a100": "a100-hdr", "h100": "h100-ndr", "v100": "v100-nvlink"}[gpu])
    # NVIDIA's data sheet of the A100 40 GB SXM: its memory is slower.
    return replace(found, bandwidth=1.555e12) if row.gpu == "a100_40gb" else found


def request(row: Row) -> Config:
    t, p, d = int(row.tp), int(row.pp), int(row.dp)
    rank_rows = int(row.microbatch) // (d if row.source == "Alpa" else 1)  # Alpa tells those of all ranks
    k = max(1, round(row.global_batch / (d * rank_rows)))
    zero = int(row.zero or 0)
    given = {
        "mesh": f"{d}x{t}x{p}",
        "precision": "mixed",
        "model": {
            "family": "gpt",
            "layers": int(row.layers),
            "embed": int(row.hidden),
            "heads": int(row.heads),
            "vocab": int(row.vocab),
            "sequence": int(row.seq),
            "remat": "block" if row.remat == "full" else "none",
        },
        "parallel": {"zero": zero, "sequence": "SP" in row.remat and t > 1},
        "train": {"global_batch_size": k * d * rank_rows, "accumulation": 1 if p > 1 else k},
    }
    if zero >= 2 and k > 1:
        given["parallel"]["micro_batches"] = "outside"
    if p > 1:
        name, _, v = row.schedule.partition(" v=")
        schedule = "interleaved" if name == "interleaved" else "1f1b"
        given["pipeline"] = {"schedule": schedule, "microbatches": k, "virtual_stages": int(v or 0)}
    return Config.model_validate(given)


@cache
def built(model: str) -> Model:
    return build(ModelConfig.model_validate_json(model))


# -- a row's step


@dataclass(frozen=True)
class Step:
    row: Row

    @cached_property
    def config(self) -> Config:
        return request(self.row)

    @cached_property
    def cluster(self) -> Cluster:
        return cluster_of(self.row)

    @cached_property
    def program(self) -> Program:
        return program_of(self.row)

    @property
    def t(self) -> int:
        return int(self.row.tp)

    @property
    def p(self) -> int:
        return int(self.row.pp)

    @cached_property
    def k(self) -> int:
        return Split(self.config, self.shape).micro_batches

    @cached_property
    def shape(self) -> dict[str, int]:
        return parse_mesh(self.config.mesh)

    @property
    def tokens(self) -> float:
        """Of a micro-batch on one device."""
        return self.config.train.global_batch_size / (self.k * self.row.dp) * self.row.seq

    @property
    def rate(self) -> float:
        return ours.matmul_rate(self.config, self.cluster)

    def attention(self) -> tuple[float, float]:
        """Seconds of a layer's attention above jaxdist's: forward, and backward with what is recomputed there."""
        m = self.config.model
        causal = attention_flops_per_token(m) * self.tokens / self.t
        fused = causal / (self.rate * attention_time.ATTENTION_RATE)
        again = self.row.remat.startswith(("full", "selective"))
        fused_again = self.row.remat == "full"
        if self.program.attention:
            extra = causal / (self.cluster.peak * self.program.attention[self.cluster.gpu]) - fused
            return extra, (attention_time.ATTENTION_BACKWARD + fused_again) * extra
        scores = ours.PASSES * KEPT * m.heads * m.sequence * self.tokens / self.t / self.cluster.bandwidth
        forward, backward = 2 * causal / self.rate + scores, 4 * causal / self.rate + scores
        return forward - fused, backward + again * forward - (attention_time.ATTENTION_BACKWARD + fused_again) * fused

    @cached_property
    def plain(self) -> ours.Estimate:
        """Of jaxdist's own step."""
        return ours.estimate(self.config, built(self.config.model.model_dump_json()), self.cluster)

    def parts(self) -> dict[str, float]:
        """Seconds of the measured program's step: jaxdist's, and what it does otherwise."""
        parts = dict(self.plain.parts)
        parts[ARITHMETIC] += self.k * self.row.layers / self.p * sum(self.attention())
        if self.program.late:
            parts[DATA] += self.gathered_late(self.plain.transfers)
        if self.program.apart:
            parts[DATA] = sum(ours.seconds(one, self.shape, self.cluster) for one in self.over_data())
        if self.program.own_ticks and self.p > 1:
            m, v = self.config.model, max(1, self.config.pipeline.virtual_stages)
            head = ours.head_flops(m, self.tokens) / (self.t * self.rate)
            parts[ARITHMETIC] += self.k * head * (1 - 1 / self.p)
            parts[WAITING] = (parts[ARITHMETIC] + parts[MODEL]) * (self.p - 1) / (v * self.k)
            sent = 2 * self.k * v * 2 * self.tokens * m.embed / self.t  # bfloat16, forward and back
            parts[PIPELINE] = sent / self.cluster.across.bandwidth
        return parts

    def over_data(self) -> list[Transfer]:
        """Weights and gradients, all 16 bits wide."""
        found = [one for one in self.plain.transfers if set(one.axes) & set(BATCH_AXES)]
        return ours.merge_calls(replace(one, width=2) for one in found)

    def gathered_late(self, transfers: Iterable[Transfer]) -> float:
        """Half of the gathers of layers, of which jaxdist's step already has what cannot be hidden."""
        layers = [one for one in ours.merge_calls(transfers) if one.kind == ALL_GATHER and "of layers" in one.what]
        backward = sum(ours.seconds(one, self.shape, self.cluster) for one in layers) / 2
        return backward * (2 - self.cluster.overlap)

    def layer(self, backward: bool) -> float:
        """Seconds of one layer and micro-batch."""
        layout = ours.layout_of(Split(self.config, self.shape), self.cluster)
        times = ours.times_of_layer(self.config, layout, self.tokens, self.cluster)
        took = (times.F, times.B)[backward] + self.attention()[backward]
        size, inside = 2 * self.tokens * self.row.hidden, min(self.t, self.cluster.per_host)
        time = lambda kind: float(collective_time.seconds(kind, size, self.t, inside, self.cluster))
        if self.config.parallel.sequence:  # what was gathered is not kept, and gathered again
            return took + 2 * ((1 + backward) * time(ALL_GATHER) + time(REDUCE_SCATTER))
        return took + 2 * time(ALL_REDUCE)
