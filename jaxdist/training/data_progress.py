"""What a run shows while its data are read, which may take from a second to hours."""

from __future__ import annotations

import time
from collections.abc import Callable

from jaxdist.output.units import hours
from jaxdist.training.console import Screen

SHORT = 2.0
"""Seconds for which nothing is shown: most data are read in less."""

EVERY = 15.0
"""Seconds between two lines where no terminal shows a bar."""

MIB = 1 << 20


class DataProgress:
    """Takes the reports of `data.progress`: a bar, or a line now and then, and a sign of life for each."""

    def __init__(self, alive: Callable[[], None], screen: Screen | None, before: Callable[[], None] | None = None):
        """`alive` is called at each report, and `before` once, before anything is shown.

        `screen` is None in a process that prints nothing.
        """
        self._alive = alive
        self._screen = screen
        self._before = before
        self._shown = False
        # The pass over the data that is under way: its name, when and at how many bytes it began, its last line.
        self._what = ""
        self._started_at = 0.0
        self._started_with = 0
        self._last_line_at = 0.0

    def __call__(self, what: str, done: int, total: int) -> None:
        """Report that `done` bytes of `total` are read."""
        # Every process shows the watchdog that it is alive; only the leader prints.
        self._alive()
        if self._screen is None:
            return
        now = time.monotonic()
        if what != self._what:
            self._screen.pause()
            self._begin(what, done, now)
            return
        if now - self._started_at < SHORT:
            return
        if not self._shown:
            self._shown = True
            if self._before:
                self._before()
        rate = (done - self._started_with) / (now - self._started_at)
        speed = f"{rate / MIB:,.1f} MiB/s"
        if self._screen.is_terminal:
            self._screen.move(f"{what}, MiB", done // MIB, total // MIB, speed)
        if now - self._last_line_at >= EVERY:
            self._last_line_at = now
            left = f"  {hours((total - done) / rate)} left" if rate > 0 else ""
            self._screen.line(f"{what}  {done / MIB:,.0f} of {total / MIB:,.0f} MiB  {speed}{left}")

    def _begin(self, what: str, done: int, now: float) -> None:
        """Begin to measure another pass over the data."""
        self._what = what
        self._started_at = now
        self._started_with = done
        # The first line comes as soon as anything is shown.
        self._last_line_at = now - EVERY + SHORT
