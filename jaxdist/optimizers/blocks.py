"""Moments in 8 bits (Dettmers et al. 2022): which parameters have them, and how many scales.

Blocks of 256 numbers lie along the last dim of a matrix, and each has a scale of its own. A block lies whole on one
device, so that no mesh changes it: where a mesh would cut blocks, the request is refused. Vectors, and matrices whose
last dim is short, are few numbers and keep moments in float32.
"""

from __future__ import annotations

from jaxdist.optimizers.rule import Role

BLOCK = 256
"""Numbers of a block; the last one of a dim may have fewer."""

SHORTEST = 32
"""A last dim below it would have more bytes of scales than it saves."""


def has_blocks(role: Role, last: int) -> bool:
    """Return whether a parameter has moments in blocks, from its role and the size of its last dim."""
    return role.decays and last >= SHORTEST


def blocks(last: int) -> int:
    """Return how many blocks a last dim of this size has."""
    return -(-last // BLOCK)


def cut_by(last: int, part: int) -> bool:
    """Return whether devices that hold `part` of a last dim of size `last` would cut blocks."""
    return part != last and part % BLOCK != 0
