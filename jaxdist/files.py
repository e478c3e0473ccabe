"""Write files whole or not at all, and never through a symbolic link; read regular files only; checksums. No jax here.

Somebody else may own what lies in a run folder: a link planted under a name that jaxdist writes must not lead it
elsewhere. A new file therefore gets a fresh name and is renamed, which replaces a link and does not follow it. And a
FIFO or a device in the place of a file must not make a reader wait for ever.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import secrets
import stat
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import xxhash

BLOCK = 1 << 19
"""Bytes that are read at a time: few enough to be in a cache when their checksum is made."""

LARGEST_TOML = 1 << 20
"""Bytes of a TOML file: a configuration has a few thousand."""


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A fresh name beside `path`; what is written there becomes `path` at the end, or is removed after an error.

    The file is there already, empty, with the permissions that the umask gives. Raises `OSError`.
    """
    temporary = path.with_name(f".{path.name[:50]}.{secrets.token_hex(8)}.tmp")
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


def write_picture(path: Path | str, figure: Any, dpi: int) -> None:
    """Replace the file at `path` by a PNG of matplotlib's `figure`. Raises `OSError`."""
    with replacing(Path(path)) as temporary:
        figure.savefig(temporary, dpi=dpi, format="png")


def open_no_follow(path: Path, mode: str) -> IO[str]:
    """Open a text file in `mode`, such as "a" or "a+". Raises `OSError` (ELOOP) where `path` is a symbolic link.

    A named pipe is not waited for.
    """

    def opener(name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)

    return open(path, mode, encoding="utf-8", opener=opener)


@contextlib.contextmanager
def open_regular(path: Path, links: bool = False) -> Iterator[io.FileIO]:
    """Open a file to read its bytes; a symbolic link is followed only with `links`.

    Raises `OSError` where it is a link (ELOOP) or no regular file (EINVAL).
    """
    follow = 0 if links else os.O_NOFOLLOW

    def opener(name: str, flags: int) -> int:
        return os.open(name, flags | follow | os.O_NONBLOCK)  # a named pipe would wait for its writer

    with open(path, "rb", buffering=0, opener=opener) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "no regular file", str(path))
        yield file


def read_regular(path: Path) -> bytes:
    """The content of a regular file. Raises `OSError` as `open_regular` does."""
    with open_regular(path) as file:
        return file.read()


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a TOML file that a person names, which may be a link.

    Raises `OSError` where it cannot be read, is no regular file (EINVAL) or larger than `LARGEST_TOML` (EFBIG), and
    `ValueError` where it is not TOML.
    """
    with open_regular(path, links=True) as file:
        content = file.read(LARGEST_TOML + 1)
    if len(content) > LARGEST_TOML:
        raise OSError(errno.EFBIG, f"larger than {LARGEST_TOML >> 20} MiB", str(path))
    try:
        return tomllib.loads(content.decode("utf-8"))
    except RecursionError:
        raise ValueError("its values are nested too deeply") from None


def checksum(path: Path, read: Callable[[int], None] = lambda count: None) -> tuple[int, str]:
    """The size in bytes and the XXH3 of 64 bits, in hexadecimal, of a regular file. Raises `OSError`.

    `read` gets the numbers of bytes as they are read.
    """
    size, digest = 0, xxhash.xxh3_64()
    buffer = memoryview(bytearray(BLOCK))
    with open_regular(path) as file:
        while count := file.readinto(buffer):
            size += count
            digest.update(buffer[:count])
            read(count)
    return size, digest.hexdigest()
