"""Standard output and error, whose loss ends no run, and log.txt, which has the same lines. No jax here.

A terminal may be closed, the reader of a pipe may end, a disk may be full: then a line is lost, and nothing else.
"""

from __future__ import annotations

import io
import os
import select
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import IO

from jaxdist.files import open_no_follow

PATIENCE = 1.0
"""Seconds that a line waits for the reader of a pipe that does not block; it is lost then."""

LARGEST = 64 << 20
"""Bytes of log.txt from which it is renamed to log.txt.1, in place of the one before, and begun again."""


def clock(seconds: float | None = None) -> str:
    """A time in UTC as ISO 8601 writes it, such as 2026-11-23T13:24:05Z; by default now."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


def time_of_day() -> str:
    """Now in UTC, without the date: 13:24:05Z."""
    return clock().partition("T")[2]


def write_all(descriptor: int, content: bytes) -> bool:
    """Write to a file descriptor, at once. Whether all of it could be written."""
    rest = memoryview(content)
    try:
        while rest:
            try:
                rest = rest[os.write(descriptor, rest) :]
            except BlockingIOError:
                if not select.select([], [descriptor], [], PATIENCE)[1]:
                    return False
    except OSError:
        return False
    return True


class Unfailing(io.TextIOBase):
    """A text stream without a buffer that writes to a file descriptor; what cannot be written is lost."""

    def __init__(self, descriptor: int, encoding: str):
        self._descriptor, self._encoding = descriptor, encoding

    @property
    def encoding(self) -> str:
        return self._encoding

    @property
    def errors(self) -> str:
        return "backslashreplace"

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        write_all(self._descriptor, text.encode(self._encoding, self.errors))
        return len(text)


def protect(output: bool) -> None:
    """From now on this program goes on when standard error, or where `output` is set standard output, is lost.

    A stream that was closed before the program began leads nowhere: its number would be given to the next file that is
    opened, which would then get the lines.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free: this one
    sys.stderr = _unfailing(2, sys.stderr)
    if output:
        sys.stdout = _unfailing(1, sys.stdout)


def _unfailing(descriptor: int, stream: IO[str] | None) -> Unfailing:
    with suppress(OSError, ValueError, AttributeError):
        stream.flush()
    return Unfailing(descriptor, getattr(stream, "encoding", None) or "utf-8")


class LogFile:
    """log.txt of a run: plain lines, each behind its time. Threads may write at once.

    Lines that come before `open` are kept until then. A file that cannot be written is told in `problem`, and loses
    lines; it is tried again with each.
    """

    def __init__(self) -> None:
        self.problem: str | None = None
        """Why the last line could not be written."""
        self._path: Path | None = None
        self._rotates = False
        self._early: list[str] = []
        self._file: IO[str] | None = None
        self._lock = threading.Lock()

    def open(self, path: Path, rotates: bool) -> None:
        """From now on write to `path`, beginning with the lines so far; `rotates` where no other process writes it."""
        with self._lock:
            self._path, self._rotates = path, rotates
            early, self._early = self._early, []
            if early:
                self._write("".join(early))

    def write(self, text: str) -> None:
        """One or more lines."""
        now = clock()
        content = "".join(f"{now}  {_plain(line)}\n" for line in text.splitlines() or [""])
        with self._lock:
            if self._path is None:
                self._early.append(content)
            else:
                self._write(content)

    def close(self) -> None:
        with self._lock:
            self._close()

    def _write(self, content: str) -> None:
        try:
            if self._file is None:
                self._file = open_no_follow(self._path, "a")
            elif self._rotates and os.fstat(self._file.fileno()).st_size >= LARGEST:
                self._close()
                self._path.replace(self._path.with_name(f"{self._path.name}.1"))
                self._file = open_no_follow(self._path, "a")
            if not write_all(self._file.fileno(), content.encode(errors="backslashreplace")):
                raise OSError("it takes no more")
            self.problem = None
        except OSError as error:
            self.problem = error.strerror or str(error)

    def _close(self) -> None:
        if self._file is not None:
            with suppress(OSError):
                self._file.close()
            self._file = None


def _plain(text: str) -> str:
    """`text` without control characters: a terminal that shows the log must not obey what stands in it."""
    return "".join(letter if letter.isprintable() or letter == "\t" else " " for letter in text)
