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

from jaxdist.data.chats.marks import ids_of, learned_of
from jaxdist.data.known import known
from jaxdist.data.number_file import JoinedNumbers, NumberFile
from jaxdist.data.token_samples import BLOCK, BLOCKS, WHOLE, spread
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

    Every method that reads raises `DataLost` if the file is shorter than when it was opened, and `IdOutside` for an id
    that is no id of a model with `vocab` of them.
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
    marked: bool = False
    """Whether they are of conversations, with marks (`data.chats.marks`)."""
    entropy: float | None = field(default=None, compare=False)
    """`unigram_entropy`, where it is known already."""
    vocab: int | None = None
    """The number of ids of the model, where these are checked as they are read; None where all were checked before."""

    @classmethod
    def open(cls, path: Path, dtype: TokenType, offset: int = 0, marked: bool = False) -> Tokens:
        """Return all tokens of a file after `offset` bytes, of which there must be a whole number.

        Nothing is read here: tokens are read from the file when they are indexed.
        """
        size = path.stat().st_size - offset
        width = np.dtype(dtype).itemsize
        assert size % width == 0, f"{path} has {size} bytes of tokens, not a multiple of {width}"
        return cls(path, dtype, size // width, offset=offset, marked=marked)

    @classmethod
    def joined(cls, shards: Sequence[Tokens]) -> Tokens:
        """Return the tokens of whole files one after another, as the wider type where these have two."""
        first = shards[0]
        if len(shards) == 1:
            return first
        wide: TokenType = "uint32" if any(shard.dtype == "uint32" for shard in shards) else "uint16"
        return cls(first.path, wide, sum(shard.length for shard in shards), shards=tuple(shards), marked=first.marked)

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
            largest = max(largest, int(self._ids(chunk).max()))
            if on_read is not None:
                on_read(chunk.nbytes)
        return largest

    def samples(self, sharing: int = 1) -> Iterator[Integer[np.ndarray, " n"]]:
        """Yield blocks of tokens, spread evenly over all: `BLOCKS`, or of a file its part where so many share them."""
        for start, stop in spread(self.length, BLOCKS // sharing, BLOCK // np.dtype(self.dtype).itemsize):
            yield self.words(start, stop)

    @property
    def size(self) -> int:
        """The bytes of these tokens."""
        return self.length * np.dtype(self.dtype).itemsize

    def unigram_entropy(self, sharing: int = 1) -> float:
        """Return the entropy of the token frequencies, in nats: the loss of the best guess that ignores the context.

        Of conversations only the tokens that are learned are counted. It is counted once, and `known` from then on: of
        all tokens up to `WHOLE` bytes, of more tokens from samples. Of one of `sharing` parts both are so much less.
        """
        if self.entropy is not None:
            return self.entropy
        whole = self.size <= WHOLE // sharing
        files = [(str(shard.dtype), shard.offset, shard.length) for shard in self.shards or (self,)]
        which = [*(["learned"] if self.marked else []), *([str(sharing)] if sharing > 1 else [])]
        question = digest("unigram entropy", self.start, self.length, json.dumps(files), *which)
        return known(
            question, [shard.path for shard in self.shards or (self,)], lambda: self.count_entropy(whole, sharing)
        )

    def count_entropy(self, whole: bool = True, sharing: int = 1) -> float:
        """Count the unigram entropy of all tokens, or of the samples of one of `sharing` parts."""
        counts = np.zeros(0, np.int64)
        for words in self._chunks() if whole else self.samples(sharing):
            ids = ids_of(words[learned_of(words)]) if self.marked else words
            in_chunk = np.bincount(ids, minlength=counts.size)
            in_chunk[: counts.size] += counts
            counts = in_chunk
        return _entropy_of(counts, whole)

    @property
    def ids(self) -> Integer[np.ndarray, " length"]:
        """All tokens, in memory."""
        return self.read(0, self.length)

    def read(self, start: int, stop: int) -> Integer[np.ndarray, " n"]:
        """Return tokens start..stop-1 of these."""
        return self._ids(self.words(start, stop))

    def words(self, start: int, stop: int) -> Integer[np.ndarray, " n"]:
        """Return the same with their marks."""
        return self._numbers.read(self.start + start, self.start + stop)

    @cached_property
    def files(self) -> tuple[NumberFile, ...]:
        """The files of all shards, or the only one."""
        return tuple(NumberFile(shard.path, shard.dtype, shard.offset, shard.vocab) for shard in self.shards or (self,))

    @property
    def counts(self) -> tuple[int, ...]:
        """How many tokens each of these files has, as far as they are needed."""
        return tuple(shard.start + shard.length for shard in self.shards or (self,))

    @cached_property
    def _numbers(self) -> NumberFile | JoinedNumbers:
        if self.shards:
            return JoinedNumbers(self.files, self.counts, self.dtype)
        return self.files[0]

    def _contains(self, token: int | None) -> bool:
        """Return whether one of the tokens is this one. Reads up to it."""
        if token is None:
            return False
        return any((self._ids(chunk) == token).any() for chunk in self._chunks())

    def _ids(self, words: np.ndarray) -> np.ndarray:
        return ids_of(words) if self.marked else words

    def _chunks(self) -> Iterator[np.ndarray]:
        for start in range(0, self.length, CHUNK):
            yield self.words(start, min(start + CHUNK, self.length))


class TokenWriter:
    """Write token ids to a new file. A context manager; the file is complete at its exit."""

    def __init__(self, path: Path, dtype: TokenType):
        self.dtype = dtype
        self.size = 0
        self._digest = xxhash.xxh3_64()
        # Never through a symbolic link, which somebody else may have planted in a shared cache.
        flags = os.O_WRONLY | os.O_TRUNC | os.O_CREAT | os.O_NOFOLLOW
        self._file = os.fdopen(os.open(path, flags, 0o666), "wb")

    def write(self, ids: Integer[np.ndarray, " n"]) -> None:
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


def _entropy_of(counts: Int[np.ndarray, " kinds"], whole: bool) -> float:
    """Return the entropy, in nats, of tokens of which there are so many.

    Of a sample it would be too small, and is corrected by (kinds - 1) / 2 n (Miller 1955).
    """
    found = counts[counts > 0]
    total = max(int(found.sum()), 1)
    share = found / total
    entropy = float(-(share * np.log(share)).sum())
    return entropy if whole else entropy + max(found.size - 1, 0) / (2 * total)
