"""Weights in MXFP4 (OCP Microscaling Formats 1.0, 2023, section 5.3.3), as gpt-oss was published: read as bfloat16.

Of a weight [E, in, out], out of one or more dims, the file holds for each output

    blocks   the numbers in 4 bits, two in a byte, the lower half first     [E, out, in / 32, 16] or [E, out, in / 2]
    scales   for each 32 of them the power of two that multiplies them      [E, out, in / 32]

No jax here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import ml_dtypes
import numpy as np
from jaxtyping import Shaped, UInt8

from jaxdist.huggingface.parts import Span
from jaxdist.huggingface.safetensors_file import Entry

BLOCK = 32
"""Numbers that share a scale."""

BYTES = BLOCK // 2

BIAS = 127
"""What is added to the power of two of a scale, so that it is a whole number from 0 on."""

NUMBERS = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
"""The numbers of 4 bits without their sign, which is the highest bit."""

BLOCKS, SCALES = "_blocks", "_scales"
"""The ends of the names of both tensors behind that of the weight."""


class Packed(NamedTuple):
    """A weight [E, in, out] that two tensors hold; it is read as if a file had it in `dtype`."""

    shape: tuple[int, ...]
    blocks: str
    """The name of the tensor of blocks."""
    scales: str
    dtype: str = "BF16"
    """As headers of safetensors spell it."""


def packed_weights(entries: Mapping[str, Entry]) -> dict[str, Packed]:
    """Return the weights that these tensors hold in MXFP4, by the names that they would have in another form."""
    found = {}
    for name, blocks in entries.items():
        weight = name.removesuffix(BLOCKS)
        scales = entries.get(weight + SCALES)
        if weight == name or scales is None or weight in entries or len(scales.shape) < 3:
            continue
        experts, *out, groups = scales.shape
        forms = ((*scales.shape, BYTES), (experts, *out, groups * BYTES))
        if blocks.dtype == scales.dtype == "U8" and blocks.shape in forms:
            found[weight] = Packed((experts, groups * BLOCK, *out), name, weight + SCALES)
    return found


Read = Callable[[str, Sequence[int], Sequence[Span]], Shaped[np.ndarray, "..."]]
"""(name of a tensor, the shape that it is seen with, a part of it) -> the numbers there."""


def read(packed: Packed, tensor: Read, shape: Sequence[int], box: Sequence[Span]) -> Shaped[np.ndarray, "..."]:
    """Return the part `box` of a weight that is seen with this `shape`, whose second dim is `in`, in bfloat16."""
    experts, inputs, *out = box
    groups = (inputs[0] // BLOCK, -(-inputs[1] // BLOCK))
    of_scales = (shape[0], *shape[2:], shape[1] // BLOCK)
    part = (experts, *out, groups)
    scales = tensor(packed.scales, of_scales, part)
    blocks = tensor(packed.blocks, (*of_scales, BYTES), (*part, (0, BYTES)))
    numbers = decoded(blocks, scales)
    start = BLOCK * groups[0]
    return np.moveaxis(numbers[..., inputs[0] - start : inputs[1] - start], -1, 1)


def decoded(
    blocks: UInt8[np.ndarray, "... groups 16"], scales: UInt8[np.ndarray, "... groups"]
) -> Shaped[np.ndarray, "... in"]:
    """Return the numbers in bfloat16, which holds all of them."""
    codes = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(*blocks.shape[:-1], BLOCK)
    numbers = np.where(codes & 8, -NUMBERS[codes & 7], NUMBERS[codes & 7])
    with np.errstate(over="ignore"):
        numbers = np.ldexp(numbers, scales[..., None].astype(np.int32) - BIAS)
    return numbers.astype(ml_dtypes.bfloat16).reshape(*scales.shape[:-1], -1)
