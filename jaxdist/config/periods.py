"""The kinds of a decoder's layers as text: names that repeat from the first layer on. No jax here."""

from __future__ import annotations

from collections.abc import Sequence

KINDS = ("sliding", "full", "sliding-nope", "full-nope")
"""A layer attends within the window of `model.window` or without one; with nope it has no rotary positions (NoPE)."""

LONGEST = 64
"""Kinds of the longest period: each is compiled by itself."""


def parse(text: str) -> tuple[str, ...]:
    """Return the kinds of one period; of an empty text, none. Raises `ValueError`, which says what the text must be."""
    if not text:
        return ()
    names = tuple(name.strip() for name in text.split(","))
    unknown = [name for name in names if name not in KINDS]
    if unknown:
        raise ValueError(f"must be kinds of layers, of {', '.join(KINDS)}, with commas, and '{unknown[0]}' is none")
    if len(names) > LONGEST:
        raise ValueError(f"must be at most {LONGEST} kinds, and there are {len(names)}")
    return names


def parts_of(name: str) -> tuple[bool, bool]:
    """Return whether a kind of layer has the window, and whether it has rotary positions."""
    where, _, without = name.partition("-")
    return where == "sliding", not without


def name_of(slides: bool, turns: bool) -> str:
    """Undo `parts_of`."""
    return ("sliding" if slides else "full") + ("" if turns else "-nope")


def shortest(names: Sequence[str]) -> tuple[str, ...]:
    """Return the shortest period that repeats to `names`; its last repetition may be cut short."""
    for length in range(1, len(names)):
        if all(name == names[i % length] for i, name in enumerate(names)):
            return tuple(names[:length])
    return tuple(names)
