"""Read numbers from a little-endian file. The operating system's page cache is the only buffer.

The file is read with `preadv` and not memory-mapped: truncating a mapped file would end the process with SIGBUS.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property
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

    @cached_property
    def _file(self) -> IO[bytes]:
        # The file stays open, so that another file that replaces it later is not read.
        try:
            return self.path.open("rb", buffering=0)
        except OSError as error:
            raise DataLost(f"'{self.path}' cannot be opened any more ({error.strerror}); put it back") from error
