"""Check low-rank adapters: what they need, which weights can have one, and what does not train them."""

from __future__ import annotations

from collections.abc import Iterator

from jaxdist.config import Config, ModelConfig, RequestError, lora
from jaxdist.config.lora_targets import parse
from jaxdist.config.matmuls import matmuls_of
from jaxdist.config.quantized import BLOCK, block_of
from jaxdist.config.stacks import stacks_of
from jaxdist.mesh.split import Split
from jaxdist.output.units import remedy
from jaxdist.request.checks.mesh import fit
from jaxdist.request.checks.registry import check


@check("model.family", "model.lora_rank", "model.lora_targets")
def _targets(config: Config) -> Iterator[str]:
    model = config.model
    if model.images or not model.frozen or not model.lora_targets:
        return
    possible = lora.targets_of(model)
    wrong = [target for target in parse(model.lora_targets) if target not in possible]
    if wrong:
        why = "has no such weight"
        matmuls = [matmul for stack in stacks_of(model).values() for matmul in matmuls_of(stack).values()]
        if not all(matmul.adaptable for matmul in matmuls):
            why = "has experts in its place, which stay as they are"
        yield (
            f"model.lora_targets names {', '.join(wrong)}, but model.family {model.family} {why}; choose among "
            f"{', '.join(possible)}"
        )


@check("model.lora_rank", "model.embed", "model.heads", "model.head_dim", "model.kv_heads", "model.family")
def _rank(config: Config) -> Iterator[str]:
    model = config.model
    if model.images or model.heads < 1 or model.embed < model.heads:
        return
    if model.lora_rank > model.embed:
        yield (
            f"model.lora_rank {model.lora_rank} is more than model.embed {model.embed}, the rank of any weight beside "
            f"which an adapter could be; lower it to at most {model.embed}"
        )


@check("model.lora_base", "model.lora_rank", "model.family", "model.embed", "model.kv_latent")
def _quantized(config: Config) -> Iterator[str]:
    model = config.model
    if model.images or not model.stored_form:
        return
    asked = f"model.lora_base is {model.lora_base}"
    instead = remedy("model.lora_base to bfloat16")
    if any(stack.traits.routed for stack in stacks_of(model).values()):
        yield f"{asked}, but model.family {model.family} has experts, whose weights are not quantized; {instead}"
    elif model.traits.rotary and model.kv_latent:
        yield (
            f"{asked}, but model.kv_latent {model.kv_latent} makes attention latent, whose weights are not quantized; "
            f"{instead}"
        )
    elif model.embed % block_of(model.embed) or model.embed % 2:
        yield (
            f"{asked}, whose blocks are {BLOCK} numbers along model.embed, but that is {model.embed}, which is not a "
            f"multiple of {BLOCK}; {instead}"
        )


def check_has_base(model: ModelConfig) -> None:
    """Raise `RequestError` for a run with adapters that begins with no weights."""
    if model.frozen:
        raise RequestError(
            f"model.lora_rank is {model.lora_rank}, but there are no weights for adapters to stand beside; "
            f"name a run or a folder of Hugging Face by --init-from, or set model.lora_rank to 0"
        )


@fit("model.lora_rank", "pipeline.schedule")
def _adapters_in_pipedream(split: Split) -> Iterator[str]:
    model = split.config.model
    if model.frozen and not split.flush:
        yield (
            f"pipeline.schedule is pipedream, which keeps old versions of all weights, and {model.frozen_by} "
            f"freezes most of them; "
        ) + remedy("pipeline.schedule to 1f1b", "model.lora_rank to 0")
