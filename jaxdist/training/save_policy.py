"""When a run is saved and what is told of it: the facts of a checkpoint, the best so far, and how a run ended."""

from __future__ import annotations

import errno
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import jax

from jaxdist.cluster.consensus import agreed, from_leader, leader
from jaxdist.mesh import describe
from jaxdist.training.checkpoint.finite_state import first_not_finite
from jaxdist.training.checkpoint.manager import Checkpoints, Found
from jaxdist.training.checkpoint.step_dir import StepDir
from jaxdist.training.forward.step import TrainState
from jaxdist.training.meter import Diverged
from jaxdist.training.plots import plot_loss
from jaxdist.training.run import Run
from jaxdist.training.run_dir import RunFolder, checkpoint_of
from jaxdist.training.run_lock import LockLost, RunLock

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
"""Errors of a disk that takes no more."""


@contextmanager
def locked(folder: RunFolder, limit: float, say: Callable[[str], None]) -> Iterator[Callable[[], None]]:
    """The folder of a run for this run alone, with its id: `RunFolder.locked` by the first process, for all.

    `say` gets what is to be noted of the lock.
    Gives a function to call before each save, in all processes: it raises `LockLost`, in all of them alike, where
    another run has taken the folder.
    """
    locks: list[RunLock] = []

    def take() -> int:
        locks.append(stack.enter_context(folder.locked(limit)))
        folder.identify()
        for note in locks[0].notes:
            say(f"note        {note}")
        return 0

    def check() -> None:
        lost = locks[0].lost() if leader() else None
        if from_leader(int(lost is not None)):
            raise LockLost(lost or "another run has taken the run folder")

    with ExitStack() as stack:
        agreed(take)
        yield check


class SavePolicy:
    """The checkpoints of a run while it trains."""

    def __init__(self, run: Run, checkpoints: Checkpoints):
        self.run, self.checkpoints, self.config = run, checkpoints, run.config.checkpoint
        self.baseline = {"nats": run.task.baseline(), "name": run.task.baseline_name, "unit": run.task.unit}
        self.best = math.inf
        """The lowest validation loss so far."""
        self.last = time.monotonic()

    def begin(self, say: Callable[[str], None]) -> TrainState:
        """The state before the first step: with weights of its own, or with those of `init_from`, which is told."""
        if not self.run.config.init_from:
            return self.run.init()
        folder, which = checkpoint_of(self.run.config.init_from)
        with Checkpoints(folder.path, keep=None) as checkpoints:
            found, abstract = checkpoints.find(which), self.run.abstract_logical()
            params, variables = checkpoints.restore_params(abstract.params, abstract.variables, found)
        for line in [*checkpoints.notes, f"weights     those of step {found.step} of {folder.path}"]:
            say(line)
        return self.run.begin(params, variables)

    def go_on(self, found: Found, say: Callable[[str], None]) -> TrainState:
        """The state of that step, as the run's mesh wants it; told is what changes the run's curve from here on."""
        facts = self.checkpoints.facts(found)
        before, late, best = facts.get("late", 0), self.run.step.late, facts["best"]
        if before != late:
            say(f"note        gradients of the first stage came {before} step(s) late so far, and come {late} late now")
        if best is not None and self.checkpoints.has_best():  # one that was set aside is to be found again
            self.best = best
        return self.run.step.resume(self.checkpoints.restore(self.run.abstract_logical(), found))

    def due(self, step: int) -> bool:
        """Whether to save after `step`; every process asks at every step, and all get the same answer."""
        every = self.config.every > 0 and step % self.config.every == 0
        return every or step == self.run.steps or self._end_of_epoch(step) or self._late(step)

    def save(self, step: int, state: TrainState) -> None:
        """Save `state` as `step`. Raises `Diverged`, in all processes alike, where it is not finite."""
        self.checkpoints.save(step, self._finite(step, state), self.facts(step))
        self.last = time.monotonic()

    def save_if_best(self, step: int, state: TrainState, loss: float) -> None:
        """Save `state` as the best where no validation loss before was as low. Raises `Diverged` as `save` does."""
        if loss < self.best:
            finite = self._finite(step, state)
            self.best = loss
            self.checkpoints.save_best(step, finite, self.facts(step))

    def _finite(self, step: int, state: TrainState) -> TrainState:
        """`state` as a checkpoint holds it.

        The steps themselves look at losses and gradients only: an update, or a moment of the optimizer, may overflow
        though these are finite.
        """
        logical = self.run.step.logical(state)
        if name := first_not_finite(logical):
            raise Diverged(f"{name} holds NaN or infinity after step {step}, which is not saved")
        return logical

    def facts(self, step: int) -> dict[str, object]:
        """What a checkpoint holds beside arrays: the position in the data is (seed, step)."""
        return {
            "step": step,
            "steps": self.run.steps,
            "seed": self.run.config.train.seed,
            "data": self.run.task.fingerprint,
            "best": None if math.isinf(self.best) else self.best,
            "baseline": self.baseline,
            "late": self.run.step.late,
            "mesh": describe(self.run.mesh.shape),
            "processes": jax.process_count(),
            "time": time.time(),
        }

    def _end_of_epoch(self, step: int) -> bool:
        """Whether the last row of an epoch is in this step's batch."""
        epochs = lambda steps: steps * self.run.config.train.global_batch_size // self.run.task.rows
        return self.config.epochs and epochs(step) > epochs(step - 1)

    def _late(self, step: int) -> bool:
        """Whether it is so many minutes since the last; by the clock of the first process, which is not asked often."""
        asked = jax.process_count() == 1 or step % self.run.config.log.every == 0
        if not self.config.minutes or not asked:
            return False
        return bool(from_leader(int(time.monotonic() - self.last >= 60 * self.config.minutes)))


def finished(run: Run, folder: RunFolder) -> bool:
    """Whether the run in `folder` has had its last step; tells so, and draws its picture if that is missing."""
    if run.config.resume != "auto":
        return False
    train = run.config.train
    asked = 0 if train.epochs else train.steps  # more than when it was saved, where a run is made longer
    step = from_leader((StepDir(folder.checkpoints).last_step(asked) or 0) if leader() else 0)
    if step and leader():
        if not folder.plot.exists():  # it was killed between its last checkpoint and its end
            plot_loss(folder.metrics, folder.plot, **StepDir(folder.checkpoints).facts(step)["baseline"])
        print(f"{folder.path} is finished at step {step}; to start anew, name another --run-dir", file=sys.stderr)
    return bool(step)


def checkpoint_bytes(run: Run) -> int:
    """Of a checkpoint, at most: Orbax compresses."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(run.abstract_logical()))


def no_room(error: OSError, folder: RunFolder) -> str:
    """A sentence for a disk that takes no more. Raises any other error again."""
    if error.errno not in NO_ROOM:
        raise error
    return f"{error.filename or folder.path} cannot be written: {os.strerror(error.errno).lower()}"
