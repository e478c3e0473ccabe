"""What a run shows while its data are read, which may take from a second to hours."""

from __future__ import annotations

import time
from collections.abc import Callable

from jaxdist.training.console import Screen
from jaxdist.training.metrics import duration

SHORT = 2.0
"""Seconds for which nothing is shown: most data are read in less."""

EVERY = 15.0
"""Seconds between two lines where no terminal shows a bar."""

MIB = 1 << 20


class DataProgress:
    """Takes the reports of `data.progress`: a bar, or a line now and then, and a sign of life for each."""

    def __init__(self, alive: Callable[[], None], screen: Screen | None, before: Callable[[], None] = lambda: None):
        """`screen` is None in a process that tells nothing. `before` is called once, before anything is shown."""
        self._alive, self._screen, self._before = alive, screen, before
        self._what, self._since, self._from, self._last = "", 0.0, 0, 0.0
        self._shown = False

    def __call__(self, what: str, done: int, total: int) -> None:
        """So many bytes of `total` are done."""
        self._alive()
        if self._screen is None:
            return
        now = time.monotonic()
        if what != self._what:
            self._screen.pause()
            self._what, self._since, self._from, self._last = what, now, done, now - EVERY + SHORT
            return
        if now - self._since < SHORT:
            return
        if not self._shown:
            self._shown = True
            self._before()
        rate = (done - self._from) / (now - self._since)
        speed = f"{rate / MIB:,.1f} MiB/s"
        if self._screen.is_terminal:
            self._screen.move(f"{what}, MiB", done // MIB, total // MIB, speed)
        if now - self._last >= EVERY:
            self._last = now
            left = f"  {duration((total - done) / rate)} left" if rate > 0 else ""
            self._screen.line(f"{what}  {done / MIB:,.0f} of {total / MIB:,.0f} MiB  {speed}{left}")
