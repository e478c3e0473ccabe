"""Low-rank adapters (LoRA, Hu et al. 2022): which weights get one, by the names that PEFT gives them. No jax here."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxdist.config.model import ModelConfig

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
TARGETS = (*ATTENTION, *MLP)
"""The weights that can have an adapter."""

ADAPTERS = "lora"
"""The name of the adapters among the parameters of attention and of an MLP."""

NEVER = {
    "embed_tokens": "the embedding table is looked up, not multiplied",
    "lm_head": "the output projection shares its rows with all ranks of a pipeline",
    "gate": "routers and experts stay as they are",
    "experts": "routers and experts stay as they are",
}
"""Weights that people ask for and that get no adapter, and why."""


def parse(text: str) -> tuple[str, ...]:
    """Return the targets that `text` lists, separated by commas, in the order of `TARGETS`; of "" all.

    Raises `ValueError` for a word that is none.
    """
    words = [word.strip() for word in text.split(",")] if text else list(TARGETS)
    for word in words:
        if word not in TARGETS:
            why = f" ({NEVER[word]})" if word in NEVER else ""
            raise ValueError(f"'{word}' gets no adapter{why}; choose among {', '.join(TARGETS)}")
    return tuple(target for target in TARGETS if target in words)


def targets_of(config: ModelConfig) -> tuple[str, ...]:
    """Return the weights of a model that can have an adapter; experts, of which each token sees a few, have none."""
    if config.traits.routed:
        return ATTENTION
    if config.traits.gated:
        return TARGETS
    return tuple(target for target in TARGETS if target != "gate_proj")


def adapted(config: ModelConfig) -> tuple[str, ...]:
    """Return the weights of a model that have an adapter; none at rank 0."""
    if not config.lora_rank:
        return ()
    return tuple(target for target in parse(config.lora_targets) if target in targets_of(config))


def scale(config: ModelConfig) -> float:
    """Return alpha / r, by which an adapter's product is multiplied (section 4.1)."""
    return (config.lora_alpha or 2 * config.lora_rank) / config.lora_rank


def trained(config: ModelConfig) -> Callable[[str], bool] | None:
    """Return which parameters a run trains, by the paths to them: the adapters alone; None, for all, without them."""
    return is_adapter if config.lora_rank else None


def parameters_per_layer(config: ModelConfig) -> int:
    """Return the parameters of the adapters of a layer: r times the inputs and outputs of each adapted weight."""
    queries = config.heads * config.head_size
    keys = config.key_value_heads * config.head_size
    ends = {
        "q_proj": config.embed + queries,
        "k_proj": config.embed + keys,
        "v_proj": config.embed + keys,
        "o_proj": queries + config.embed,
        **dict.fromkeys(MLP, config.embed + config.mlp_size),
    }
    return config.lora_rank * sum(ends[target] for target in adapted(config))


def is_adapter(path: str) -> bool:
    """Return whether the path to a parameter, such as "blocks.mlp.lora.up_proj.a", is that of an adapter."""
    return ADAPTERS in path.split(".")
