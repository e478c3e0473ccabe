"""Published times of steps, each with the request that was measured.

The rows are those of `tests/data/published.csv` and `measured.csv` whose request can be told: a dense decoder, its
mesh, batch and GPUs. What the measured programs do otherwise than jaxdist is said here: their attention kernels, their
recomputation, 8 bits, and what they overlap. Their addresses are in `measured_sources.csv`.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from jaxdist.planning.certainty import kind_of
from jaxdist.planning.clusters import Cluster, cluster

DATA = Path(__file__).parent.parent / "tests" / "data"


@dataclass(frozen=True)
class Gpu:
    """A kind of GPU in the rows. Rates per second; the links are those of the shipped cluster that it resembles."""

    words: str
    """What names it in the column `gpu`, in lower case."""
    generation: str
    like: str
    """The shipped cluster."""
    peak: float
    bandwidth: float
    per_host: int = 8
    across: float | None = None
    """One GPU's share of the network, where it differs."""


GPUS = (
    Gpu("gb300", "b200", "b200", 2500e12, 8e12, per_host=64, across=96e9),
    Gpu("gb200", "b200", "b200", 2500e12, 8e12, per_host=64),
    Gpu("b300", "b200", "b200", 2250e12, 8e12, across=96e9),
    Gpu("b200", "b200", "b200", 2250e12, 7.7e12),
    Gpu("h200", "h100", "h200-ndr", 989e12, 4.8e12),
    # A card of 500 W, "between SXM and NVL" (torchtitan).
    Gpu("h100-96", "h100", "h100-ndr", 912e12, 2.4e12),
    Gpu("h100", "h100", "h100-ndr", 989e12, 3.35e12),
    Gpu("a100_40", "a100", "a100-hdr", 312e12, 1.555e12),
    Gpu("a100-40", "a100", "a100-hdr", 312e12, 1.555e12),
    Gpu("a100", "a100", "a100-hdr", 312e12, 2.04e12),
    Gpu("v100", "v100", "v100-nvlink", 125e12, 0.9e12),
)
"""The first whose words are found is it."""


@cache
def like(gpu: Gpu) -> Cluster:
    """Return the shipped cluster that this GPU resembles."""
    return cluster(gpu.like)


KERNELS = ("unfused", "softmax", "flash1", "flash2", "cudnn")

NETWORKS = {"4x100 Gb": 6.25e9, "400 Gb/s a node": 6.25e9, "800 Gb/s": 12.5e9}
"""Words in the column `gpu` -> bytes per second of one GPU's share of the network."""

OF_DATA_SHEET = 0.9
"""What a network card reaches of what is written on it."""


@dataclass(frozen=True)
class Shape:
    """The sizes of a decoder."""

    layers: float
    hidden: float
    heads: float
    kv_heads: float
    mlp: float
    gated: float
    vocab: float


LLAMA = {
    "8B": Shape(32, 4096, 32, 8, 14336, 1, 128256),
    "70B": Shape(80, 8192, 64, 8, 28672, 1, 128256),
    "405B": Shape(126, 16384, 128, 8, 53248, 1, 128256),
}

NAMED = {
    "gpt3-5b": Shape(24, 4096, 32, 32, 16384, 0, 50304),
    "gpt3-20b": Shape(44, 6144, 48, 48, 24576, 0, 50304),
    "gpt3-175b": Shape(96, 12288, 96, 96, 49152, 0, 51200),
    "llama2-7b": Shape(32, 4096, 32, 32, 11008, 1, 32000),
    "llama2-13b": Shape(40, 5120, 40, 40, 13824, 1, 32000),
    "llama2-70b": Shape(80, 8192, 64, 8, 28672, 1, 32000),
    "nemotron-8b": Shape(32, 4096, 32, 32, 16384, 0, 256000),
    "nemotron-22b": Shape(40, 6144, 48, 48, 24576, 0, 256000),
    "nemotron-340b": Shape(96, 18432, 96, 8, 73728, 0, 256000),
    "llama3-8b": LLAMA["8B"],
    "llama3-70b": LLAMA["70B"],
    "llama3.1-405b": LLAMA["405B"],
}
"""Models whose rows do not tell their sizes: those of their configurations."""

OTHER_MODELS = ("MoE", "ResNet", "DeepSeek", "Kimi", "Qwen", "OSS", "Nemotron_3", "LAMB", "GPT L8 ILP heur")
"""Words in the names of what is no dense decoder, or no step of its training."""

OVERLAPPING = ("dgxc", "Megatron-Bridge", "NeMo", "Llama3", "Megatron-LM README")
"""Sources whose programs split tensors piece by piece, and send gradients during the backward pass."""

CUDNN = (*OVERLAPPING, "JAX-Toolbox")

UNFUSED = ("Narayanan2021", "MT-NLG530B", "Korthikanti2022", "Alpa", "BigScience-176B")


