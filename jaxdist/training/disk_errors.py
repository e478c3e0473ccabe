"""What a disk says that takes no more of a run, as one sentence."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from jaxdist.config import Failed
from jaxdist.training.checkpoint.orbax_writer import SaveFailed
from jaxdist.training.run_dir import RunFolder

OF_A_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG, errno.EIO, errno.ESTALE)
"""Errors of a disk that is full, beyond its quota, read-only, broken or gone."""


def disk_error(error: OSError, folder: RunFolder) -> str:
    """Return a clause for an error of the disk. Raises any other error again."""
    if error.errno not in OF_A_DISK:
        raise error
    return f"{error.filename or folder.path} cannot be written: {os.strerror(error.errno).lower()}"


@contextmanager
def one_sentence(folder: RunFolder, goes_on: Callable[[], str]) -> Iterator[None]:
    """Raise `Failed` for an error of the disk in the block, with `goes_on()`: where the same command continues."""
    try:
        yield
    except SaveFailed as error:
        raise Failed(f"stopped: {error}; {goes_on()}") from error
    except OSError as error:
        raise Failed(f"stopped: {disk_error(error, folder)}; {goes_on()}") from error
