"""The documents in a stream of tokens: which come again, and samples with their tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import xxhash
from jaxtyping import Int
from tokenizers import Tokenizer

from jaxdist.data.packed_rows import lengths_in_order
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


def samples(tokens: Tokens, special: SpecialTokens, tokenizer: Tokenizer | None, count: int) -> Iterator[TokenSample]:
    """Yield the beginnings of `count` documents; of three, those at the start, a third and two thirds of the stream."""
    starts = {_next_start(tokens, special, tokens.length * part // count) for part in range(count)}
    for start in sorted(starts):
        ids = tokens.read(start, min(start + SHOWN, tokens.length))
        ends = _borders(ids, special)
        ids = ids[: ends[0]] if ends.size else ids
        if ids.size:
            yield TokenSample(start, ids.tolist(), pieces(tokenizer, ids.tolist()) if tokenizer else None)


def _next_start(tokens: Tokens, special: SpecialTokens, place: int) -> int:
    """Return where the first document begins after a place, or the place itself if that is far away, or unknown."""
    if place == 0:
        return 0
    found = _borders(tokens.read(place, min(place + LOOKED_THROUGH, tokens.length)), special)
    found = found[place + found < tokens.length]
    return place + int(found[0]) if found.size else place


def _borders(ids: Int[np.ndarray, " n"], special: SpecialTokens) -> Int[np.ndarray, " borders"]:
    """Return where documents begin or end in these tokens, but for their start."""
    behind = [np.flatnonzero(ids == special.eos) + 1] if special.eos is not None else []
    before = [np.flatnonzero(ids == special.bos)] if special.bos is not None else []
    found = np.unique(np.concatenate([np.zeros(0, np.int64), *behind, *before]))
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
