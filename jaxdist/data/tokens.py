"""Token ids in a file, read where they lie: the operating system's page cache is the only buffer.

They are read with `preadv`, and not mapped: a file that somebody cuts while it is mapped ends the process with SIGBUS.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import IO, Literal

import numpy as np
import xxhash
from jaxtyping import Int, Integer

from jaxdist.config import DataLost
from jaxdist.files import BLOCK, open_regular

CHUNK = 1 << 22
"""Tokens looked at together where a whole file is read (16 MiB as uint32)."""


@dataclass(frozen=True)
class Tokens:
    """`length` token ids from number `start` of a headerless little-endian file. All that reads raises `DataLost` where
    the file is shorter now."""

    path: Path
    dtype: Literal["uint16", "uint32"]
    length: int
    start: int = 0
    end: int | None = None
    """The token that each document ends with, where documents are to be apart."""

    @classmethod
    def open(cls, path: Path, dtype: Literal["uint16", "uint32"]) -> Tokens:
        """All tokens of a file whose size is a multiple of the token's."""
        size, width = path.stat().st_size, np.dtype(dtype).itemsize
        assert size % width == 0, f"{path} has {size} bytes, not a multiple of {width}"
        return cls(path, dtype, size // width)

    def part(self, start: int, stop: int) -> Tokens:
        """Tokens start..stop-1 of these, without a copy."""
        assert 0 <= start <= stop <= self.length, f"part {start}:{stop} of {self.length} tokens"
        return replace(self, start=self.start + start, length=stop - start)

    def rows(self, sequence: int) -> int:
        """How many windows of `sequence` tokens, each with the token after it, there are."""
        return max(0, self.length - 1) // sequence

    def window(self, index: Int[np.ndarray, " n"], sequence: int) -> Int[np.ndarray, "n {sequence}+1"]:
        """Row i covers tokens i*S to i*S+S inclusive: neighbours share one token, so that each is predicted once."""
        assert index.size == 0 or 0 <= index.min() <= index.max() < self.rows(sequence), "row outside the tokens"
        out = np.empty((len(index), sequence + 1), np.int32)
        for row, first in zip(out, index.tolist(), strict=True):
            row[:] = self.read(first * sequence, (first + 1) * sequence + 1)
        return out

    def several_documents(self) -> bool:
        """Whether an `end` is followed by anything; reads up to the first one."""
        return any((chunk == self.end).any() for chunk in self.part(0, max(0, self.length - 1))._chunks())

    def largest(self, read: Callable[[int], None] = lambda count: None) -> int:
        """The largest id, -1 where there is none; reads everything, a chunk at a time, whose bytes `read` gets."""
        found = -1
        for chunk in self._chunks():
            found = max(found, int(chunk.max()))
            read(chunk.nbytes)
        return found

    def unigram_entropy(self) -> float:
        """Entropy of the tokens' own frequencies, in nats: the loss of the best guess that ignores the context."""
        counts = np.zeros(0, np.int64)
        for chunk in self._chunks():
            found = np.bincount(chunk, minlength=counts.size)
            found[: counts.size] += counts
            counts = found
        share = counts[counts > 0] / max(self.length, 1)
        return float(-(share * np.log(share)).sum())

    @property
    def ids(self) -> Integer[np.ndarray, " length"]:
        """All of them, in memory."""
        return self.read(0, self.length)

    def read(self, start: int, stop: int) -> Integer[np.ndarray, " n"]:
        """Tokens start..stop-1 of these."""
        found = np.empty(stop - start, np.dtype(self.dtype).newbyteorder("<"))
        rest, place = memoryview(found).cast("B"), (self.start + start) * found.itemsize
        while rest:
            try:
                count = os.preadv(self._file.fileno(), [rest], place)
            except OSError as error:
                raise DataLost(f"'{self.path}' cannot be read any more ({error.strerror}); put it back") from error
            if count == 0:
                size = os.fstat(self._file.fileno()).st_size
                raise DataLost(
                    f"'{self.path}' was cut while it was read: it has {size} bytes, and those from {place} on, which "
                    f"were there when it was opened, are gone; put it back"
                )
            rest, place = rest[count:], place + count
        return found

    @cached_property
    def _file(self) -> IO[bytes]:
        """Held open: a file that takes the place of this one is not read."""
        try:
            return self.path.open("rb", buffering=0)
        except OSError as error:
            raise DataLost(f"'{self.path}' cannot be opened any more ({error.strerror}); put it back") from error

    def _chunks(self) -> Iterator[np.ndarray]:
        return (self.read(i, min(i + CHUNK, self.length)) for i in range(0, self.length, CHUNK))


class TokenWriter:
    """Appends token ids to a file, a new one or one that was begun; a context manager, complete once it is left."""

    def __init__(self, path: Path, dtype: Literal["uint16", "uint32"]):
        self.dtype, self.size = dtype, 0
        self._digest = xxhash.xxh3_64()
        if path.exists():
            self._take_in(path)
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW
        self._file = os.fdopen(os.open(path, flags, 0o666), "ab")

    def write(self, ids: Int[np.ndarray, " n"]) -> None:
        """Append; the ids must fit the file's type."""
        assert ids.size == 0 or 0 <= ids.min() <= ids.max() <= np.iinfo(self.dtype).max, f"ids outside {self.dtype}"
        content = ids.astype(np.dtype(self.dtype).newbyteorder("<")).data
        self.size += self._file.write(content)
        self._digest.update(content)

    def written(self) -> tuple[int, str]:
        """Size in bytes and XXH3 of all so far, which the operating system has from now on."""
        self._file.flush()
        return self.size, self._digest.hexdigest()

    def _take_in(self, path: Path) -> None:
        """What was written before."""
        with open_regular(path) as file:
            while block := file.read(BLOCK):
                self.size += len(block)
                self._digest.update(block)

    def __enter__(self) -> TokenWriter:
        return self

    def __exit__(self, *exception) -> None:
        self._file.close()
