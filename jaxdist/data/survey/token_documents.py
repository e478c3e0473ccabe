"""The documents in a stream of tokens: which come again, and samples with their tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import xxhash
from jaxtyping import Int
from tokenizers import Tokenizer

from jaxdist.data.chats.marks import ids_of, learned_of
from jaxdist.data.packed_rows import document_borders, lengths_in_order
from jaxdist.data.progress import Pass, Progress
from jaxdist.data.survey.duplicates import Hashes
from jaxdist.data.tokens import CHUNK, Tokens
from jaxdist.huggingface.special_tokens import SpecialTokens

SHOWN = 48
"""Tokens of a document that are shown at most."""

PART_OF_CHARACTER = "\ufffd"
"""What stands for the bytes of a character that is not complete."""

LONGEST_CHARACTER = 4
"""Bytes of the longest character of UTF-8, and the most tokens of which one can be."""

LOOKED_THROUGH = 1 << 16
"""Tokens in which the beginning of a document is looked for, and from which a sample starts anyway if there is none."""


def hash_documents(tokens: Tokens, special: SpecialTokens, hashes: Hashes, progress: Progress) -> None:
    """Add a hash of the ids of each document, whatever their type in the file is."""
    comparing = Pass(progress, "comparing documents", tokens.length)
    begin = 0
    for lengths in lengths_in_order(tokens, special):
        # Of these documents only the first may be longer than what is read at a time.
        first = int(lengths[0])
        hashes.add(_hash(tokens, begin, begin + first))
        rest = tokens.read(begin + first, begin + int(lengths.sum())).astype("<u4")
        ends = np.cumsum(lengths[1:])
        for start, end in zip((ends - lengths[1:]).tolist(), ends.tolist(), strict=True):
            hashes.add(xxhash.xxh3_64_intdigest(rest[start:end].data))
        begin += int(lengths.sum())
        comparing.read(int(lengths.sum()))


def _hash(tokens: Tokens, start: int, stop: int) -> int:
    content = xxhash.xxh3_64()
    for place in range(start, stop, CHUNK):
        content.update(tokens.read(place, min(place + CHUNK, stop)).astype("<u4").data)
    return content.intdigest()


class TokenSample(NamedTuple):
    """The first tokens of a document."""

    start: int
    """Where they are in the stream."""
    ids: list[int]
    pieces: list[str] | None
    """What each stands for; None without a tokenizer."""
    learned: list[str] | None = None
    """Of a conversation, the texts that are learned; None of other documents, and without a tokenizer."""


def samples(tokens: Tokens, special: SpecialTokens, tokenizer: Tokenizer | None, count: int) -> Iterator[TokenSample]:
    """Yield the beginnings of `count` documents; of three, those at the start, a third and two thirds of the stream.

    Of conversations the documents are the rows to learn from.
    """
    starts = {_next_start(tokens, special, tokens.length * part // count) for part in range(count)}
    for start in sorted(starts):
        words = tokens.words(start, min(start + SHOWN, tokens.length))
        ends = _inner_borders(words, special, tokens.marked)
        words = words[: ends[0]] if ends.size else words
        ids = ids_of(words).tolist() if tokens.marked else words.tolist()
        if ids:
            learned = _learned_texts(words, tokenizer) if tokens.marked and tokenizer else None
            yield TokenSample(start, ids, pieces(tokenizer, ids) if tokenizer else None, learned)


def _learned_texts(words: Int[np.ndarray, " n"], tokenizer: Tokenizer) -> list[str]:
    """Return the texts of the tokens that are learned, one after another as they stand together."""
    edges = np.flatnonzero(np.diff(learned_of(words), prepend=False, append=False))
    runs = zip(edges[::2], edges[1::2], strict=True)
    return [tokenizer.decode(ids_of(words[start:stop]).tolist(), skip_special_tokens=False) for start, stop in runs]


def _next_start(tokens: Tokens, special: SpecialTokens, place: int) -> int:
    """Return where the first document begins after a place, or the place itself if that is far away, or unknown."""
    if place == 0:
        return 0
    words = tokens.words(place, min(place + LOOKED_THROUGH, tokens.length))
    found = _inner_borders(words, special, tokens.marked)
    found = found[place + found < tokens.length]
    return place + int(found[0]) if found.size else place


def _inner_borders(words: Int[np.ndarray, " n"], special: SpecialTokens, marked: bool) -> Int[np.ndarray, " borders"]:
    """Return where documents begin or end in these tokens, but for their start."""
    found = document_borders(words, special, marked)
    return found[found > 0]


def pieces(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    """Return what each token stands for; a character of several tokens is one piece, with their number: é[2]."""
    found: list[str] = []
    before = ""
    first = 0
    for number in range(1, len(ids) + 1):
        text = tokenizer.decode(ids[:number], skip_special_tokens=False)
        if text.endswith(PART_OF_CHARACTER) and number - first < LONGEST_CHARACTER and number < len(ids):
            continue
        alone = tokenizer.decode(ids[first:number], skip_special_tokens=False)
        piece = text.removeprefix(before) if text.startswith(before) else alone
        count = f"[{number - first}]" if number - first > 1 else ""
        found.append(piece + count)
        before = text
        first = number
    return found
