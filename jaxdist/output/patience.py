"""Say what takes long while it does, so that nobody takes a program that compiles for one that hangs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

FIRST = 20.0
"""Seconds after which the first line is said."""

EVERY = 60.0
"""Seconds between the lines that follow."""


@contextmanager
def saying_that_it_takes(
    say: Callable[[str], None], what: str, first: float = FIRST, every: float = EVERY
) -> Iterator[None]:
    """Call `say` with `what` and the time so far, from another thread, where the block takes longer than `first`."""
    over = threading.Event()
    started = time.monotonic()

    def speak() -> None:
        wait = first
        while not over.wait(wait):
            say(f"{what}, {time.monotonic() - started:.0f} s so far")
            wait = every

    thread = threading.Thread(target=speak, name="patience", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        # A line that has begun is finished before the next one of the block's own.
        thread.join()
