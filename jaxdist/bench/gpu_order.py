"""The parts of `bench gpu`, in the order of what is worth most where the time is short."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxdist.config import Config
from jaxdist.request import load

MODEL = "model"
VARIANT = "variant"
TORCH = "torch"
DEVICE = "device"
RUN = "run"
"""Kinds of parts: a model's step, that of the first model with a change, in PyTorch, the device, jaxdist's commands."""

GROUPS = ("models", "torch", "train", "layers", "numerics", "generate", "forms", "remat", "profile", "doctor", "flags")
"""What `--parts` names."""

SHAPES = {"llama_1b-128": ("llama_1b", {"model.heads": "16"})}
"""Name -> (CONFIG, options): the 1B with heads of 128, where flash attention is faster than with the published 64."""

ALIKE = {"mesh": "1x1x1", "model.remat": "none", "model.unroll_layers": "false", "train.accumulation": "1"}
"""Options of every measurement, unless a measurement overrides them."""

REMATS = ("dots", "block", "offload")

FORMS = {
    "mixed": {"precision": "mixed"},
    "documents apart": {"model.documents": "apart"},
    "optimizer on the host": {"parallel.offload": "optimizer"},
    "LoRA": {"model.lora_rank": "16", "model.lora_base": "bfloat16"},
}
"""Name -> options of the first model."""

FLAGS = {
    "latency hiding scheduler": "--xla_gpu_enable_latency_hiding_scheduler=true",
    "no Triton products": "--xla_gpu_enable_triton_gemm=false",
    "no recomputation by XLA": "--xla_disable_hlo_passes=rematerialization",
    "no command buffers": "--xla_gpu_enable_command_buffer=",
}
"""Compiler flags that published recipes set; each is measured alone."""

MICRO_BATCHES = 4

TOKENS = 64
"""Tokens that are generated."""


@dataclass(frozen=True)
class Part:
    """A part that runs in a process of its own."""

    name: str
    group: str
    kind: str
    question: Mapping[str, Any] = field(default_factory=dict)
    """What its process is asked, beside what follows from the request."""
    seconds: int = 240
    """Seconds after which it is ended."""
    flags: str = ""
    """Flags of XLA."""
    times: int = 1
    """Rows of a variant, as many times those of the first model."""
    on_cpu: bool = True
    """Whether a part of torch runs on a CPU."""


def in_order(cases: Mapping[str, tuple[str, dict[str, str]]], steps: int) -> Iterator[Part]:
    """Yield all parts. `cases` are the models, CONFIG and options by name; `steps` those of the run that is killed."""
    first, *others = cases
    config, options = cases[first]

    def model(name: str) -> Part:
        config, options = cases[name]
        return Part(name, "models", MODEL, {"config": config, "overrides": options}, seconds=400)

    def variant(name: str, group: str, more: Mapping[str, str] = ALIKE, **other: Any) -> Part:
        question = {"config": config, "overrides": {**options, **more}, **other.pop("question", {})}
        return Part(name, group, VARIANT, question, **other)

    def run(name: str, group: str, **question: Any) -> Part:
        return Part(name, group, RUN, question)

    yield model(first)
    yield run("train", "train", part="train", steps=steps, options=[])
    yield Part("torch, cuDNN attention", "torch", TORCH, {"compile": True, "attention": "cudnn"}, 300, on_cpu=False)
    yield Part("torch, flash attention", "torch", TORCH, {"compile": True, "attention": "flash"}, 300, on_cpu=False)
    yield Part("torch, eager", "torch", TORCH, {"compile": False, "attention": "any"})
    yield variant("unrolled layers", "layers", {"model.unroll_layers": "true"})
    yield Part("numerics", "numerics", DEVICE, {"part": "device"}, seconds=400)
    prompt = load(config, {**options, "train.global_batch_size": "1"}).model.sequence // 2
    for rows in (1, 8):
        asked = {"config": config, "overrides": options, "rows": rows, "prompt": prompt, "tokens": min(TOKENS, prompt)}
        yield run(f"decode {rows} rows", "generate", part="decode", **asked)
    yield run("evaluate", "train", part="evaluate")
    yield run("generate", "train", part="generate", tokens=TOKENS)
    # The second model matters more than the other comparisons of the first, the remaining models less.
    yield from map(model, others[:1])
    for name, more in FORMS.items():
        yield variant(name, "forms", more)
    yield variant("experts", "forms", _experts(config, options))
    yield variant(
        f"{MICRO_BATCHES} micro-batches", "forms", {"train.accumulation": str(MICRO_BATCHES)}, times=MICRO_BATCHES
    )
    for remat in REMATS:
        yield variant(f"remat {remat}", "remat", {"model.remat": remat})
    yield run("profile", "profile", part="profile", config="", options=[])
    yield run("doctor", "doctor", part="doctor")
    for name, flags in FLAGS.items():
        yield variant(name, "flags", flags=flags)
    yield from map(model, others[1:])


def _experts(config: str, options: Mapping[str, str]) -> dict[str, str]:
    """Return the options of a mixture of 8 experts of a quarter of the MLP, of which a token has 2."""
    loaded: Config = load(config, {**options, "train.global_batch_size": "1"})
    experts = {"family": "moe", "mlp": 0, "experts": 8, "experts_per_token": 2}
    experts["expert_mlp"] = loaded.model.mlp_size // 4
    return {f"model.{name}": str(value) for name, value in experts.items()}
