"""The first bytes of files, read once for all that know a form by them: there may be ten thousand files."""

from __future__ import annotations

import os
from pathlib import Path

HEAD = 264
"""Bytes of them: as many as tell a tar archive, whose mark is the furthest from the start."""

MOST_KEPT = 1 << 15
"""Files whose first bytes a process keeps."""

_heads: dict[tuple[Path, int, int, int], bytes] = {}
"""By the paths of the files, and how they look from outside."""


def head_of(path: Path) -> bytes:
    """Return the first `HEAD` bytes of a regular file, which are not read again while it stays as it is.

    Raises `OSError`.
    """
    state = os.stat(path)
    key = (path, state.st_ino, state.st_size, state.st_mtime_ns)
    head = _heads.get(key)
    if head is None:
        with path.open("rb", buffering=0) as file:
            head = os.pread(file.fileno(), HEAD, 0)
        if len(_heads) >= MOST_KEPT:
            _heads.clear()
        _heads[key] = head
    return head
