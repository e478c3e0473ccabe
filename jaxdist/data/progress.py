"""Report the progress of reading data. Readers report often; whoever displays it decides how often to show it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class Progress(Protocol):
    """A callback that receives progress. Each call is also a sign of life for the heartbeat."""

    def __call__(self, what: str, done: int, total: int) -> None:
        """Report that `done` of `total` bytes of the activity `what` are done."""


def unseen(what: str, done: int, total: int) -> None:
    """Ignore the progress."""


@dataclass
class Pass:
    """One pass over `total` bytes, whose progress is reported."""

    progress: Progress
    what: str
    total: int
    done: int = 0

    def read(self, count: int) -> None:
        """Report that `count` more bytes have been read."""
        self.done += count
        self.progress(self.what, self.done, self.total)
