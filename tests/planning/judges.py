"""How each published value follows from its row: by the forms of `tests.planning.theory`, and sizes left out."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from jaxdist.planning.clusters import Link
from jaxdist.planning.collective_time import START, Group, Links
from jaxdist.planning.hardware import GPUS
from jaxdist.planning.predicted_collectives import ALL_GATHER, wire_share
from jaxdist.planning.timing import mfu
from tests.planning.published import AS_PRINTED, Entry, Row, Tolerance, beside, like, points, rows, within
from tests.planning.theory import activations, flops, sizes, states

GIB = 2**30
V5P = 459e12
"""Dense bfloat16 FLOP/s of a TPU v5p, by its maker's data sheet."""


NCCL_H100 = Links(Link(450e9, 3.4e-6), Link(48e9, 14e-6))
"""What NCCL's model takes for H100s (src/graph/tuning.cc), protocol Simple; of a 400 Gbit/s card 48 GB/s arrive."""


def peak(row: Row) -> float:
    """FLOP/s of the row's device."""
    if "v5p" in row.gpu:
        return V5P
    return GPUS[row.gpu[:4].lower()].peak


def micro_batches(row: Row) -> int:
    return int(row.global_batch / (row.microbatch * row.dp))


# -- memory


def zero(row: Row) -> float:
    return float(states.states(row.params, states.RECIPES["mixed"], int(row.zero), row.dp)) / 1e9


def layers_states(row: Row) -> float:
    parameters = 12 * row.layers * row.hidden**2 / (row.tp * row.pp)
    return float(states.states(parameters, states.RECIPES["megatron"], 0, 1)) / GIB


def first_stage(row: Row) -> float:
    recompute = "selective" if "selective" in row.remat else "none"
    layer = activations.gpt_layer(row.seq, row.microbatch, row.hidden, row.heads, row.tp, "SP" in row.remat, recompute)
    name, _, v = row.schedule.partition(" v=")
    schedule = {"interleaved": "interleaved", "1F1B": "pipedream", "none": "gpipe"}[name]
    return activations.held(layer, row.layers, schedule, 0, int(row.pp), micro_batches(row), int(v or 1)) / GIB


def llama2_7b(row: Row) -> float:
    """Megatron-LM with its distributed optimizer; the fuller of the first stage and the last, which has the logits."""
    f, kv, L, p = 11_008, row.hidden, row.layers, int(row.pp)
    parameters = sizes.fullest_stage(sizes.matrices(row.hidden, f, kv, kv), row.vocab * row.hidden, L, p, row.tp)
    layer = activations.llama_layer(row.seq, row.microbatch, row.hidden, f, kv, row.tp)
    in_flight = [activations.held(layer, L, "pipedream", rank, p, micro_batches(row)) for rank in (0, p - 1)]
    in_flight[1] += activations.logits(row.seq, row.microbatch, row.vocab, row.tp)
    held = states.states(parameters, states.RECIPES["megatron"], 1, row.dp)
    return (held + activations.fullest(in_flight)) / GIB


def alpa_3d(row: Row) -> float:
    """Alpa's log says `Reduce-scatter: True`: optimizer states are split, gradients add up whole until the last."""
    b, h, p = row.microbatch / row.dp, row.hidden, int(row.pp)
    m = int(row.global_batch / row.microbatch)
    parameters = sizes.fullest_stage(sizes.gpt_layer(h), row.vocab * h, row.layers, p, row.tp, tied=True)
    kept, working = (
        activations.gpt_layer(row.seq, b, h, row.heads, row.tp, recompute=recompute) for recompute in ("full", "none")
    )
    in_flight = [working + activations.held(kept, row.layers, "pipedream", rank, p, m) for rank in (0, p - 1)]
    in_flight[1] += activations.logits(row.seq, b, row.vocab, row.tp)
    held = states.states(parameters, states.RECIPES["mixed"], 1, row.dp)
    return (held + activations.fullest(in_flight)) / GIB


def torchtitan(row: Row) -> float:
    """float32 states in shards, inputs of layers, one layer, logits; t ranks split the sequence between products."""
    _, f, _, kv = LLAMA3[int(row.layers)]
    layer = activations.llama_layer(row.seq, row.microbatch, row.hidden, f, kv, row.tp, split_sequence=True)
    inputs = row.layers * activations.gpt_layer(
        row.seq, row.microbatch, row.hidden, row.heads, row.tp, split_sequence=True, recompute="full"
    )
    held = states.states(row.params / row.tp, states.RECIPES["float32"], 3, row.dp)
    return float(held + inputs + layer + activations.logits(row.seq, row.microbatch, row.vocab, row.tp)) / GIB


def more_shards(row: Row) -> float:
    """The same on 8 GPUs, less what smaller shards save."""
    split = lambda d: states.states(row.params, states.RECIPES["float32"], 3, d) / GIB
    return float(like(row, table="1", precision=row.precision) + split(row.dp) - split(8))


def longer_sequence(row: Row) -> float:
    """The same on c = 1: each rank has s/c tokens of c times as many, and shards are split over data and context."""
    return like(row, cp=1)


