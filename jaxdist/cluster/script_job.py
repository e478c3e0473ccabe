"""A run within a user's own script: a job whose processes have met by `jaxdist.join` already."""

from __future__ import annotations

from contextlib import ExitStack

from jaxdist.cluster.job import Job
from jaxdist.cluster.script import Place
from jaxdist.config import Config


class ScriptJob(Job):
    """What a run needs of its process, where a script has joined the others: the log, the watchdog, and signals.

    Faults of other processes, and the end of the launcher, are the script's affair from `join` on.
    """

    def __init__(self, place: Place, config: Config):
        super().__init__(place.env, config)
        self._place = place

    def _take_part(self, stack: ExitStack) -> None:
        stack.enter_context(self.failing())
        self.stop = stack.enter_context(self._place.stopping(self.watchdog.where))
