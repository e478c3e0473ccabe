"""Read numbers from little-endian files. The operating system's page cache is the only buffer.

The file is read with `preadv` and not memory-mapped: truncating a mapped file would end the process with SIGBUS.
"""

from __future__ import annotations

import os
import threading
import weakref
from bisect import bisect_right
from collections import OrderedDict
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import IO

import numpy as np
from jaxtyping import Integer

from jaxdist.config import DataLost

MOST_OPEN = 256
"""Files that are open at a time: a process may have 1,024 open on most systems."""


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
        # Another thread may close it meanwhile: it stays open as long as it has a name here.
        file = self._file
        OPEN.note(self)
        while rest:
            try:
                count = os.preadv(file.fileno(), [rest], place)
            except OSError as error:
                raise DataLost(f"'{self.path}' cannot be read any more ({error.strerror}); put it back") from error
            if count == 0:
                size = os.fstat(file.fileno()).st_size
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

    def close(self) -> None:
        """Close the file, which is opened again when it is read."""
        self.__dict__.pop("_file", None)

    @cached_property
    def _file(self) -> IO[bytes]:
        # The file stays open, so that another file that replaces it later is not read.
        try:
            file = self.path.open("rb", buffering=0)
        except OSError as error:
            raise DataLost(f"'{self.path}' cannot be opened any more ({error.strerror}); put it back") from error
        state = os.fstat(file.fileno())
        found = (state.st_dev, state.st_ino, state.st_mtime_ns)
        if self.__dict__.setdefault("_opened", found) != found:
            raise DataLost(f"'{self.path}' was replaced while it was read; put the former file back")
        return file


class OpenFiles:
    """Notes which files of this process are open, and closes those that were not read for the longest time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._files: OrderedDict[int, weakref.ref[NumberFile]] = OrderedDict()
        """By their identity in memory, the one that was read last at the end."""

    def note(self, file: NumberFile) -> None:
        """Note that a file was read just now. The last `MOST_OPEN` that were read stay open."""
        oldest = []
        with self._lock:
            self._files[id(file)] = weakref.ref(file)
            self._files.move_to_end(id(file))
            while len(self._files) > MOST_OPEN:
                oldest.append(self._files.popitem(last=False)[1]())
        for one in oldest:
            if one is not None:
                one.close()


OPEN = OpenFiles()
"""Those of this process, whatever stream or source they belong to."""


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
