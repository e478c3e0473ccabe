"""Context parallelism: in which order the devices along `context` hold a row, and which form of attention runs.

Ring attention (Liu et al. 2023) sends keys and values round; the sequence is in zigzag order, so that all devices
have equally much to do under a causal mask. Ulysses (Jacobs et al. 2023) exchanges the sequence for heads before
attention, and back after it; the sequence stays in order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from jaxdist.config import Config
from jaxdist.mesh import CONTEXT, MODEL, PIPELINE

Form = Literal["ring", "ulysses"]

Index = Any
"""Whole numbers: an int, or an integer array of numpy or JAX."""

WIDE = 4
"""Bytes of a number in f32, in which the ring adds up gradients of keys and values."""

SHORTEST_PART = 4096
"""Tokens of a row that a device has at least in what the planner proposes: two chunks of 2048 tokens, from which on it
knows the rate of attention. Other axes are enough for shorter rows."""


def zigzag(index: Index, sequence: int, ranks: int) -> Index:
    """Return the position in its row of the token that stands at `index` of a row in zigzag order.

    The row of `sequence` tokens is cut into 2 n chunks for n = `ranks` devices; device i has chunks i and 2n - 1 - i.
    `sequence` must be a multiple of 2 n.
    """
    chunk = sequence // (2 * ranks)
    rank = index // (2 * chunk)
    second = index // chunk % 2
    number = (1 - second) * rank + second * (2 * ranks - 1 - rank)
    return number * chunk + index % chunk


class Heads(NamedTuple):
    """The heads that one rank of the model axis has in use."""

    query: int
    """N / model"""
    key_value: int
    """K / model, or 1 where the key/value heads are dealt out (`parallel.heads`)."""


def own_heads(config: Config, shape: Mapping[str, int]) -> Heads:
    """Return the heads of one rank of the model axis of a mesh of `shape`."""
    model = shape.get(MODEL, 1) if config.parallel.rules.heads else 1
    return Heads(config.model.heads // model, max(1, config.model.key_value_heads // model))


def repeated_heads(key_value: int, ranks: int) -> int:
    """Return how many key/value heads Ulysses sends of `key_value`: repeated until the `ranks` divide them."""
    return math.lcm(key_value, ranks)


class RingElements(NamedTuple):
    """The elements that a device sends in ring attention, in the passes of a layer."""

    forward: int
    """Keys and values."""
    backward: int
    """Keys and values once more."""
    sums: int
    """Sums of the gradients of keys and values, in f32."""
    home: int
    """The last of these sums, in the dtype of the keys."""


def ring_elements(elements: int, ranks: int) -> RingElements:
    """Return the elements that a device sends for ring attention.

    `elements` (u) are those of its keys and values. They go round in both passes, and the sums of their gradients one
    step behind; the last step takes these home.
    """
    round_trip = (ranks - 1) * elements
    return RingElements(round_trip, round_trip, round_trip, elements)


def ring_bytes(elements: int, ranks: int, width: int) -> int:
    """Return the bytes that a device sends in ring attention, in the forward and the backward pass of a layer.

    `elements` are those of its keys and values, of `width` bytes each.
    """
    sent = ring_elements(elements, ranks)
    return (sent.forward + sent.backward + sent.home) * width + sent.sums * WIDE


def ulysses_elements(tokens: int, heads: Heads, head_size: int, ranks: int) -> int:
    """Return the elements that a device with so many `tokens` exchanges for Ulysses in one pass of a layer.

    Queries, keys and values go out, and the result comes back; in the backward pass their gradients do the opposite.
    A device keeps 1 / `ranks` of them for itself.
    """
    return tokens * (2 * heads.query + 2 * repeated_heads(heads.key_value, ranks)) * head_size


def ulysses_bytes(tokens: int, heads: Heads, head_size: int, ranks: int, width: int) -> int:
    """Return the bytes that a device with so many `tokens` sends for Ulysses in both passes of a layer."""
    return 2 * ulysses_elements(tokens, heads, head_size, ranks) * width * (ranks - 1) // ranks


class Choice(NamedTuple):
    """The form of attention over `context`, and why."""

    form: Form
    why: str
    ring: int
    """Bytes that a device sends for ring attention in a layer, for each of its tokens."""
    ulysses: int | None
    """The same for Ulysses; None where the heads do not divide."""


def only_ulysses(config: Config, shape: Mapping[str, int]) -> bool:
    """Return whether attention over `context` may not be a ring: by request, or because a schedule branches."""
    if shape.get(CONTEXT, 1) == 1 or config.parallel.context == "ring":
        return False
    return config.parallel.context == "ulysses" or _branches(config, shape)


def _branches(config: Config, shape: Mapping[str, int]) -> bool:
    return shape.get(PIPELINE, 1) > 1 and config.pipeline.branches


def choose(config: Config, shape: Mapping[str, int]) -> Choice:
    """Return how a mesh of `shape`, all of whose sizes are known, attends over `context`.

    `config.precision` is resolved, or counts as bfloat16.
    """
    ranks = shape.get(CONTEXT, 1)
    heads = own_heads(config, shape)
    width = WIDE if config.precision == "float32" else 2
    head_size = config.model.head_size
    ring = ring_bytes(2 * heads.key_value * head_size, ranks, width)
    ulysses = None
    if heads.query % ranks == 0:
        ulysses = ulysses_bytes(1, heads, head_size, ranks, width)
    asked = config.parallel.context

    def chosen(form: Form, why: str) -> Choice:
        return Choice(form, why, ring, ulysses)

    if asked != "auto":
        return chosen(asked, "parallel.context asks for it")
    if _branches(config, shape):
        return chosen("ulysses", f"schedule {config.pipeline.schedule} branches, and a ring must not lie in a branch")
    if ulysses is None:
        return chosen("ring", f"Ulysses needs the {heads.query} query heads of a rank to divide by context={ranks}")
    chunks = 2 * ranks * (shape.get(MODEL, 1) if config.parallel.sequence else 1)
    if config.model.sequence % chunks:
        return chosen("ulysses", f"a ring needs rows of {config.model.sequence:,} tokens to divide by {chunks}")
    if ulysses > ring:
        return chosen("ring", "it sends fewer bytes than Ulysses")
    return chosen("ulysses", "it sends no more bytes than a ring")


def is_ring(config: Config, shape: Mapping[str, int]) -> bool:
    """Return whether rows lie in zigzag order, for ring attention."""
    return shape.get(CONTEXT, 1) > 1 and choose(config, shape).form == "ring"
