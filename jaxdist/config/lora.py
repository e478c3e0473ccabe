"""Low-rank adapters (LoRA, Hu et al. 2022): which weights of a model get one. No jax here."""

from __future__ import annotations

from jaxdist.config.lora_targets import TARGETS, parse
from jaxdist.config.matmuls import matmuls_of
from jaxdist.config.model import ModelConfig
from jaxdist.config.stacks import stacks_of

ADAPTERS = "lora"
"""The name of the adapters among the parameters of attention and of an MLP."""

NO_TARGETS = "none"
"""The `lora_targets` of a model whose weights are frozen, and have no adapters: of no request."""


def targets_of(config: ModelConfig) -> tuple[str, ...]:
    """Return the weights of a model that can have an adapter; experts, of which each token sees a few, have none."""
    matmuls = [matmul for stack in stacks_of(config).values() for matmul in matmuls_of(stack).values()]
    own = {part.name for matmul in matmuls if matmul.adaptable for part in matmul.parts}
    return tuple(target for target in TARGETS if target in own)


def adapted(config: ModelConfig) -> tuple[str, ...]:
    """Return the weights of a model that have an adapter; none at rank 0."""
    if not config.lora_rank or config.lora_targets == NO_TARGETS:
        return ()
    return tuple(target for target in parse(config.lora_targets) if target in targets_of(config))


def without_adapters(config: ModelConfig) -> ModelConfig:
    """Return a model of the frozen weights alone, which rest as they do beside adapters."""
    return config.model_copy(update={"lora_targets": NO_TARGETS})


def scale(config: ModelConfig) -> float:
    """Return alpha / r, by which an adapter's product is multiplied (section 4.1)."""
    return (config.lora_alpha or 2 * config.lora_rank) / config.lora_rank


def is_adapter(path: str) -> bool:
    """Return whether the path to a parameter, such as "blocks.mlp.lora.up_proj.a", is that of an adapter."""
    return ADAPTERS in path.split(".")
