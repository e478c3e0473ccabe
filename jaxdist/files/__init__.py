"""Write files atomically and never through a symbolic link; read regular files only; compute checksums. No jax here.

Another user may own what lies in a run folder: a link planted under a name that jaxdist writes must not lead it
elsewhere. A new file therefore gets a fresh name and is then renamed, which replaces a link instead of following it.
Likewise, a FIFO or a device in the place of a file must not make a reader wait forever.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import json
import os
import secrets
import stat
import tomllib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

import xxhash

BLOCK = 1 << 19
"""Bytes read at a time: few enough to still be in a cache when their checksum is computed."""

READERS = 4
"""Files that are read in parallel."""

Checksum = tuple[int, str]
"""Size in bytes, and XXH3 in hexadecimal."""

WRONG_CONTENT = (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError)
"""What reading JSON may raise for a file that is missing, damaged or not ours: no JSON, or JSON of another form."""

LARGEST_TOML = 1 << 20
"""Bytes of the largest TOML file that is read. A configuration has a few thousand."""


@contextlib.contextmanager
def replacing(path: Path, lasting: bool = False) -> Iterator[Path]:
    """Yield a temporary file beside `path` that replaces `path` at the end, or is removed after an error.

    The temporary file exists already, empty, with the permissions that the umask gives. With `lasting` its content is
    on disk before it has the name, also after a power failure. Raises `OSError`.
    """
    temporary = _beside(path)
    # O_EXCL refuses any name that exists, so no link can have been planted there.
    os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
    try:
        yield temporary
        if lasting:
            _sync(temporary)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _sync(path: Path) -> None:
    file = os.open(path, os.O_RDWR)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def _beside(path: Path) -> Path:
    """Return a fresh name in the same folder."""
    return path.with_name(f".{path.name[:50]}.{secrets.token_hex(8)}.tmp")


def write_whole(path: Path, content: str | bytes, lasting: bool = False) -> None:
    """Replace the file at `path` atomically by one with this content; text is UTF-8. Raises `OSError`.

    Whoever reads meanwhile finds the old content or the new, never a part of one. `lasting` is that of `replacing`.
    """
    if isinstance(content, str):
        content = content.encode("utf-8")
    with replacing(path, lasting) as temporary:
        temporary.write_bytes(content)


def sweep_temporaries(folder: Path) -> None:
    """Remove the temporary files that killed processes have left in a folder. Raises `OSError`."""
    for path in folder.glob(".*.tmp"):
        path.unlink(missing_ok=True)


def open_no_follow(path: Path, mode: str) -> IO[str]:
    """Open a text file in `mode`, such as "a" or "a+". Raises `OSError` (ELOOP) if `path` is a symbolic link.

    Opening a named pipe does not wait for its other end.
    """

    def opener(name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)

    return open(path, mode, encoding="utf-8", opener=opener)


@contextlib.contextmanager
def open_regular(path: Path, links: bool = False) -> Iterator[io.FileIO]:
    """Open a file for reading its bytes; follow a symbolic link only if `links` is set.

    Raises `OSError` if it is a link (ELOOP) or not a regular file (EINVAL).
    """
    follow = 0 if links else os.O_NOFOLLOW

    def opener(name: str, flags: int) -> int:
        # Without O_NONBLOCK, opening a named pipe would wait for its writer.
        return os.open(name, flags | follow | os.O_NONBLOCK)

    with open(path, "rb", buffering=0, opener=opener) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        yield file


def read_regular(path: Path) -> bytes:
    """Return the content of a regular file. Raises `OSError` as `open_regular` does."""
    with open_regular(path) as file:
        return file.read()


def read_toml(path: Path) -> dict[str, Any]:
    """Return the tables of a TOML file that a user names, which may be a link.

    Raises `OSError` if it cannot be read, is not a regular file (EINVAL) or is larger than `LARGEST_TOML` (EFBIG), and
    `ValueError` if it is not valid TOML.
    """
    with open_regular(path, links=True) as file:
        content = file.read(LARGEST_TOML + 1)
    if len(content) > LARGEST_TOML:
        raise OSError(errno.EFBIG, f"larger than {LARGEST_TOML >> 20} MiB", str(path))
    try:
        return tomllib.loads(content.decode("utf-8"))
    except RecursionError:
        raise ValueError("its values are nested too deeply") from None


def checksum(path: Path, on_read: Callable[[int], None] | None = None) -> Checksum:
    """Return the size in bytes and the 64-bit XXH3, in hexadecimal, of a regular file. Raises `OSError`.

    `on_read` is called with the number of bytes of each block as it is read.
    """
    size = 0
    digest = xxhash.xxh3_64()
    with open_regular(path) as file:
        for block in blocks(file):
            size += len(block)
            digest.update(block)
            if on_read is not None:
                on_read(len(block))
    return size, digest.hexdigest()


def digest(*parts: str | int | float | None) -> str:
    """Return a hexadecimal SHA-256 of these values."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def blocks(file: io.FileIO | io.BufferedReader) -> Iterator[memoryview]:
    """Yield the rest of a file in blocks of at most `BLOCK` bytes, each of which is overwritten by the next one."""
    buffer = memoryview(bytearray(BLOCK))
    count = file.readinto(buffer)
    while count:
        yield buffer[:count]
        count = file.readinto(buffer)


def checksums(paths: Sequence[Path]) -> list[Checksum]:
    """Return the `checksum` of each file, several of which are read at once. Raises `OSError`."""
    # xxhash and read release Python's lock.
    with ThreadPoolExecutor(READERS) as pool:
        return list(pool.map(checksum, paths))
