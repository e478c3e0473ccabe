"""What a compiled program says of itself: its text, and the bytes that a device needs for it.

JAX's types allow for backends that say neither; those of CPUs and GPUs say both.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import jax


class MemoryStats(Protocol):
    """The bytes of one device, as XLA counts them."""

    argument_size_in_bytes: int
    output_size_in_bytes: int
    alias_size_in_bytes: int
    temp_size_in_bytes: int
    host_argument_size_in_bytes: int
    host_temp_size_in_bytes: int


def text_of(program: jax.stages.Compiled) -> str:
    """Return the text (HLO) of a compiled program, which `hlo_text` parses."""
    text = program.as_text()
    assert text is not None
    return text


def memory_of(program: jax.stages.Compiled) -> MemoryStats:
    """Return the bytes that a compiled program takes on each device."""
    stats = program.memory_analysis()
    assert stats is not None
    return stats
