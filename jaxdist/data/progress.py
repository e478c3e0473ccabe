"""How far the reading of data is: who reads reports it often, and who shows it decides how often."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class Progress(Protocol):
    """Called with what is being done, and how many bytes of how many are done; each call is a sign of life."""

    def __call__(self, what: str, done: int, total: int) -> None: ...


def unseen(what: str, done: int, total: int) -> None:
    """For readers whose progress nobody looks at."""


@dataclass
class Pass:
    """One pass over `total` bytes."""

    progress: Progress
    what: str
    total: int
    done: int = 0

    def read(self, count: int) -> None:
        """So many bytes more."""
        self.done += count
        self.progress(self.what, self.done, self.total)
