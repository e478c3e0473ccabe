"""Write files so that each is there whole or not at all, and never through a symbolic link; read regular files only.

Somebody else may own what lies in a run folder: a link planted under a name that jaxdist writes must not lead it
elsewhere. A new file therefore gets a fresh name and is renamed, which replaces a link and does not follow it. And a
FIFO or a device in the place of a file must not make a reader wait for ever.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import IO


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A fresh name beside `path`; what is written there becomes `path` at the end, or is removed after an error.

    The file is there already, empty, with the permissions that the umask gives. Raises `OSError`.
    """
    temporary = path.with_name(f".{path.name[:100]}.{secrets.token_hex(8)}.tmp")
    os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))  # refuses any name that exists
    try:
        yield temporary
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_whole(path: Path, content: str | bytes) -> None:
    """Replace the file at `path` by one with this content; text is written as UTF-8. Raises `OSError`."""
    with replacing(path) as temporary:
        temporary.write_bytes(content.encode("utf-8") if isinstance(content, str) else content)


def open_no_follow(path: Path, mode: str) -> IO[str]:
    """Open a text file in `mode`, such as "a" or "a+". Raises `OSError` (ELOOP) where `path` is a symbolic link."""

    def opener(name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NOFOLLOW, 0o666)

    return open(path, mode, encoding="utf-8", opener=opener)


def read_regular(path: Path) -> bytes:
    """The content of a regular file. Raises `OSError` for a symbolic link and for anything else, which is not read."""
    number = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)  # a FIFO without a writer would block
    with open(number, "rb") as file:
        if not stat.S_ISREG(os.fstat(number).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        return file.read()
