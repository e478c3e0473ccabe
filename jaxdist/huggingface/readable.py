"""Arrays that are read a part at a time: stored in a checkpoint, in a folder, or merged. No jax here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import numpy as np
from jaxtyping import Shaped

from jaxdist.config import RequestError
from jaxdist.huggingface.parts import Span, extents

Region = tuple[slice, ...]
"""A part of an array, as it is indexed: a slice for each dim, with step 1."""

Block = tuple[Region, Shaped[np.ndarray, "..."]]
"""Which part of a region it is, counted from the region's corner, and the numbers there."""


class Readable(Protocol):
    """An array of which any region can be read, in blocks that fit into memory."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole array."""
        ...

    def blocks(self, region: Region) -> Iterator[Block]:
        """Yield a region block by block."""
        ...


def spans_of(region: Region, shape: Sequence[int]) -> tuple[Span, ...]:
    """Return the start and stop of a region of an array of `shape` in each dim."""
    bounds = (part.indices(size) for part, size in zip(region, shape, strict=True))
    return tuple((start, stop) for start, stop, _ in bounds)


def read(array: Readable, region: Region) -> Shaped[np.ndarray, "..."]:
    """Return the numbers of a region, in the dtype of its blocks."""
    numbers = None
    for place, block in array.blocks(region):
        if numbers is None:
            numbers = np.empty(extents(spans_of(region, array.shape)), block.dtype)
        numbers[place] = block
    assert numbers is not None, "an empty region"
    return numbers


def check_shapes(arrays: Mapping[str, Readable], expected: Mapping[str, tuple[int, ...]]) -> None:
    """Raise `RequestError` with a sentence for each array that is not among those expected, or has another shape."""
    problems = []
    for name in sorted({*expected, *arrays}):
        there = arrays[name].shape if name in arrays else None
        if there != expected.get(name):
            problems.append(
                f"the checkpoint has {name} of shape {there}, and the run's config.toml means {expected.get(name)}; "
                f"use the [model] section that the run was trained with"
            )
    if problems:
        raise RequestError(*problems)
