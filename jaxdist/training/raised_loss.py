"""A loss that has risen and does not come back: when a run ends for it (`train.max_raised`). No jax here.

    raised(x): x > median + |median| / 2   of the last 128 losses that were not raised

That is 1.5 times a median above 0. A loss that is raised never enters the window, so that the run cannot get used to
it. The window is a fact of each checkpoint: a run that is resumed, or goes back, ends where it would have ended.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping
from typing import Any

from jaxdist.config.spikes import FEWEST, WINDOW

ABOVE = 0.5
"""The part of the median by which a raised loss is above it."""

FACT = "raised_loss"
"""The fact of a checkpoint with the window."""


class RaisedLoss:
    """Counts the steps in a row whose loss is raised. `most` of them end the run; with 0 it does nothing."""

    def __init__(self, most: int, facts: Mapping[str, Any] | None = None):
        """Go on from the `facts` of a checkpoint, where they have a window."""
        self.most = most
        saved = (facts or {}).get(FACT, {}) if most else {}
        self._usual = deque[float](saved.get("usual", ()), maxlen=WINDOW)
        self._since: int | None = saved.get("since")
        """The first of the steps in a row that are raised; None where the last one is not."""

    @property
    def limit(self) -> float:
        """The largest loss that is not raised; infinity while too few are known."""
        if len(self._usual) < FEWEST:
            return math.inf
        median = statistics.median(self._usual)
        return median + ABOVE * abs(median)

    def too_long(self, steps: range, loss: float) -> range | None:
        """Note the loss after `steps`. Return the steps in a row that are raised, if they are too many to go on."""
        if not self.most:
            return None
        if loss <= self.limit:
            self._since = None
            if math.isfinite(loss):
                self._usual.append(loss)
            return None
        if len(self._usual) < FEWEST:
            # Not a number, before anything is usual: `train.max_skipped` counts these steps.
            return None
        if self._since is None:
            self._since = steps[0]
        raised = range(self._since, steps[-1] + 1)
        return raised if len(raised) >= self.most else None

    def facts(self) -> dict[str, Any]:
        """Return what a checkpoint holds of it."""
        if not self.most:
            return {}
        return {FACT: {"usual": list(self._usual), "since": self._since}}
