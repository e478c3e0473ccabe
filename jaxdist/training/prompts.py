"""Lay prompts out for prefill: padded to a bucket, or several short ones in one row (packed). No jax here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from jaxdist.config import RequestError

SMALLEST = 16
"""Tokens of the smallest bucket."""


class Prefill(NamedTuple):
    """Prompts in R rows of T tokens. Rows and prompts are split evenly over the batch ranks, in order."""

    tokens: Int[np.ndarray, "R T"]
    starts: Int[np.ndarray, "R T"] | None
    """Where in its row the prompt of each token starts; None where each row is one prompt."""
    begins: Int[np.ndarray, " B"]
    """Where each prompt begins in the tokens of its batch rank, counted row by row."""
    lengths: Int[np.ndarray, " B"]


def bucket(tokens: int, sequence: int) -> int:
    """Return the length of the rows for prompts of at most `tokens` tokens: a power of two, or `sequence`."""
    size = SMALLEST
    while size < tokens:
        size *= 2
    return min(size, sequence)


def cached_tokens(longest: int, further: int | None, sequence: int, parts: int) -> int:
    """Return how many tokens of each row a cache holds, for prompts of at most `longest` and `further` after them.

    None stands for as many as the `sequence` of the model has room for. So that few programs are compiled, it is a
    power of two or `sequence`, or three quarters of one of these; `parts` devices share it evenly.
    """
    if further is None:
        return sequence
    needed = min(longest + further, sequence)
    size = bucket(needed, sequence)
    if size * 3 // 4 >= needed:
        size = size * 3 // 4
    return -(-size // parts) * parts


def lay_out(prompts: Sequence[Sequence[int]], ranks: int, sequence: int) -> Prefill:
    """Return the prefill of `prompts` on `ranks` batch ranks; prompts of one token are added so that they divide.

    Short prompts share rows where that takes fewer rows, rounded up to a power of two, so that few programs are
    compiled. Raises `RequestError` for a prompt that is empty, or longer than `sequence`.
    """
    check(prompts, sequence)
    each = -(-len(prompts) // ranks)
    padded = [list(prompt) for prompt in prompts] + [[0]] * (each * ranks - len(prompts))
    own = [padded[rank * each : (rank + 1) * each] for rank in range(ranks)]
    size = bucket(max(map(len, padded)), sequence)
    places = [_first_fit([len(prompt) for prompt in some], size) for some in own]
    rows = 1
    while rows <= max(row for some in places for row, _ in some):
        rows *= 2
    if rows >= each:
        rows = each
        places = [[(number, 0) for number in range(each)]] * ranks
    tokens = np.zeros((ranks, rows, size), np.int32)
    starts = np.zeros_like(tokens)
    for rank, prompts_of_rank in enumerate(own):
        for prompt, (row, start) in zip(prompts_of_rank, places[rank], strict=True):
            tokens[rank, row, start : start + len(prompt)] = prompt
            # Padding goes on to belong to the prompt before it: no prompt sees it.
            starts[rank, row, start:] = start
    begins = [row * size + start for some in places for row, start in some]
    return Prefill(
        tokens.reshape(-1, size),
        None if rows == each else starts.reshape(-1, size),
        np.asarray(begins, np.int32),
        np.asarray([len(prompt) for prompt in padded], np.int32),
    )


def check(prompts: Sequence[Sequence[int]], sequence: int) -> None:
    """Raise `RequestError` for a prompt that is empty, or longer than the `sequence` of the model."""
    for number, prompt in enumerate(prompts, start=1):
        if not prompt:
            raise RequestError(f"prompt {number} is empty; give at least one token to continue")
        if len(prompt) > sequence:
            raise RequestError(
                f"prompt {number} has {len(prompt)} tokens, but model.sequence is {sequence}; shorten the prompt"
            )


def _first_fit(lengths: Sequence[int], size: int) -> list[tuple[int, int]]:
    """Return for each length (row, where in it), each in the first row of `size` that has room for it.

    Rows only fill up: one that had no room for a length never has. So each length goes on where it was last placed, and
    since all rows but one are more than half full, the search takes no more steps than there are tokens, times two.
    """
    filled: list[int] = []
    first: dict[int, int] = {}
    places = []
    for length in lengths:
        row = first.get(length, 0)
        while row < len(filled) and filled[row] + length > size:
            row += 1
        first[length] = row
        if row == len(filled):
            filled.append(0)
        places.append((row, filled[row]))
        filled[row] += length
    return places
