"""The loss on held-out data that come from several sources: of each source, and of all."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from jaxdist.data.batches import Batch

OF_SOURCE = "loss/"
"""What the name of a source follows in the name of its loss."""


class HeldOutPart(NamedTuple):
    """Held-out rows of one source, or of all where nothing tells them apart."""

    name: str
    """Of the source; empty for all."""
    rows: int
    """The number of its held-out rows."""
    measured: int
    """The number of those that are in `batches`."""
    batches: Iterator[Batch]


def joined(parts: Sequence[HeldOutPart], found: Sequence[Mapping[str, float]], unit: str) -> dict[str, float]:
    """Return what was found on all parts, and the loss of each source.

    Means are over all held-out units. Where only a part of a source was measured, that stands for the whole of it.
    """
    counted = ("batches", unit)
    weights = [one[unit] * part.rows / part.measured for part, one in zip(parts, found, strict=True)]
    means = {
        name: sum(weight * one[name] for weight, one in zip(weights, found, strict=True)) / sum(weights)
        for name in found[0]
        if name not in counted
    }
    sums = {name: sum(one[name] for one in found) for name in counted}
    losses = {OF_SOURCE + part.name: one["loss"] for part, one in zip(parts, found, strict=True)}
    return {**means, **sums, **losses}


def losses_of_sources(values: Mapping[str, float | int | None], before: str = "") -> dict[str, float]:
    """Return the losses of sources among figures, by the names of the sources; `before` stands before these figures.

    A loss that is not finite, and stands as None in metrics.jsonl, is NaN.
    """
    start = before + OF_SOURCE
    return {
        name.removeprefix(start): math.nan if value is None else value
        for name, value in values.items()
        if name.startswith(start)
    }
