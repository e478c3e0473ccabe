"""The folder of a run taken for this run: its lock, its log and its checkpoints. Only the holder writes into it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

from jaxdist.cluster import heartbeat
from jaxdist.cluster.consensus import agreed, from_leader, leader
from jaxdist.cluster.heartbeat import STARTING
from jaxdist.cluster.job import Job
from jaxdist.config import Config
from jaxdist.training.checkpoint.manager import Checkpoints, Found
from jaxdist.training.engine import Engine
from jaxdist.training.goodput import keep_start
from jaxdist.training.run_dir import RunFolder
from jaxdist.training.run_lock import LockLost, RunLock


class Opened(NamedTuple):
    """What a run has of its folder."""

    checkpoints: Checkpoints
    found: Found | None
    """The step to resume from; None for the beginning."""
    check_lock: Callable[[], None]
    """Raises `LockLost` where another run has taken the folder."""

    @property
    def first(self) -> int:
        """The number of steps that are already taken."""
        return self.found.step if self.found else 0


@contextmanager
def opened(folder: RunFolder, config: Config, engine: Engine, job: Job, say: Callable[[str], None]) -> Iterator[Opened]:
    """Hold the lock of `folder`, write log and heartbeats there, and find the step from which the run resumes.

    Of `config` only the sections `checkpoint` and `fault`, and `resume`, are read. Call it under `jax.set_mesh`.
    """
    with ExitStack() as stack:
        check_lock = stack.enter_context(locked(folder, config.fault.heartbeat_seconds, say))
        keep = config.checkpoint.keep
        checkpoints = stack.enter_context(Checkpoints(folder.path, keep, config.checkpoint.keep_every))
        job.note(STARTING)
        job.log.open(folder.log, rotates=leader())
        job.watchdog.beat_in(folder.heartbeats)
        found = checkpoints.find_start(config.resume, expected=engine.abstract_logical)
        yield Opened(checkpoints, found, check_lock)


@contextmanager
def locked(folder: RunFolder, limit: float, say: Callable[[str], None]) -> Iterator[Callable[[], None]]:
    """Lock the folder of a run for this run, in the leader for all processes, and give the run an id.

    `say` prints notes about the lock. Yields a function to call before each save, in all processes: it raises
    `LockLost`, in all of them alike, where another run has taken the folder.
    """
    # The leader's lock; the other processes have none.
    locks: list[RunLock] = []

    def take() -> int:
        lock = stack.enter_context(folder.locked(limit))
        locks.append(lock)
        folder.identify()
        for note in lock.notes:
            say(f"note        {note}")
        _close_last_start(folder, say)
        return 0

    def check() -> None:
        lost = locks[0].lost() if leader() else None
        if from_leader(int(lost is not None)):
            raise LockLost(lost or "another run has taken the run folder")

    with ExitStack() as stack:
        agreed(take)
        yield check


def _close_last_start(folder: RunFolder, say: Callable[[str], None]) -> None:
    """Keep how the start before this one stood, and remove its heartbeats, while the other processes wait."""
    try:
        keep_start(folder)
    except OSError as error:
        say(f"note        {folder.starts} cannot be written ({error.strerror}): goodput lacks the last start")
    heartbeat.clear(folder.heartbeats)
