"""What can be known to go wrong with a folder before a run begins: not writable, too full, not shared by the hosts."""

from __future__ import annotations

import os
import secrets
import shutil
import time
from pathlib import Path

from jaxdist.cluster.consensus import agreed, from_all, leader
from jaxdist.config import RequestError

PATIENCE = 5.0
"""Seconds until a file that one host has written must be seen by the others."""


def check_folder(folder: Path, size: int) -> None:
    """Make `folder`, and see that `size` bytes can be written there and that every process sees the same folder.

    All processes call it. Raises `RequestError` in all of them, if in one.
    """
    number = agreed(lambda: sign(folder, size))
    seen = from_all(sees(sign_of(folder, number)))
    if leader():
        sign_of(folder, number).unlink(missing_ok=True)
    if not all(seen):
        raise RequestError(
            f"{folder} is not the same folder on every host: {seen.count(False)} of {len(seen)} processes do not see "
            f"what the first one wrote there; name a --run-dir on a file system that all hosts share"
        )


def sign(folder: Path, size: int) -> int:
    """Leave a file in `folder`, and return its number. Raises `RequestError` if that, or `size` bytes, cannot be."""
    number = secrets.randbelow(2**31)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder).free
        if free < size:
            raise RequestError(
                f"{folder} has {megabytes(free)} free, but a checkpoint of this run takes up to {megabytes(size)}; "
                f"free some, or name another --run-dir"
            )
        sign_of(folder, number).write_text("seen\n")
    except OSError as error:
        raise RequestError(
            f"{folder} cannot be written ({os.strerror(error.errno).lower()}); name another --run-dir"
        ) from error
    return number


def sign_of(folder: Path, number: int) -> Path:
    """The file that `sign` leaves."""
    return folder / f".seen-{number}"


def sees(path: Path) -> bool:
    """Whether a file that another host has written is here, or comes within `PATIENCE`."""
    deadline = time.monotonic() + PATIENCE
    while not path.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def megabytes(count: int) -> str:
    return f"{count / 1e6:,.1f} MB"
