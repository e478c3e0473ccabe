"""A process that `launch local` has started ends when its launcher is gone: nobody would stop it, or start it again.

The launcher holds the one end of a pipe into which nobody writes, and its processes read from the other: they come to
its end when the launcher has ended, in whatever way.
"""

from __future__ import annotations

import os
import re
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

VARIABLE = "JAXDIST_LAUNCHER_PIPE"
"""Of the environment: the number of the file from which a process reads."""


@contextmanager
def opened() -> Iterator[int]:
    """The file from which processes read; it ends with the block, or with this process."""
    reading, writing = os.pipe()  # not inherited, but for what `subprocess` is told to pass on
    try:
        yield reading
    finally:
        os.close(reading)
        os.close(writing)


def watch(gone: Callable[[], None]) -> None:
    """Call `gone`, in a thread, when the launcher of this process has ended. Without a launcher do nothing."""
    number = os.environ.pop(VARIABLE, "")  # the processes that this one starts are not given the file
    if not re.fullmatch("[0-9]{1,9}", number):
        return
    with suppress(OSError):  # no such file
        if stat.S_ISFIFO(os.fstat(int(number)).st_mode):
            threading.Thread(target=_wait, args=(int(number), gone), name="jaxdist-launcher", daemon=True).start()


def _wait(pipe: int, gone: Callable[[], None]) -> None:
    while os.read(pipe, 1):
        pass
    gone()
