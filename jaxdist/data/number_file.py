"""Read numbers from a little-endian file. The operating system's page cache is the only buffer.

The file is read with `preadv` and not memory-mapped: truncating a mapped file would end the process with SIGBUS.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import IO

import numpy as np
from jaxtyping import Integer

from jaxdist.config import DataLost


@dataclass(frozen=True)
class NumberFile:
    """A file of integers of one dtype, which stays open once it has been read."""

    path: Path
    dtype: str
    """Of the numbers, such as uint16."""
    offset: int = 0
    """Bytes of the header, after which number 0 lies."""

    def read(self, start: int, stop: int) -> Integer[np.ndarray, " n"]:
        """Return numbers start..stop-1. Raises `DataLost` if the file is shorter than when it was opened."""
        numbers = np.empty(stop - start, np.dtype(self.dtype).newbyteorder("<"))
        rest = numbers.data.cast("B")
        place = self.offset + start * numbers.itemsize
        while rest:
            try:
                count = os.preadv(self._file.fileno(), [rest], place)
            except OSError as error:
                raise DataLost(f"'{self.path}' cannot be read any more ({error.strerror}); put it back") from error
            if count == 0:
                size = os.fstat(self._file.fileno()).st_size
                raise DataLost(
                    f"'{self.path}' was truncated while it was read: it has {size} bytes, and those from {place} on, "
                    f"which were there when it was opened, are gone; put it back"
                )
            rest = rest[count:]
            place += count
        return numbers

    def __getstate__(self) -> dict[str, object]:
        """Return what another process needs, which opens the file itself."""
        return {name: value for name, value in vars(self).items() if name != "_file"}

    @cached_property
    def _file(self) -> IO[bytes]:
        # The file stays open, so that another file that replaces it later is not read.
        try:
            return self.path.open("rb", buffering=0)
        except OSError as error:
            raise DataLost(f"'{self.path}' cannot be opened any more ({error.strerror}); put it back") from error


@dataclass(frozen=True)
class JoinedNumbers:
    """The numbers of several files, one file after another."""

    files: tuple[NumberFile, ...]
    counts: tuple[int, ...]
    """How many numbers each file has."""
    dtype: str
    """Of what is returned; that of a file may be narrower."""

    def read(self, start: int, stop: int) -> Integer[np.ndarray, " n"]:
        """Return numbers start..stop-1 of all files."""
        numbers = np.empty(stop - start, np.dtype(self.dtype).newbyteorder("<"))
        place = start
        number = bisect_right(self._ends, start)
        while place < stop:
            end = self._ends[number]
            begin = end - self.counts[number]
            until = min(stop, end)
            numbers[place - start : until - start] = self.files[number].read(place - begin, until - begin)
            place = until
            number += 1
        return numbers

    @cached_property
    def _ends(self) -> list[int]:
        """The place at which each file ends."""
        return list(accumulate(self.counts))
