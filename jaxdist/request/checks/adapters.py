"""Check low-rank adapters (LoRA): what they need, which weights can have them, and what trains whole weights alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from jaxdist import lora
from jaxdist.config import Config
from jaxdist.mesh import PIPELINE
from jaxdist.request.checks.mesh import fit
from jaxdist.request.checks.registry import check, unused
from jaxdist.units import remedy

OF_ADAPTERS = ("model.lora_alpha", "model.lora_dropout", "model.lora_targets", "model.lora_base")
"""Knobs that only adapters use."""


@check("model.family", "model.lora_rank", *OF_ADAPTERS)
def _no_adapters(config: Config) -> Iterator[str]:
    # Of models of images, all knobs of text are refused because of the family.
    if config.model.lora_rank == 0 and not config.model.images:
        for name in OF_ADAPTERS:
            yield from unused(config, name, "model.lora_rank 0, which makes no adapters,")


# Only a command that begins a run uses `run_dir`; the others load no weights, and plan or measure without them.
@check("model.family", "model.lora_rank", "init_from", "run_dir")
def _nothing_to_adapt(config: Config) -> Iterator[str]:
    rank = config.model.lora_rank
    if rank and config.init_from is None and not config.model.images:
        yield (
            f"model.lora_rank is {rank}, but there is no init_from: adapters are trained beside weights that stay as "
            f"they are; "
        ) + remedy("init_from to a folder of Hugging Face or to a run", "model.lora_rank to 0")


@check("model.family", "model.lora_rank", "model.lora_targets")
def _missing_targets(config: Config) -> Iterator[str]:
    model = config.model
    if not model.lora_rank or model.images:
        return
    possible = lora.targets_of(model)
    missing = [target for target in lora.parse(model.lora_targets) if target not in possible]
    if not model.lora_targets or not missing:
        return
    why = "whose experts get no adapters" if model.traits.routed else "which has no gate"
    yield (
        f"model.lora_targets names {', '.join(missing)}, but the model is of model.family {model.family}, {why}; "
        f"choose among {', '.join(possible)}"
    )


@check(
    "model.family",
    "model.lora_rank",
    "model.lora_targets",
    *(f"model.{size}" for size in ("embed", "heads", "head_dim", "kv_heads", "mlp")),
)
def _rank(config: Config) -> Iterator[str]:
    model = config.model
    # Other checks report heads that do not divide the width of the model.
    if model.images or not lora.adapted(model) or model.head_size == 0:
        return
    target = min(lora.adapted(model), key=lambda target: min(lora.sides(model, target)))
    rows, columns = lora.sides(model, target)
    most = min(rows, columns)
    if model.lora_rank > most:
        yield (
            f"model.lora_rank {model.lora_rank} is more than the rank that {target} itself can have, which is "
            f"{rows:,} x {columns:,}; lower it to at most {most}, or leave {target} out of model.lora_targets"
        )


@check("model.lora_rank", "train.local_steps")
def _local_steps(config: Config) -> Iterator[str]:
    rank = config.model.lora_rank
    local_steps = config.train.local_steps
    if rank and local_steps:
        yield (
            f"train.local_steps is {local_steps}, but model.lora_rank is {rank}, and an outer step averages all "
            f"weights of the replicas, also frozen ones; "
        ) + remedy("train.local_steps to 0", "model.lora_rank to 0")


@fit("model.lora_rank", "pipeline.schedule")
def _pipedream(config: Config, shape: Mapping[str, int]) -> Iterator[str]:
    rank = config.model.lora_rank
    if rank and shape[PIPELINE] > 1 and config.pipeline.asynchronous:
        yield (
            f"model.lora_rank is {rank}, but pipeline.schedule {config.pipeline.schedule} keeps several versions of "
            f"all weights of a stage, also of frozen ones; "
        ) + remedy("pipeline.schedule to 1f1b", "model.lora_rank to 0")
