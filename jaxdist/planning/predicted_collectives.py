"""Describe a predicted collective: its kind, its mesh axes, how often it runs, and what it moves."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxdist.mesh import AXES
from jaxdist.sharding import Layout

ALL_REDUCE = "all-reduce"
ALL_GATHER = "all-gather"
REDUCE_SCATTER = "reduce-scatter"
PERMUTE = "collective-permute"
ALL_TO_ALL = "all-to-all"

F32 = 4
"""Bytes of a number in float32."""

INT32 = 4
"""Bytes of the number of a token, an expert or a position."""


Count = Any
"""A whole number, or where many steps are predicted at once an array of them, with one for each step."""

Numbers = np.ndarray | float
"""The same of any numbers."""


@dataclass(frozen=True)
class Transfer:
    """One kind of collective for one purpose: all its calls in a step."""

    what: str
    """The purpose."""
    kind: str
    axes: tuple[str, ...]
    """The mesh axes that it runs over, outermost first."""
    devices: Count
    """Devices in one group."""
    calls: Count
    elements: Count
    """Elements on one device, summed over the calls: the results of all-gathers, the operands of all other kinds."""
    width: int
    """Bytes of an element."""

    @property
    def payload_bytes(self) -> Count:
        """The bytes of `elements`."""
        return self.elements * self.width

    @property
    def wire_elements(self) -> float:
        """The elements that one device sends, by the ring algorithms (Thakur et al. 2005, section 4)."""
        return wire_share(self.kind, self.devices, self.elements)

    @property
    def wire_bytes(self) -> float:
        """The bytes that one device sends, by the ring algorithms."""
        return self.wire_elements * self.width


def wire_share(kind: str, ranks: Count, whole: Count = 1.0) -> Count:
    """Return what a rank sends around a ring of the `whole` array, elements or bytes.

    It is (n - 1)/n of it for an all-gather or a reduce-scatter over n ranks, and twice that for an all-reduce, which is
    both; a message is sent whole.
    """
    if kind == PERMUTE:
        return whole
    rounds = 2 if kind == ALL_REDUCE else 1
    return rounds * whole * (ranks - 1) / ranks


def transfer(
    layout: Layout, what: str, kind: str, axes: Iterable[str], calls: Count, elements: Count, width: int
) -> Transfer:
    """Make a transfer over the axes that the mesh has; an axis of size 1 is left out."""
    sizes = dict(layout.axes)
    axes = tuple(axis for axis in AXES if axis in axes and axis in sizes)
    devices = math.prod(sizes[axis] for axis in axes)
    return Transfer(what, kind, axes, devices, calls, elements, width)