# -- arithmetic

LLAMA3 = {32: (4096, 14_336, 4096, 1024), 80: (8192, 28_672, 8192, 1024), 126: (16_384, 53_248, 16_384, 1024)}
"""Layers -> h, f, q and kv (Dubey et al. 2024, table 3)."""

SHAPES = {
    "LLAMA3-8B": (32, *LLAMA3[32], 128_256),
    "LLAMA3-70B": (80, *LLAMA3[80], 128_256),
    "LLAMA3.1-405B": (126, *LLAMA3[126], 128_256),
    "LLAMA2-7B": (32, 4096, 11_008, 4096, 4096, 32_000),
    "LLAMA2-13B": (40, 5120, 13_824, 5120, 5120, 32_000),
    "LLAMA2-70B": (80, 8192, 28_672, 8192, 1024, 32_000),
    "GPT3-5B": (24, 4096, 16_384, 4096, 4096, 51_200),
    "GPT3-20B": (44, 6144, 24_576, 6144, 6144, 51_200),
    "GPT3-175B": (96, 12_288, 49_152, 12_288, 12_288, 51_200),
    "Nemotron-8B": (32, 4096, 16_384, 4096, 4096, 256_000),
    "Nemotron-22B": (40, 6144, 24_576, 6144, 6144, 256_000),
    "Nemotron-340B": (96, 18_432, 73_728, 18_432, 1536, 256_000),
    "Qwen3-30B-a3B": (48, 2048, 8 * 768, 4096, 512, 151_936),
    "Qwen3-235B-a22B": (94, 4096, 8 * 1536, 8192, 512, 151_936),
    "GPT OSS 120B": (36, 2880, 4 * 2880, 4096, 512, 201_088),
}
"""Model -> L, h, f, q, kv, V as its makers published it; f of all experts that a token goes to."""


def rate(row: Row) -> float:
    """TFLOP/s from tokens a second. NVIDIA's tables count attention whole in 24.12, its causal half from 25.09 on."""
    L, h, f, q, kv, V = SHAPES[row.model.replace("_", "-")]
    gated = not row.model.startswith(("GPT3", "Nemotron"))
    matrices = L * sizes.matrices(h, f, q, kv, gated) + V * h
    each = flops.token(matrices, L, q, row.seq, causal=row.source != "NeMo 24.12")
    return each * beside(row, "tokens_per_s_per_gpu") / 1e12


def of_step(row: Row, recompute: str | None = None) -> float:
    return flops.gpt_step(row.global_batch, row.seq, row.layers, row.hidden, row.vocab, recompute)


def utilisation(row: Row) -> float:
    """From the time of the step, in %: mfu of one token that is a whole step. HFU counts what is recomputed."""
    work = of_step(row, "selective" if row.metric == "HFU" else None)
    return 100 * mfu(1 / beside(row, "iteration_time"), work, int(row.gpus), peak(row))


def mosaic(row: Row) -> float:
    """All parameters count, tables and norms too, and attention whole."""
    each = flops.token(row.params, row.layers, row.hidden, row.seq, causal=False)
    return 100 * mfu(beside(row, "tokens_per_s_per_gpu"), each, 1, peak(row))


def of_peak(row: Row, metric: str = "achieved_TFLOPs_per_gpu") -> float:
    return 100 * beside(row, metric) * 1e12 / peak(row)


def days(row: Row) -> float:
    each = of_step(row, "full") / (row.global_batch * row.seq)
    return flops.days(each * 300e9, row.gpus, beside(row, "achieved_TFLOPs_per_gpu") * 1e12)


def gpu_hours(row: Row) -> float:
    """6ND at the utilisation of the largest run."""
    tokens = lambda r: float(r.note.removeprefix("tokens "))
    (large,) = (r for r in rows() if r.source == row.source and r.model == "65B")
    return large.value * flops.run(row.params, tokens(row)) / flops.run(large.params, tokens(large))


def nccl(row: Row) -> float:
    per_node = int(row.gpu.split(" x ")[1].split()[0])
    group = Group(row.gpus, per_node, NCCL_H100)
    if "algbw" in row.metric:
        return float(group.rate / wire_share(ALL_GATHER, row.gpus)) / 1e9
    return (START + float(group.around)) * 1e6


def pflops(row: Row) -> float:
    """Of all GPUs."""
    return row.gpus * beside(row, "achieved_TFLOPs_per_gpu") / 1e3


def hardware(row: Row) -> float:
    """TFLOP/s of a GPU, recomputation counted, from the time of the step."""
    return of_step(row, "full") / row.gpus / beside(row, "iteration_time") / 1e12


def both_passes(row: Row) -> float:
    return beside(row, "layer_forward_time") + beside(row, "layer_backward_time")


def forward_again(row: Row) -> float:
    """A layer's backward pass under full recomputation, from both passes without."""
    return like(row, remat="none") + like(row, "layer_forward_time", remat="none")


