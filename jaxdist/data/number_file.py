"""Read numbers from little-endian files. The operating system's page cache is the only buffer.

The file is read with `preadv` and not memory-mapped: truncating a mapped file would end the process with SIGBUS.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO

import numpy as np
from jaxtyping import Int, Integer

from jaxdist.config import DataLost, Failed

NEGATIVE = 1 << 31
"""Ids from which on they are negative numbers, written as int32."""

MOST_OPEN = 256
"""Files that are open at a time: a process may have 1,024 open on most systems."""


class IdOutside(Failed):
    """Report a token id that the model does not have, found where it is read."""


@dataclass(frozen=True)
class NumberFile:
    """A file of integers of one dtype, which stays open once it has been read."""

    path: Path
    dtype: str
    """Of the numbers, such as uint16."""
    offset: int = 0
    """Bytes of the header, after which number 0 lies."""
    vocab: int | None = None
    """The number of ids of the model, where the numbers are ids that were not all checked before."""

    def read(self, start: int, stop: int) -> Integer[np.ndarray, " n"]:
        """Return numbers start..stop-1.

        Raises `DataLost` if the file is shorter than when it was opened, and `IdOutside`.
        """
        numbers = np.empty((1, stop - start), np.dtype(self.dtype).newbyteorder("<"))
        fill(numbers, [0], [self], [start])
        return numbers[0]

    def open(self) -> IO[bytes]:
        """Return the open file. As long as it has a name there, it stays open, though another thread may close it."""
        file = self._file
        OPEN.note(self)
        return file

    def lost(self, file: IO[bytes], place: int) -> DataLost:
        """Return the error for a file without bytes from `place` on."""
        size = os.fstat(file.fileno()).st_size
        return DataLost(
            f"'{self.path}' was truncated while it was read: it has {size} bytes, and those from {place} on, which "
            f"were there when it was opened, are gone; put it back"
        )

    def outside(self, numbers: Integer[np.ndarray, " n"], start: int, vocab: int) -> IdOutside:
        """Return the error for these numbers from `start` on, of which one is no id of a model with `vocab` of them."""
        first = int(np.argmax(numbers >= vocab))
        number = start + first
        found = int(numbers[first])
        place = f"at token {number:,} (byte {self.offset + number * np.dtype(self.dtype).itemsize:,})"
        if found >= NEGATIVE:
            words = f"the negative id {found - (1 << 32)} {place}; ids begin at 0, so write the file again"
        else:
            words = (
                f"token id {found} {place}, but model.vocab is {vocab}; set model.vocab to at least {found + 1}, or "
                "write the file again"
            )
        return IdOutside(
            f"'{self.path}' holds {words} (a start looks at samples of it: python -m jaxdist.data '{self.path}' "
            f"--model.vocab {vocab} --verify reads all)"
        )

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
        numbers = np.empty((1, stop - start), np.dtype(self.dtype).newbyteorder("<"))
        self.fill(numbers, np.zeros(1, np.int64), np.array([start]))
        return numbers[0]

    def fill(
        self, out: Integer[np.ndarray, "n length"], rows: Int[np.ndarray, " rows"], starts: Int[np.ndarray, " rows"]
    ) -> None:
        """Read `length` numbers into each of these rows of `out`, from its start on, which may be over several files.

        The dtype of `out` is that of a file or a wider one.
        """
        if not out.size:
            return
        numbers = np.searchsorted(self._ends, starts, "right")
        over = starts + out.shape[1] > self._ends[numbers]
        for row, start, number in zip(rows[over].tolist(), starts[over].tolist(), numbers[over].tolist(), strict=True):
            self._fill_over(out[row], start, number)
        within = ~over
        numbers = numbers[within]
        starts = starts[within] - self._begins[numbers]
        fill(out, rows[within].tolist(), [self.files[number] for number in numbers.tolist()], starts.tolist())

    def _fill_over(self, out: Integer[np.ndarray, " length"], start: int, number: int) -> None:
        """Read the numbers from `start` on, of which the first one is in file `number` and the last one in another."""
        place = start
        stop = start + out.size
        while place < stop:
            begin = int(self._begins[number])
            until = min(stop, int(self._ends[number]))
            out[place - start : until - start] = self.files[number].read(place - begin, until - begin)
            place = until
            number += 1

    @cached_property
    def _ends(self) -> Int[np.ndarray, " files"]:
        """The place at which each file ends."""
        return np.cumsum(self.counts, dtype=np.int64)

    @cached_property
    def _begins(self) -> Int[np.ndarray, " files"]:
        """The place at which each file begins."""
        return self._ends - self.counts


def fill(
    out: Integer[np.ndarray, "n length"], rows: Sequence[int], files: Sequence[NumberFile], starts: Sequence[int]
) -> None:
    """Read `length` numbers into each of these rows of `out`, from a start in a file, as `NumberFile.read` does.

    The dtype of `out` is that of each file or a wider one. A file is looked up once for the rows that follow one
    another.
    Raises `IdOutside`.
    """
    if not out.size:
        return
    content = out.data.cast("B")
    size = out.strides[0]
    before = None
    lowest = None
    for row, one, start in zip(rows, files, starts, strict=True):
        if one is not before:
            before = one
            file = one.open()
            own = np.empty(out.shape[1], np.dtype(one.dtype).newbyteorder("<"))
            alike = own.dtype == out.dtype
            if one.vocab is not None:
                lowest = one.vocab if lowest is None else min(lowest, one.vocab)
        rest = content[row * size : (row + 1) * size] if alike else own.data.cast("B")
        place = one.offset + start * own.itemsize
        try:
            count = os.preadv(file.fileno(), [rest], place)
            while count < len(rest):
                if count == 0:
                    raise one.lost(file, place)
                rest = rest[count:]
                place += count
                count = os.preadv(file.fileno(), [rest], place)
        except OSError as error:
            raise DataLost(f"'{one.path}' cannot be read any more ({error.strerror}); put it back") from error
        if not alike:
            out[row] = own
    # One look at all of them takes less time than one at each.
    if lowest is not None and out.max() >= lowest:
        for row, one, start in zip(rows, files, starts, strict=True):
            if one.vocab is not None and out[row].max() >= one.vocab:
                raise one.outside(out[row], start, one.vocab)
