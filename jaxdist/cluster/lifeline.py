"""The lifeline: processes that `launch local` started end when their launcher is gone.

Without it they would not be stopped or started again. The launcher holds one end of a pipe to which no process writes,
and its processes read from the other end: they see the end of the file when the launcher has ended, in whatever way.
"""

from __future__ import annotations

import os
import re
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

VARIABLE = "JAXDIST_LAUNCHER_PIPE"
"""Environment variable with the number of the file descriptor from which a process reads."""


@contextmanager
def opened() -> Iterator[int]:
    """Yield the file descriptor from which processes read; it reaches its end with the block, or with this process."""
    # Neither end is inherited, except by the processes that `subprocess` passes it on to.
    reading, writing = os.pipe()
    try:
        yield reading
    finally:
        os.close(reading)
        os.close(writing)


def watch(gone: Callable[[], None]) -> None:
    """Call `gone`, in a thread, when the launcher of this process has ended; without a launcher do nothing."""
    # Removed, so that the processes that this one starts do not look for the file.
    number = os.environ.pop(VARIABLE, "")
    if not re.fullmatch("[0-9]{1,9}", number):
        return
    with suppress(OSError):  # no such file
        if stat.S_ISFIFO(os.fstat(int(number)).st_mode):
            threading.Thread(target=_wait, args=(int(number), gone), name="jaxdist-launcher", daemon=True).start()


def _wait(pipe: int, gone: Callable[[], None]) -> None:
    while os.read(pipe, 1):
        pass
    gone()
