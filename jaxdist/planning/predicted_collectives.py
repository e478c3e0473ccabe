"""What one kind of collective moves, as a prediction has it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from jaxdist.mesh import AXES
from jaxdist.sharding import Layout

ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER = "all-reduce", "all-gather", "reduce-scatter"
PERMUTE, ALL_TO_ALL = "collective-permute", "all-to-all"

F32 = 4


@dataclass(frozen=True)
class Transfer:
    """One kind of collective for one purpose: all its calls in a step."""

    what: str
    kind: str
    axes: tuple[str, ...]
    """The mesh axes that it runs over, outermost first."""
    devices: int
    """In one group."""
    calls: int
    elements: int
    """Of one device, summed over the calls: what all-gather makes, and what the others are given."""
    width: int
    """Bytes of an element."""

    @property
    def payload_bytes(self) -> int:
        return self.elements * self.width

    @property
    def wire_elements(self) -> float:
        """What one device sends, by the ring algorithms (Thakur et al. 2005, section 4)."""
        if self.kind == PERMUTE:
            return self.elements
        return (2 if self.kind == ALL_REDUCE else 1) * self.elements * (self.devices - 1) / self.devices

    @property
    def wire_bytes(self) -> float:
        return self.wire_elements * self.width


def transfer(
    layout: Layout, what: str, kind: str, axes: Iterable[str], calls: int, elements: int, width: int
) -> Transfer:
    """Over those of `axes` that the mesh has."""
    axes = tuple(axis for axis in AXES if axis in axes and layout.size(axis) > 1)
    return Transfer(what, kind, axes, math.prod(layout.size(axis) for axis in axes), calls, elements, width)
