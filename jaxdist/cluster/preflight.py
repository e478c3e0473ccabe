"""What can be known to go wrong with a folder before a run begins: not writable, too full, not shared by the hosts."""

from __future__ import annotations

import os
import secrets
import shutil
import time
from pathlib import Path

from jaxdist.cluster.agreement import agreed, from_all, leader
from jaxdist.config import RequestError

PATIENCE = 5.0
"""Seconds until a file that one host has written must be seen by the others."""


def check_folder(folder: Path, size: int) -> None:
    """Make `folder`, and see that `size` bytes can be written there and that every process sees the same folder.

    All processes call it. Raises `RequestError` in all of them, if in one.
    """
    number = agreed(lambda: _write(folder, size))
    seen = from_all(_seen(_file(folder, number)))
    if leader():
        _file(folder, number).unlink(missing_ok=True)
    if not all(seen):
        raise RequestError(
            f"{folder} is not the same folder on every host: {seen.count(False)} of {len(seen)} processes do not see "
            f"what the first one wrote there; name a --run-dir on a file system that all hosts share"
        )


def _write(folder: Path, size: int) -> int:
    """Leave a file in `folder`, and return its number. Raises `RequestError` if that, or `size` bytes, cannot be."""
    number = secrets.randbelow(2**31)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder).free
        if free < size:
            raise RequestError(
                f"{folder} has {_megabytes(free)} free, but a checkpoint of this run takes up to {_megabytes(size)}; "
                f"free some, or name another --run-dir"
            )
        _file(folder, number).write_text("seen\n")
    except OSError as error:
        raise RequestError(
            f"{folder} cannot be written ({os.strerror(error.errno).lower()}); name another --run-dir"
        ) from error
    return number


def _file(folder: Path, number: int) -> Path:
    return folder / f".seen-{number}"


def _seen(path: Path) -> bool:
    deadline = time.monotonic() + PATIENCE
    while not path.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def _megabytes(count: int) -> str:
    return f"{count / 1e6:,.1f} MB"