def of_run(row: Row) -> float:
    return flops.run(row.params, beside(row, "compute_optimal_tokens"))


@dataclass(frozen=True)
class Judge(Entry):
    """Predicts the values of its rows, in their units."""

    predict: Callable[[Row], float] = lambda row: math.nan
    tolerance: Tolerance = AS_PRINTED
    failing: tuple[str, ...] = ()
    """Models whose rows lie outside, which is told, not hidden."""
    why: str = ""

    def judge(self, row: Row) -> tuple[float, bool]:
        predicted = self.predict(row)
        return predicted, self.tolerance.holds(row, predicted)


FORMULAS = [
    Judge("ZeRO", "model_state_memory", 47, zero),
    Judge("Korthikanti2022", "params_grads_optimizer", 4, layers_states),
    Judge("Korthikanti2022", "activation_memory", 8, first_stage),
    Judge("NCCL 2.27.5 H100 tuning log", "all_gather", 10, nccl),
]
"""What a paper or a program has computed itself: exact, to the digits that it prints."""


MEMORY = [
    Judge("Megatron-LM PR482", "peak_memory", 4, llama2_7b, within(3.7)),
    Judge("Alpa", "peak_memory", 1, alpa_3d, within(10), where=lambda r: r.table == "benchmark README"),
    Judge(
        "torchtitan",
        "peak_memory",
        3,
        torchtitan,
        within(10),
        where=lambda r: r.table in ("2", "4") and r.cp == 1,
        failing=("Llama3.1-8B", "Llama3.1-70B"),
        why="what PyTorch's allocator reserved, of an fp8 run; the form counts arrays that are alive, in bf16",
    ),
    Judge("torchtitan", "peak_memory", 3, more_shards, within(3), where=lambda r: r.table == "3"),
    Judge("torchtitan", "peak_memory", 4, longer_sequence, within(3), where=lambda r: (r.cp or 1) > 1),
]
"""Measured: bytes from the configuration, or from another row whose shards or sequence differ."""

DERIVED = [
    Judge("Korthikanti2022", "MFU HFU", 6, utilisation, points(0.3)),
    Judge("Korthikanti2022", "layer_fwd_bwd_time", 5, both_passes),
    Judge("Korthikanti2022", "layer_backward_time", 1, forward_again, within(5), where=lambda r: r.remat == "full"),
    Judge("Narayanan2021", "pct_of_peak_HFU", 9, of_peak),
    Judge("Narayanan2021", "aggregate_PFLOPs", 9, pflops, within(0.5)),
    Judge("Narayanan2021", "days_for_300B_tokens", 9, days, within(3)),
    Judge("MT-NLG530B", "achieved_TFLOPs", 2, hardware, points(1)),
    Judge("Megatron-LM README", "MFU", 8, of_peak),
    Judge("Llama3", "MFU", 2, of_peak, points(0.6)),
    Judge("MosaicML llm-foundry", "MFU", 59, mosaic, within(0.25)),
    Judge("Megatron-Bridge", "model_TFLOPs", 6, rate, within(0.15), where=lambda r: r.model.startswith("LLAMA3")),
    Judge(
        "Megatron-Bridge",
        "model_TFLOPs",
        3,
        rate,
        within(0.5),
        where=lambda r: r.model.startswith(("GPT OSS", "Qwen3")),
        failing=("GPT OSS 120B",),
        why="as if 2 of the 3 matrices of its gated MLP were counted, and no window",
    ),
    Judge("NeMo 24.12", "model_TFLOPs", 11, rate, within(0.1)),
    Judge("Chinchilla", "compute_optimal_tokens", 8, lambda r: flops.chinchilla(r.params), within(11)),
    Judge(
        "Chinchilla",
        "compute_optimal_FLOPs",
        8,
        of_run,
        within(1),
        failing=("6.7e+10",),
        why="the paper prints 1.5T tokens; its FLOPs belong to 1.43T",
    ),
    Judge("LLaMA", "gpu_hours", 3, gpu_hours, within(10), where=lambda r: r.model != "65B"),
    Judge("MaxText (JAX)", "MFU", 12, lambda r: of_peak(r, "achieved_TFLOPs_per_chip"), points(0.15)),
]
"""What follows from another measured value, or by a rule of thumb."""

JUDGES = {"formula": FORMULAS, "memory": MEMORY, "derived": DERIVED}


@dataclass(frozen=True)
class Verdict:
    kind: str
    """formula, memory or derived."""
    judge: Judge
    row: Row
    predicted: float
    holds: bool

    @property
    def error(self) -> float:
        """Relative."""
        return self.predicted / self.row.value - 1

    @property
    def known(self) -> str | None:
        """Why it fails, if that is known."""
        return self.judge.why if self.row.model in self.judge.failing else None


def verdicts(kind: str, judge: Judge) -> list[Verdict]:
    return [Verdict(kind, judge, row, *judge.judge(row)) for row in rows() if judge.has(row)]


def all_verdicts() -> list[Verdict]:
    return [found for kind, judges in JUDGES.items() for judge in judges for found in verdicts(kind, judge)]
