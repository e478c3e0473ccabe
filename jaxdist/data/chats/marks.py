"""Tokens of conversations as they are kept: 32 bits each, of which two say what is learned and where a row begins.

So a mask lies where its token does, in every file and copy of it, and none of these can be without the other.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Bool, Int, Integer

LEARNED = 1 << 31
"""The bit of a token that is learned."""

BEGINS = 1 << 30
"""The bit of the first token of a row to learn from."""

IDS = BEGINS - 1
"""The bits of the id."""


def marked(ids: Int[np.ndarray, " n"], learned: Bool[np.ndarray, " n"]) -> Int[np.ndarray, " n"]:
    """Return the tokens of a row with their marks."""
    words: np.ndarray = ids | np.where(learned, LEARNED, 0)
    words[:1] |= BEGINS
    return words


def ids_of(words: Integer[np.ndarray, "..."]) -> Integer[np.ndarray, "..."]:
    """Return tokens without their marks."""
    return words & np.uint32(IDS)


def learned_of(words: Integer[np.ndarray, "..."]) -> Bool[np.ndarray, "..."]:
    """Return which tokens are learned."""
    return (words & np.uint32(LEARNED)) != 0


def begins_of(words: Integer[np.ndarray, "..."]) -> Bool[np.ndarray, "..."]:
    """Return which tokens are the first of a row to learn from."""
    return (words & np.uint32(BEGINS)) != 0