@dataclass(frozen=True)
class Row:
    """A measured step. Sizes of the mesh are those of the papers: tensor, pipeline, data, context."""

    source: str
    model: str
    gpu: Gpu
    shape: Shape
    across: float
    per_host: float
    devices: float
    batch: float
    sequence: float
    tensor: float
    pipeline: float
    data: float
    context: float
    zero: float
    shard: float
    """The devices over which ZeRO shards; 0 for all of `data` and `context`."""
    micro_rows: float
    """The rows of a micro-batch on a rank."""
    chunks: float
    precision: str
    """In the words of the source: there are several kinds of 8 bits."""
    bits: float
    """4, 8 or 16, of matmuls."""
    attention: str
    """Its kernel, one of `KERNELS`."""
    recomputes: str
    splits_residual: bool
    overlaps: bool
    eager_norms: bool
    """Whether norms are no kernel of their own, but one for each of their operations."""
    eager: bool
    broadcasts: bool
    """Whether each owner of updated weights broadcasts them, one after the other."""
    seconds: float

    @property
    def micro(self) -> float:
        """The number of micro-batches."""
        return max(1.0, self.batch / (self.data * self.micro_rows))

    @property
    def of_layer(self) -> float:
        """The weights of a layer that multiply a token."""
        s = self.shape
        attention = s.hidden * (2 * s.hidden + 2 * s.kv_heads * s.hidden / s.heads)
        return attention + (3 if s.gated else 2) * s.hidden * s.mlp

    @property
    def flops(self) -> float:
        """The FLOPs of a step, without recomputation; causal attention counts once."""
        s = self.shape
        of_token = 6 * (s.layers * self.of_layer + s.vocab * s.hidden) + 6 * s.layers * self.sequence * s.hidden
        return self.batch * self.sequence * of_token

    @property
    def mfu(self) -> float:
        """The share of the peak that was reached, of 8 bits where matmuls have as many."""
        return self.flops / (self.devices * self.gpu.peak * (1 if self.bits == 16 else 2) * self.seconds)

    @property
    def kind(self) -> str:
        """The kind of the step: rows of one kind are wrong in a similar way."""
        leaves_host = self.data * self.context * self.tensor > self.per_host
        return kind_of(self.zero >= 3, leaves_host, self.pipeline > 1, self.tensor > 1)

    @property
    def choice(self) -> tuple:
        """What rows share among which a planner chooses."""
        return (self.source, self.model, self.gpu.words, self.devices, self.batch, self.sequence, self.attention,
                self.precision, self.eager_norms)  # fmt: skip

    @property
    def mesh(self) -> tuple:
        """How they differ."""
        return (self.tensor, self.pipeline, self.data, self.context, self.zero, self.shard)


def published_rows() -> list[Row]:
    """Return the rows of both files whose time can be predicted."""
    found = []
    for name in ("published.csv", "measured.csv"):
        with (DATA / name).open(newline="") as file:
            found += [row for cells in csv.DictReader(file) for row in _row(cells)]
    return found


def _row(cells: dict[str, str]) -> Iterator[Row]:
    """Yield the row of one line of a file; nothing where it tells too little, or of something else."""
    source = cells["source"]
    model = cells["model"]

    def number(name: str) -> float:
        return float((cells.get(name) or "0").split()[0])

    gpu = next((one for one in GPUS if one.words in cells["gpu"].lower()), None)
    if gpu is None or cells["kind"] == "formula" or cells["value"] == "OOM":
        return
    if number("ep") > 1 or any(word in model for word in OTHER_MODELS) or _repeated(cells):
        return
    shape = _shape(cells, number)
    if shape is None:
        return
    devices, batch, sequence = number("gpus"), number("global_batch"), number("seq")
    tensor, pipeline, context = number("tp"), number("pp"), number("cp") or 1
    if not (devices and batch and sequence and tensor and pipeline):
        return
    data = number("dp") or devices / tensor / pipeline / context
    if source == "Llama3":
        data = devices / tensor / pipeline / context  # its table counts otherwise
    if abs(data * tensor * pipeline * context / devices - 1) > 0.01:
        return
    seconds = _seconds(cells, shape, devices, batch, sequence)
    if seconds is None:
        return
    rows = number("microbatch") or 1.0
    if source == "Alpa":
        rows /= data
    precision = cells["precision"].lower()
    bits = 4 if "fp4" in precision else 8 if "fp8" in precision or "mx" in precision else 16
    recomputes = "selective+SP" if source == "MegaScale" else cells["remat"]
    overlaps = source.startswith(OVERLAPPING) or "(MegaScale)" in model
    schedule = cells["schedule"]
    chunks = float((re.search(r"v=(\d+)", schedule) or (0, 1))[1])
    if "interleaved" in schedule and source == "torchtitan":
        chunks = 2.0
    if source == "Llama3":
        chunks = 8.0  # interleaved, a layer in each chunk: our reading
    across = next((rate * OF_DATA_SHEET for words, rate in NETWORKS.items() if words in cells["gpu"]), 0.0)
    kernel = (re.search(r"kernel: (.*)", cells["where"]) or ("", ""))[1]
    shard = float((re.search(r"zero1 group = (\d+)", cells["note"]) or (0, 0))[1])
    yield Row(
        source=source,
        model=model,
        gpu=gpu,
        shape=shape,
        across=across or gpu.across or like(gpu).across.bandwidth,
        per_host=4 if source == "KempnerForge" else gpu.per_host,
        devices=devices,
        batch=batch,
        sequence=sequence,
        tensor=tensor,
        pipeline=pipeline,
        data=data,
        context=context,
        zero=number("zero"),
        shard=shard,
        micro_rows=rows,
        chunks=chunks,
        precision=precision,
        bits=bits,
        attention=_attention(cells, kernel, devices),
        recomputes=recomputes,
        splits_residual="SP" in recomputes or overlaps,
        overlaps=overlaps,
        eager_norms=kernel != "" and "RMS" not in kernel,
        eager=source == "torchtitan" and "compile" not in precision,
        # `broadcast_params` in its optimizer (internlm/solver/optimizer/hybrid_zero_optim.py).
        broadcasts=source == "InternEvo",
        seconds=seconds,
    )


