"""Write to standard output, standard error and log.txt so that a failed write never ends a run. No jax here.

A terminal may be closed, the reader of a pipe may exit, a disk may be full. Then a line is lost, and nothing else.

What commands write has text of files in it, and of models: names of tensors, facts of a checkpoint, answers. A terminal
obeys control characters, so that these are written as escapes, by every command, since the streams do it.
"""

from __future__ import annotations

import io
import os
import re
import select
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import IO, BinaryIO

from jaxdist.files import open_no_follow

PATIENCE = 1.0
"""Seconds that a line waits for the reader of a non-blocking pipe before it is dropped."""

LARGEST = 64 << 20
"""Bytes at which log.txt is rotated: it replaces log.txt.1, and a new log.txt begins."""

CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]|\r(?!\n)")
"""Characters that a terminal obeys or that turn the order of others, except tabs and ends of lines."""


def printable(text: str) -> str:
    """Return `text` with its control characters as escapes of JSON: what was JSON stays JSON."""
    return CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def clock(seconds: float | None = None) -> str:
    """Return a time in UTC in ISO 8601, such as 2026-11-23T13:24:05Z; by default the current time."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


def time_of_day() -> str:
    """Return the current time in UTC without the date: 13:24:05Z."""
    return clock().partition("T")[2]


def write_all(descriptor: int, content: bytes) -> bool:
    """Write to a file descriptor without buffering. Return whether all of it could be written."""
    rest = memoryview(content)
    try:
        while rest:
            try:
                written = os.write(descriptor, rest)
                rest = rest[written:]
            except BlockingIOError:
                _, writable, _ = select.select([], [descriptor], [], PATIENCE)
                if not writable:
                    return False
    except OSError:
        return False
    return True


class Unfailing(io.TextIOBase):
    """An unbuffered text stream to a file descriptor; text that cannot be written is dropped without an error.

    Control characters are written as escapes, unless it is `raw`.
    """

    def __init__(self, descriptor: int, encoding: str, raw: bool = False):
        self._descriptor = descriptor
        self._encoding = encoding
        self._raw = raw

    @property
    def raw(self) -> Unfailing:
        """The same stream for a program that draws on the terminal, and makes text printable itself."""
        return Unfailing(self._descriptor, self._encoding, raw=True)

    @property
    def encoding(self) -> str:  # type: ignore[override]  # typeshed allows assignments, which Python's streams refuse
        """Name of the encoding, as given."""
        return self._encoding

    @property
    def errors(self) -> str:  # type: ignore[override]  # as above
        """Characters outside the encoding are written as escapes, so that encoding cannot fail."""
        return "backslashreplace"

    def fileno(self) -> int:
        """Return the file descriptor."""
        return self._descriptor

    def isatty(self) -> bool:
        """Return whether the stream is a terminal."""
        return os.isatty(self._descriptor)

    def writable(self) -> bool:
        """Return True."""
        return True

    def write(self, text: str) -> int:
        """Write `text`, as much of it as possible, and return its length."""
        shown = text if self._raw else printable(text)
        write_all(self._descriptor, shown.encode(self._encoding, self.errors))
        return len(text)


class Printing(io.TextIOWrapper):
    """Standard output of a command whose results are read there, and whose writes fail where they cannot be written.

    Control characters, and those that the encoding lacks, are written as escapes.
    """

    def write(self, text: str) -> int:
        """Write all of `text`, and return its length."""
        super().write(printable(text))
        return len(text)


def printing(binary: BinaryIO, encoding: str, by_line: bool) -> Printing:
    """Return a stream that writes to `binary`, each line at once if `by_line` is set."""
    return Printing(binary, encoding=encoding, errors="backslashreplace", line_buffering=by_line)


def protect(output: bool) -> None:
    """Make this program survive the loss of standard error and, if `output` is set, of standard output.

    A stream that was closed before the program began is opened on /dev/null. Otherwise the next file that is opened
    would get its descriptor, and with it the lines meant for the stream.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            # `open` returns the lowest free descriptor, which is this one.
            os.open(os.devnull, os.O_RDWR)
    sys.stderr = _unfailing(2, sys.stderr)
    if output:
        sys.stdout = _unfailing(1, sys.stdout)
    elif sys.stdout is not None:
        sys.stdout.flush()
        # Python keeps the old stream, so that it does not close the buffer that both have.
        at_once = bool(sys.stdout.line_buffering or getattr(sys.stdout, "write_through", False))
        sys.stdout = printing(sys.stdout.buffer, sys.stdout.encoding, by_line=at_once)


def _unfailing(descriptor: int, stream: IO[str] | None) -> Unfailing:
    # The new stream writes to the same descriptor, so what the old one still buffers must come first.
    with suppress(OSError, ValueError, AttributeError):
        if stream is not None:
            stream.flush()
    return Unfailing(descriptor, getattr(stream, "encoding", None) or "utf-8")


class LogFile:
    """The log.txt of a run: plain lines, each with its time in front. Several threads may write at once.

    Lines written before `open` are kept until then. If the file cannot be written, `problem` says why and the line is
    lost; each further line tries again.
    """

    def __init__(self) -> None:
        self.problem: str | None = None
        """Why the last line could not be written."""
        self.last = ""
        """The last line, without its time."""
        self._path: Path | None = None
        self._rotates = False
        self._early: list[str] = []
        self._file: IO[str] | None = None
        self._lock = threading.Lock()

    def open(self, path: Path, rotates: bool) -> None:
        """Write to `path` from now on, starting with the lines so far.

        Set `rotates` only if no other process writes the file.
        """
        with self._lock:
            self._path = path
            self._rotates = rotates
            if self._early:
                self._write("".join(self._early))
                self._early = []

    def write(self, text: str) -> None:
        """Add `text`, which may be several lines."""
        now = clock()
        lines = [printable(line) for line in text.splitlines() or [""]]
        content = "".join(f"{now}  {line}\n" for line in lines)
        with self._lock:
            self.last = lines[-1]
            if self._path is None:
                self._early.append(content)
            else:
                self._write(content)

    def close(self) -> None:
        """Close the file; a later write opens it again."""
        with self._lock:
            self._close()

    def _write(self, content: str) -> None:
        path = self._path
        assert path is not None
        try:
            if self._file is None:
                self._file = open_no_follow(path, "a")
            elif self._rotates and os.fstat(self._file.fileno()).st_size >= LARGEST:
                self._close()
                path.replace(path.with_name(f"{path.name}.1"))
                self._file = open_no_follow(path, "a")
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
