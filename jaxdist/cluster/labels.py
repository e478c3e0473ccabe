"""What the processes of a user's script print, shown line by line behind the name of the process. No jax here."""

from __future__ import annotations

import os
import threading
from typing import IO

from jaxdist.output.streams import write_all

LONGEST = 1 << 16
"""Bytes of a line that are shown at once, even if it has not ended."""


class Labelled:
    """Copies the output of a process to a file descriptor of this one, each line behind a label."""

    def __init__(self, pipe: IO[bytes], descriptor: int, label: str):
        self._pipe = pipe
        self._descriptor = descriptor
        self._label = label.encode()
        self._thread = threading.Thread(target=self._copy, daemon=True)
        self._thread.start()

    def close(self, seconds: float) -> None:
        """Wait for the end of the output: at most `seconds`, since children of the process may hold it open."""
        self._thread.join(seconds)

    def _copy(self) -> None:
        rest = b""
        with self._pipe:
            while chunk := os.read(self._pipe.fileno(), LONGEST):
                rest = self._show_lines(rest + chunk)
        if rest:
            self._show(rest)

    def _show_lines(self, content: bytes) -> bytes:
        """Show all whole lines, and return what follows them. Progress bars end theirs by a carriage return."""
        lines = content.splitlines(keepends=True)
        rest = b""
        # A carriage return at the very end may be half of the end of a line.
        if lines and not lines[-1].endswith(b"\n") and len(lines[-1]) < LONGEST:
            rest = lines.pop()
        for line in lines:
            self._show(line)
        return rest

    def _show(self, line: bytes) -> None:
        # Reports of faults have the label already.
        label = b"" if line.startswith(self._label) else self._label
        write_all(self._descriptor, label + line.rstrip(b"\r\n") + b"\n")