def _repeated(cells: dict[str, str]) -> bool:
    """Return whether a row of `measured.csv` stands in `published.csv` too."""
    archive = cells["source"] == "Megatron-Bridge archive"
    return archive and "H100" in cells["gpu"] and cells["table"].startswith(("25.09", "25.11"))


def _shape(cells: dict[str, str], number: Callable[[str], float]) -> Shape | None:
    model = cells["model"]
    if not number("layers"):
        return NAMED.get(re.sub(r"[ _]", "-", model.split(" (")[0]).lower())
    hidden, heads = number("hidden"), number("heads")
    mlp, vocab = number("ffn") or 4 * hidden, number("vocab") or 51200
    kv_heads, gated = number("kv_heads") or heads, number("gated")
    if model.startswith(("Llama3.1-", "Llama3 ", "Llama 3", "405B")) or cells["source"] in ("Llama3", "torchtitan"):
        for size, known in LLAMA.items():
            if size in model:
                kv_heads, mlp, gated, vocab = known.kv_heads, known.mlp, 1, known.vocab
    return Shape(number("layers"), hidden, heads, kv_heads, mlp, gated, vocab)


def _seconds(cells: dict[str, str], s: Shape, devices: float, batch: float, sequence: float) -> float | None:
    """Return the seconds of a step; None where the value is no time of one."""
    source, metric, value = cells["source"], cells["metric"], float(cells["value"])
    tokens = batch * sequence
    if source == "KempnerForge" and metric != "tokens_per_s":
        return None
    if source == "Alpa" and "fig9" not in cells["table"] and "README" not in cells["table"]:
        return None
    if metric.startswith("iteration_time"):
        return value * (1e-3 if cells["unit"] == "ms" else 1)
    if metric == "tokens_per_s_per_gpu":
        return tokens / (value * devices)
    if metric == "tokens_per_s":
        return tokens / value
    if metric == "sequences_per_s":
        return batch / value
    if not metric.startswith("achieved_TFLOPs"):
        return None
    attention = s.hidden * (2 * s.hidden + 2 * s.kv_heads * s.hidden / s.heads)
    layers = 6 * s.layers * (attention + (3 if s.gated else 2) * s.hidden * s.mlp)
    head, scores = 6 * s.vocab * s.hidden, 12 * s.layers * sequence * s.hidden
    counted = {
        # With recomputation, and the whole square of attention.
        "Narayanan2021": 4 / 3 * (layers + scores) + head,
        "dlrover atorch": 4 / 3 * (layers + scores) + head,
        "Megatron-LM README": layers + head + scores,
        "Llama3": layers + head + scores / 2,
    }
    return tokens * counted[source] / (value * 1e12 * devices) if source in counted else None


def _attention(cells: dict[str, str], kernel: str, devices: float) -> str:
    """Return the kernel of attention, which the row tells or its source is known for."""
    source, model = cells["source"], cells["model"]
    if source in UNFUSED or kernel == "torch":
        return "unfused"
    if kernel == "fused" or "(Megatron-LM)" in model:
        return "softmax"
    # MosaicML's later table of 128 H100s and more tells another kernel for these two models.
    later = cells["gpu"] == "h100_80gb" and devices >= 128 and model in ("MPT-7b", "MPT-70b")
    if (source.startswith("MosaicML") and not later) or "v1.0.8" in kernel:
        return "flash1"
    return "cudnn" if source.startswith(CUDNN) else "flash2"
