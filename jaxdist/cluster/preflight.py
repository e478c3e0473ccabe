"""Checks of a folder before a run begins: whether it is writable, has room, and is shared by all hosts."""

from __future__ import annotations

import secrets
import shutil
import time
from pathlib import Path

from jaxdist.cluster.consensus import agreed, from_all, leader
from jaxdist.config import RequestError
from jaxdist.files.reasons import reason

PATIENCE = 5.0
"""Seconds within which the other hosts must see a file that one host has written."""


def check_folder(folder: Path, size: int) -> None:
    """Make `folder`, and check that it has room for `size` bytes and that every process sees the same folder.

    All processes call it. Raises `RequestError` in all of them if the check fails in one.
    """
    number = agreed(lambda: write_marker(folder, size))
    seen = from_all(is_visible(marker_path(folder, number)))
    if leader():
        marker_path(folder, number).unlink(missing_ok=True)
    if not all(seen):
        raise RequestError(
            f"{folder} is not the same folder on every host: {seen.count(False)} of {len(seen)} processes do not see "
            f"what the first one wrote there; name a run folder on a file system that all hosts share"
        )


def write_marker(folder: Path, size: int) -> int:
    """Write a marker file to `folder`, and return its number.

    Raises `RequestError` if it cannot be written, or if fewer than `size` bytes are free.
    """
    number = secrets.randbelow(2**31)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder).free
        if free < size:
            raise RequestError(
                f"{folder} has {megabytes(free)} free, but a checkpoint of this run takes up to {megabytes(size)}; "
                f"free some, or name another run folder"
            )
        marker_path(folder, number).write_text("seen\n")
    except OSError as error:
        raise RequestError(f"{folder} cannot be written ({reason(error)}); name another run folder") from error
    return number


def marker_path(folder: Path, number: int) -> Path:
    """Return the path of the file that `write_marker` leaves."""
    return folder / f".seen-{number}"


def is_visible(path: Path) -> bool:
    """Return whether a file that another host has written exists here, or appears within `PATIENCE`."""
    deadline = time.monotonic() + PATIENCE
    while not path.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def megabytes(count: int) -> str:
    """Format a number of bytes in MB."""
    return f"{count / 1e6:,.1f} MB"
