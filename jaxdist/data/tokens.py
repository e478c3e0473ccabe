"""Read and write files of token ids."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np
import xxhash
from jaxtyping import Int, Integer

from jaxdist.data.known import known
from jaxdist.data.number_file import JoinedNumbers, NumberFile
from jaxdist.files import digest

TokenType = Literal["uint16", "uint32"]
"""The dtype of the ids in a file, which is little-endian."""

IGNORED = -1
"""The label of a position that does not count in the loss."""

CHUNK = 1 << 22
"""Tokens processed at a time when a whole file is read (16 MiB as uint32)."""


@dataclass(frozen=True)
class Tokens:
    """The `length` little-endian token ids from index `start` of a file, or of several files one after another.

    Every method that reads raises `DataLost` if the file is shorter than when it was opened.
    """

    path: Path
    dtype: TokenType
    length: int
    start: int = 0
    begin: int | None = None
    """The token that begins each document, if documents are to be apart and such a token exists."""
    end: int | None = None
    """The token that ends each document, if documents are to be apart and such a token exists."""
    offset: int = 0
    """Bytes of the header, after which the token of index 0 lies."""
    shards: tuple[Tokens, ...] = ()
    """The files that are joined, the first of which is at `path`; none where that is the only one."""
    entropy: float | None = field(default=None, compare=False)
    """`unigram_entropy`, where it is known already."""

    @classmethod
    def open(cls, path: Path, dtype: TokenType, offset: int = 0) -> Tokens:
        """Return all tokens of a file after `offset` bytes, of which there must be a whole number.

        Nothing is read here: tokens are read from the file when they are indexed.
        """
        size = path.stat().st_size - offset
        width = np.dtype(dtype).itemsize
        assert size % width == 0, f"{path} has {size} bytes of tokens, not a multiple of {width}"
        return cls(path, dtype, size // width, offset=offset)

    @classmethod
    def joined(cls, shards: Sequence[Tokens]) -> Tokens:
        """Return the tokens of whole files one after another, as the wider type where these have two."""
        first = shards[0]
        if len(shards) == 1:
            return first
        wide: TokenType = "uint32" if any(shard.dtype == "uint32" for shard in shards) else "uint16"
        return cls(first.path, wide, sum(shard.length for shard in shards), shards=tuple(shards))

    def part(self, start: int, stop: int) -> Tokens:
        """Return tokens start..stop-1 of these without copying them."""
        assert 0 <= start <= stop <= self.length, f"part {start}:{stop} of {self.length} tokens"
        return replace(self, start=self.start + start, length=stop - start, entropy=None)

    @property
    def apart(self) -> bool:
        """Whether documents are to be apart."""
        return self.begin is not None or self.end is not None

    def several_documents(self) -> bool:
        """Return whether any token follows an `end`, or any but the first is a `begin`. Reads up to that token."""
        but_the_last = self.part(0, max(0, self.length - 1))
        but_the_first = self.part(min(1, self.length), self.length)
        return but_the_last._contains(self.end) or but_the_first._contains(self.begin)

    def largest(self, on_read: Callable[[int], None] | None = None) -> int:
        """Return the largest id, or -1 if there are no tokens.

        Reads everything in chunks; `on_read` is called with the number of bytes of each.
        """
        largest = -1
        for chunk in self._chunks():
            largest = max(largest, int(chunk.max()))
            if on_read is not None:
                on_read(chunk.nbytes)
        return largest

    def unigram_entropy(self) -> float:
        """Return the entropy of the token frequencies, in nats: the loss of the best guess that ignores the context.

        It is counted once, and `known` from then on.
        """
        if self.entropy is not None:
            return self.entropy
        files = [(str(shard.dtype), shard.offset, shard.length) for shard in self.shards or (self,)]
        question = digest("unigram entropy", self.start, self.length, json.dumps(files))
        return known(question, [shard.path for shard in self.shards or (self,)], self._count_entropy)

    def _count_entropy(self) -> float:
        counts = np.zeros(0, np.int64)
        for chunk in self._chunks():
            in_chunk = np.bincount(chunk, minlength=counts.size)
            in_chunk[: counts.size] += counts
            counts = in_chunk
        share = counts[counts > 0] / max(self.length, 1)
        return float(-(share * np.log(share)).sum())

    @property
    def ids(self) -> Integer[np.ndarray, " length"]:
        """All tokens, in memory."""
        return self.read(0, self.length)

    def read(self, start: int, stop: int) -> Integer[np.ndarray, " n"]:
        """Return tokens start..stop-1 of these."""
        return self._numbers.read(self.start + start, self.start + stop)

    @cached_property
    def _numbers(self) -> NumberFile | JoinedNumbers:
        if self.shards:
            files = tuple(NumberFile(shard.path, shard.dtype, shard.offset) for shard in self.shards)
            return JoinedNumbers(files, tuple(shard.length for shard in self.shards), self.dtype)
        return NumberFile(self.path, self.dtype, self.offset)

    def _contains(self, token: int | None) -> bool:
        """Return whether one of the tokens is this one. Reads up to it."""
        if token is None:
            return False
        return any((chunk == token).any() for chunk in self._chunks())

    def _chunks(self) -> Iterator[np.ndarray]:
        for start in range(0, self.length, CHUNK):
            yield self.read(start, min(start + CHUNK, self.length))


class TokenWriter:
    """Write token ids to a new file. A context manager; the file is complete at its exit."""

    def __init__(self, path: Path, dtype: TokenType):
        self.dtype = dtype
        self.size = 0
        self._digest = xxhash.xxh3_64()
        # Never through a symbolic link, which somebody else may have planted in a shared cache.
        flags = os.O_WRONLY | os.O_TRUNC | os.O_CREAT | os.O_NOFOLLOW
        self._file = os.fdopen(os.open(path, flags, 0o666), "wb")

    def write(self, ids: Int[np.ndarray, " n"]) -> None:
        """Append `ids`, which must fit the dtype of the file."""
        assert ids.size == 0 or 0 <= ids.min() <= ids.max() <= np.iinfo(self.dtype).max, f"ids outside {self.dtype}"
        content = ids.astype(np.dtype(self.dtype).newbyteorder("<")).data
        self.size += self._file.write(content)
        self._digest.update(content)

    def written(self) -> tuple[int, str]:
        """Return the size in bytes and the XXH3 of everything so far, after handing it to the operating system."""
        self._file.flush()
        return self.size, self._digest.hexdigest()

    def __enter__(self) -> TokenWriter:
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()
