"""Which parameters of a model are trained: all, or those that stand beside its frozen weights. No jax here."""

from __future__ import annotations

from collections.abc import Callable

from jaxdist.config import lora
from jaxdist.config.matmuls import Matmul, matmuls_of
from jaxdist.config.model import ModelConfig
from jaxdist.config.stacks import stacks_of

KNOBS = ("lora_rank", "lora_alpha", "lora_dropout", "lora_targets", "lora_base")
"""Knobs of `model` that say what is trained beside frozen weights."""


def trained(config: ModelConfig) -> Callable[[str], bool] | None:
    """Return which parameters a run trains, by the paths to them; None: all."""
    return lora.is_adapter if config.frozen else None


def trained_beside(config: ModelConfig) -> int:
    """Return the parameters of a layer that stand beside its frozen weights: r times the ends of each adapted one.

    `config` is that of a stack.
    """
    adapted = lora.adapted(config)
    ends = 0
    for matmul in matmuls_of(config).values():
        for part in matmul.parts:
            if matmul.adaptable and part.name in adapted:
                ends += matmul.size(matmul.inputs) + matmul.size(part.outputs)
    return config.lora_rank * ends


def all_trained_beside(config: ModelConfig) -> int:
    """Return the parameters of all layers that stand beside their frozen weights."""
    return sum(stack.layers * trained_beside(stack) for stack in stacks_of(config).values())


def learns(config: ModelConfig, matmul: Matmul) -> bool:
    """Return whether a matmul has parameters that are trained: its weight, or what stands beside a part of it."""
    adapted = lora.adapted(config)
    return not config.frozen or any(part.name in adapted for part in matmul.parts)


def without_form(config: ModelConfig) -> ModelConfig:
    """Return the model whose frozen matrices have a dtype, which is that of the parameters beside them."""
    return config.model_copy(update={"lora_base": config.dtype_at_rest})


def merged(config: ModelConfig) -> ModelConfig:
    """Return the model whose own weights have taken up what was trained beside them."""
    return config.model_copy(update={knob: ModelConfig.model_fields[knob].default for knob in KNOBS})
