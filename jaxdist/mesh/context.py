"""Context parallelism: in which order the devices along `context` hold a row, and what either form of attention sends.

Ring attention (Liu et al. 2023) sends keys and values round; the sequence is in zigzag order, so that all devices
have equally much to do under a causal mask. Ulysses (Jacobs et al. 2023) exchanges the sequence for heads before
attention, and back after it; the sequence stays in order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

Form = Literal["ring", "ulysses"]


class FormTraits(NamedTuple):
    """What requests and reports must know of a form of attention."""

    name: str
    short: str
    """Its name in a sentence that is about attention."""
    chunks: int
    """The equal chunks of a row that each device has."""


FORMS: dict[Form, FormTraits] = {
    "ring": FormTraits("ring attention", "a ring", chunks=2),
    "ulysses": FormTraits("Ulysses", "Ulysses", chunks=1),
}

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
    key_size: int
    """Values of a query and of a key."""
    value_size: int
    """Values of a value, and of what a query finds."""

    @property
    def keys_and_values(self) -> int:
        """The elements of a token's keys and values."""
        return self.key_value * (self.key_size + self.value_size)


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

    `elements` counts its keys and values, of `width` bytes each.
    """
    sent = ring_elements(elements, ranks)
    return (sent.forward + sent.backward + sent.home) * width + sent.sums * WIDE


def ulysses_elements(heads: Heads, ranks: int) -> int:
    """Return the elements that a device exchanges for each of its tokens in one pass of a layer, for Ulysses.

    Queries, keys and values go out, and the result comes back; in the backward pass their gradients do the opposite.
    A device keeps 1 / `ranks` of them for itself.
    """
    sent = heads.query + repeated_heads(heads.key_value, ranks)
    return sent * (heads.key_size + heads.value_size)


def ulysses_bytes(heads: Heads, ranks: int, width: int) -> int:
    """Return the bytes that a device sends for each of its tokens in both passes of a layer, for Ulysses."""
    return 2 * ulysses_elements(heads, ranks) * width * (ranks - 1) // ranks


class Choice(NamedTuple):
    """The form of attention over `context`, and why."""

    form: Form
    why: str
    sent: Mapping[Form, int | None]
    """Bytes that a device sends in a layer for each of its tokens, by form; None where heads do not divide."""

    @property
    def traits(self) -> FormTraits:
        """The traits of the form."""
        return FORMS[self.form]

    @property
    def possible(self) -> bool:
        """Whether the heads allow the form."""
        return self.sent[self.form] is not None

    @property
    def other(self) -> Form:
        """The form that was not chosen."""
        return next(form for form in FORMS if form != self.form)
