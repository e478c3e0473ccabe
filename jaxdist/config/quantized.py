"""Names and sizes of the forms in which the matrices of a frozen base are quantized. No jax here."""

from __future__ import annotations

BLOCK = 64
"""Numbers in a row that share a scale (QLoRA, Dettmers et al. 2023, section 3)."""

FORMS = ("int8", "nf4")
"""The forms, as `model.lora_base` names them."""

BESIDE = "bfloat16"
"""The dtype of the frozen parameters beside quantized matrices: tables, norms and biases."""


def block_of(size: int) -> int:
    """Return how many of `size` numbers in a row share a scale: a block, or all of a shorter row."""
    return min(BLOCK, size)
