"""How the wall time of one start of a run divides into its phases. No jax here."""

from __future__ import annotations

import time
from dataclasses import replace

from jaxdist.cluster.heartbeat import SAVING, STARTING, STEPPING, Spent

MOST_SAVES = 8
"""Saves that are remembered: a run seldom goes back further, and a heartbeat is a small file."""


class PhaseClock:
    """Adds up the time of each phase. `note` is called at each change."""

    def __init__(self, began: float | None = None) -> None:
        """`began` is when the first phase began, in seconds since 1970, if not now."""
        now = time.time()
        self.spent = Spent(now if began is None else began)
        """The phases that are over."""
        self._phase = STARTING
        self._since = time.monotonic() - (now - self.spent.began)

    def note(self, phase: str, step: int) -> None:
        """Note that `phase` begins, in `step`; before a save, that is the last step that was taken."""
        now = time.monotonic()
        self._add(now - self._since)
        self._since = now
        self._phase = phase
        if phase == STEPPING and self.spent.first is None:
            self.spent = replace(self.spent, first=step - 1)
        if phase == SAVING and self.spent.first is not None:
            saves = {**self.spent.saves, step: self.spent.seconds.get(STEPPING, 0.0)}
            self.spent = replace(self.spent, saves=dict(sorted(saves.items())[-MOST_SAVES:]))

    def read(self) -> Spent:
        """Return the times so far, those of the present phase included."""
        so_far = self.spent
        seconds = dict(so_far.seconds)
        seconds[self._phase] = seconds.get(self._phase, 0.0) + time.monotonic() - self._since
        return replace(so_far, seconds={name: round(value, 3) for name, value in seconds.items()})

    def _add(self, seconds: float) -> None:
        # A new dict each time: the thread of the heartbeats may read the old one.
        so_far = self.spent.seconds
        self.spent = replace(self.spent, seconds={**so_far, self._phase: so_far.get(self._phase, 0.0) + seconds})
