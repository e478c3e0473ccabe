"""Say which gradients a step needs not make where only adapters are trained (LoRA), for predictions."""

from __future__ import annotations

from jaxdist.config import Config, lora

COLUMNS = {"heads": ("q_proj", "k_proj", "v_proj"), "mlp": ("gate_proj", "up_proj")}
"""The weights of a layer that the residual stream enters, by the logical axis that splits their columns."""

SHIFTS = {"heads": "blocks.norm1.bias", "mlp": "blocks.norm2.bias"}
"""Parameters that shift what enters these columns, if the model has them (GPT)."""

WHOLE_BLOCK = ("block", "stage", "offload")
"""The values of `model.remat` that multiply all weights of a layer again in its backward pass."""


def learns_tables(config: Config) -> bool:
    """Return whether what stands outside of the layers is trained, so that looked-up vectors have gradients."""
    return not config.model.frozen


def learns_columns(config: Config, logical: str) -> bool:
    """Return whether the residual stream enters trained weights along `logical`, whose gradients need it again."""
    return not config.model.frozen or bool(set(COLUMNS[logical]) & set(lora.adapted(config.model)))


def enters_again(config: Config, logical: str) -> bool:
    """Return whether the backward pass of a layer needs once more what enters the columns along `logical`."""
    return config.model.remat in WHOLE_BLOCK or learns_columns(config, logical)


def forward_only(config: Config) -> set[str]:
    """Return the names of parameters whose values no gradient needs because the weights behind them are frozen."""
    return {name for logical, name in SHIFTS.items() if not enters_again(config, logical)}
