"""The tokens of a row of a conversation, each with whether it is learned.

A row is encoded once. Where a token would lie across the border of what is learned, both sides are encoded apart, as it
is when a model answers: there the prompt is encoded before the answer exists.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int
from tokenizers import Encoding, Tokenizer

from jaxdist.data.chats.rendering import Rendered
from jaxdist.huggingface.given_tokenizer import encode, encode_with_places


class LearnedTokens(NamedTuple):
    """A row to learn from."""

    ids: Int[np.ndarray, " n"]
    learned: Bool[np.ndarray, " n"]
    """Which of the tokens are learned: each is predicted from those before it."""


def tokens_of(tokenizer: Tokenizer, rows: list[Rendered]) -> list[LearnedTokens]:
    """Return the tokens of rows. Raises `RequestError` as `encode` does."""
    whole = encode_with_places(tokenizer, [row.text for row in rows])
    return [_tokens_of(tokenizer, row, found) for row, found in zip(rows, whole, strict=True)]


def _tokens_of(tokenizer: Tokenizer, row: Rendered, whole: Encoding) -> LearnedTokens:
    places = np.array(whole.offsets, np.int64).reshape(-1, 2)
    borders = sorted({border for span in row.learned for border in span} - {0, len(row.text)})
    if all(_between_tokens(places, border) for border in borders):
        return LearnedTokens(np.array(whole.ids, np.int64), _inside(places[:, 0], row.learned))
    ids: list[int] = []
    starts: list[int] = []
    for start, stop in zip([0, *borders], [*borders, len(row.text)], strict=True):
        part = encode(tokenizer, row.text[start:stop]).ids
        ids += part
        starts += [start] * len(part)
    return LearnedTokens(np.array(ids, np.int64), _inside(np.array(starts), row.learned))


def _between_tokens(places: Int[np.ndarray, "n 2"], border: int) -> bool:
    """Return whether a token ends at a border, and none lies across it.

    Where a tokenizer leaves spaces out of the places of its tokens, nobody knows: then it is False.
    """
    after = int(np.searchsorted(places[:, 0], border))
    if not (places[:after, 1] <= border).all():
        return False
    return after == 0 or int(places[:after, 1].max()) == border


def _inside(starts: Int[np.ndarray, " n"], spans: tuple[tuple[int, int], ...]) -> Bool[np.ndarray, " n"]:
    """Return which tokens start in one of the spans of characters."""
    learned = np.zeros(len(starts), bool)
    for start, stop in spans:
        learned |= (starts >= start) & (starts < stop)
    return learned
