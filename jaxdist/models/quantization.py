"""Forms of a quantized matrix: the arrays that hold it, and the numbers that these stand for.

A block is 64 numbers in a row along one dim, the residual stream D. No mesh axis splits D in use, so a device has whole
blocks whatever the mesh; and as arrays are made of the whole matrix, the numbers that they stand for are the same on
every mesh, wherever ZeRO cuts the arrays between steps. To be the same to the bit, numbers are multiplied by an inverse
and never divided: XLA makes the one of the other where it likes.

Every form has `codes` and `scales`, which stand in the shape of the matrix, with fewer along D. All functions take
numpy or JAX's numpy as `xp`.
"""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable
from itertools import pairwise
from typing import Any

from jaxdist.config.quantized import block_of

Arrays = dict[str, Any]
"""Arrays by their names."""

LookUp = Callable[[Any, Any], Any]
"""(table, codes) -> the number in the table that each code names."""

NF4 = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
"""The 16 numbers of NormalFloat (Dettmers et al. 2023, appendix E): quantiles of a normal distribution, and 0."""


SMALLEST = float.fromhex("0x1p-126")
"""The smallest normal number of float32."""


class Form(ABC):
    """How a matrix is held."""

    @abstractmethod
    def encode(self, xp: Any, w: Any, dim: int) -> Arrays:
        """Return the arrays that hold `w`, whose blocks lie along `dim`."""

    @abstractmethod
    def decode(self, xp: Any, arrays: Arrays, dim: int, look_up: LookUp = operator.getitem) -> Any:
        """Return the numbers that the arrays stand for, in the dtype of their scales: float32 or wider.

        `look_up` finds them in a table.
        """


class Int8(Form):
    """8 bits, and a float32 scale for each block: 8.5 bits.

    Blocks and not whole output channels, so that one large weight spoils 64 numbers and not thousands; and so that
    matrices split by rows and by columns have their scales along the same dim.
    """

    def encode(self, xp: Any, w: Any, dim: int) -> Arrays:
        """Return codes in -127..127, and scales."""
        blocks = _blocks(w.astype(xp.float32), dim)
        scales = xp.abs(blocks).max(dim + 1) * xp.float32(1 / 127)
        codes = xp.round(blocks * xp.expand_dims(_inverse(xp, scales), dim + 1))
        return {"codes": _joined(codes, dim).astype(xp.int8), "scales": scales}

    def decode(self, xp: Any, arrays: Arrays, dim: int, look_up: LookUp = operator.getitem) -> Any:
        """Return codes times scales."""
        scales = arrays["scales"]
        blocks = _split(arrays["codes"], dim, scales.shape[dim]).astype(scales.dtype)
        return _joined(blocks * xp.expand_dims(scales, dim + 1), dim)


class NormalFloat4(Form):
    """4 bits, and for each block a scale in 8 bits, which is a part of the largest in its row along D.

    That is double quantization: 4.125 bits, and 32 for each row. The paper's groups are of 256 scales; a row of D has
    at most as many up to D = 16,384. Two numbers stand in a byte: those of one block that are half a block apart.
    """

    def encode(self, xp: Any, w: Any, dim: int) -> Arrays:
        """Return pairs of codes, the scales in 255ths of the largest, and the largest."""
        blocks = _blocks(w.astype(xp.float32), dim)
        largest = xp.abs(blocks).max(dim + 1)
        peaks = largest.max(dim, keepdims=True)
        scales = xp.clip(xp.round(largest * (_inverse(xp, peaks) * xp.float32(255))), 1, 255).astype(xp.uint8)
        held = _scale(xp, scales, peaks)
        # By the scales as they are held, so that the codes make up for their rounding.
        blocks = blocks * xp.expand_dims(_inverse(xp, held), dim + 1)
        codes = xp.zeros(blocks.shape, xp.uint8)
        for below, above in pairwise(NF4):
            codes = codes + (blocks > xp.float32((below + above) / 2)).astype(xp.uint8)
        low, high = xp.split(codes, 2, dim + 1)
        return {"codes": _joined(low | (high << 4), dim), "scales": scales, "peaks": peaks}

    def decode(self, xp: Any, arrays: Arrays, dim: int, look_up: LookUp = operator.getitem) -> Any:
        """Return the numbers of NormalFloat that the codes name, times scales."""
        scales = _scale(xp, arrays["scales"], arrays["peaks"])
        pairs = _split(arrays["codes"], dim, scales.shape[dim])
        codes = xp.concatenate([pairs & 15, pairs >> 4], dim + 1)
        return _joined(look_up(xp.asarray(NF4, scales.dtype), codes) * xp.expand_dims(scales, dim + 1), dim)


FORMS: dict[str, Form] = {"int8": Int8(), "nf4": NormalFloat4()}
"""The forms by their names."""


def _scale(xp: Any, scales: Any, peaks: Any) -> Any:
    """Return the scales of blocks from their parts of the largest."""
    return scales.astype(peaks.dtype) * (peaks * xp.asarray(1 / 255, peaks.dtype))


def _inverse(xp: Any, scales: Any) -> Any:
    """Return 1 / scales, and 1 where all that they scale is zero, or so small that the inverse would be infinite."""
    return xp.float32(1) / xp.where(scales < SMALLEST, xp.float32(1), scales)


def _blocks(w: Any, dim: int) -> Any:
    """Split `dim` into (blocks, numbers of a block)."""
    return _split(w, dim, w.shape[dim] // block_of(w.shape[dim]))


def _split(a: Any, dim: int, count: int) -> Any:
    return a.reshape(*a.shape[:dim], count, a.shape[dim] // count, *a.shape[dim + 1 :])


def _joined(blocks: Any, dim: int) -> Any:
    """Undo `_split`."""
    return blocks.reshape(*blocks.shape[:dim], blocks.shape[dim] * blocks.shape[dim + 1], *blocks.shape[dim + 2 :])
