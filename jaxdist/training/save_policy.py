"""When a run is saved: the facts of a checkpoint, the best step so far, and how a run ended."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from typing import TypedDict

import jax

from jaxdist.cluster.consensus import from_leader, leader
from jaxdist.mesh import REPLICA, describe
from jaxdist.training.checkpoint.finite_state import first_not_finite
from jaxdist.training.checkpoint.manager import Checkpoints, Found
from jaxdist.training.checkpoint.step_dir import StepDir
from jaxdist.training.forward.step import TrainState
from jaxdist.training.meter import Diverged
from jaxdist.training.plots import plot_loss
from jaxdist.training.run import Run
from jaxdist.training.run_dir import RunFolder
from jaxdist.weights.base import Base, NoBase
from jaxdist.weights.source import source_of


class Baseline(TypedDict):
    """The loss to compare a run with, such as the unigram entropy."""

    nats: float
    name: str
    unit: str


class SavePolicy:
    """Decides when the checkpoints of a run are saved, and what is in them."""

    def __init__(self, run: Run, checkpoints: Checkpoints, base: Base | NoBase):
        """Take the checkpoints of `run`, and what stands beside the parameters in them."""
        self.run = run
        self.checkpoints = checkpoints
        self.base = base
        self.config = run.config.checkpoint
        self.baseline: Baseline = {"nats": run.task.baseline(), "name": run.task.baseline_name, "unit": run.task.unit}
        self.best = math.inf
        """The lowest validation loss so far."""
        self.last = time.monotonic()
        """When the last checkpoint was saved."""

    def begin(self, say: Callable[[str], None]) -> TrainState:
        """Return the state before the first step, with new weights, or with the weights of `init_from`."""
        source = source_of(self.run.config.init_from)
        for note in source.notes():
            say(f"note        {note}")
        return self.base.begin(self.run, source, say)

    def go_on(self, found: Found, say: Callable[[str], None]) -> TrainState:
        """Return the state of that step, laid out for the run's mesh; `say` prints what changes the loss curve."""
        facts = self.checkpoints.facts(found)
        self._say_what_is_late(facts.get("late", 0), say)
        self._say_what_is_averaged(self.checkpoints.replicas_of(found), say)
        self._say_what_is_rounded(self.checkpoints.rounded_by(found), say)
        best = facts["best"]
        # Without the checkpoint of that loss, which was set aside, the best one is to be found again.
        if best is not None and self.checkpoints.has_best():
            self.best = best
        state = self.checkpoints.restore(self.run.engine.abstract_logical(), found)
        return self.run.step.resume(self.base.resume(self.run, state, say))

    def _say_what_is_late(self, before: int, say: Callable[[str], None]) -> None:
        """Say by how many steps gradients are late from now on, where it is not `before`. Nothing is in flight."""
        now = self.run.step.late
        if before == now:
            return
        replicas = self.run.split.size(REPLICA)
        say(f"note        {self.run.split.crossing_traits.delay_changed(before, now, replicas)}")

    def _say_what_is_averaged(self, before: int, say: Callable[[str], None]) -> None:
        """Say what becomes of the moments of local steps that `before` replicas have saved (0: there are none)."""
        now = self.run.mesh.shape[REPLICA]
        if before not in (0, now):
            say(
                f"note        {before} replicas have saved moments of their own, of which each of {now} gets the mean: "
                f"the loss is close, not equal"
            )

    def _say_what_is_rounded(self, before: int, say: Callable[[str], None]) -> None:
        """Say what becomes of the residual of compression that `before` replicas have saved (0: there are none)."""
        now = self.run.mesh.shape[REPLICA]
        if before in (0, now):
            return
        if now == 1:
            first = self.run.split.crossing_traits.first
            say(
                f"note        what gradient compression between {before} replicas has rounded off is added to the "
                f"first {first}; without replicas nothing is compressed, and no errors are held from then on"
            )
        else:
            say(
                f"note        what gradient compression between {before} replicas has rounded off is dealt out evenly "
                f"to {now}: its sum is the same, and the loss is close, not equal"
            )

    def due(self, steps: range) -> bool:
        """Return whether to save after the round of `steps`; every process asks, and all get the same answer.

        The reasons are `checkpoint.every`, the last step, the end of an epoch, and the time since the last save.
        """
        every = self.config.every
        if steps[-1] == self.run.steps or (every > 0 and any(step % every == 0 for step in steps)):
            return True
        return any(map(self._end_of_epoch, steps)) or self._overdue(steps)

    def save(self, step: int, state: TrainState) -> None:
        """Save `state` as `step`. Raises `Diverged`, in all processes alike, where it is not finite."""
        self.checkpoints.save(step, self._finite(step, state), self.facts(step))
        self.last = time.monotonic()

    def save_if_best(self, step: int, state: TrainState, loss: float) -> None:
        """Save `state` as the best if no validation loss before was as low.

        Raises `Diverged` as `save` does, and for a loss that is not finite.
        """
        if not math.isfinite(loss):
            # Where the state is not finite either, the sentence names a parameter.
            self._finite(step, state)
            raise Diverged(f"the validation loss after step {step} is {loss}")
        if loss < self.best:
            finite = self._finite(step, state)
            self.best = loss
            self.checkpoints.save_best(step, finite, self.facts(step))

    def _finite(self, step: int, state: TrainState) -> TrainState:
        """Return `state` as a checkpoint holds it, checked to be finite.

        The steps themselves check only losses and gradients: an update, or a moment of the optimizer, may overflow
        though these are finite.
        """
        logical = self.run.step.logical(state)
        name = first_not_finite(logical)
        if name:
            raise Diverged(f"{name} holds NaN or infinity after step {step}, which is not saved")
        return logical

    def facts(self, step: int) -> dict[str, object]:
        """Return what a checkpoint holds beside arrays: the position in the data is (seed, step)."""
        return {
            "step": step,
            "steps": self.run.steps,
            "seed": self.run.config.train.seed,
            "data": self.run.task.fingerprint,
            **self.run.task.facts(),
            "best": None if math.isinf(self.best) else self.best,
            "baseline": self.baseline,
            "late": self.run.step.late,
            "mesh": describe(self.run.mesh.shape),
            "processes": jax.process_count(),
            **self.base.facts(),
            "time": time.time(),
        }

    def _end_of_epoch(self, step: int) -> bool:
        """Return whether the last row of an epoch is in this step's batch."""
        if not self.config.epochs:
            return False
        rows = self.run.config.train.global_batch_size
        rows_of_epoch = self.run.task.rows
        return step * rows // rows_of_epoch > (step - 1) * rows // rows_of_epoch

    def _overdue(self, steps: range) -> bool:
        """Return whether `checkpoint.minutes` have passed since the last save, by the leader's clock."""
        if not self.config.minutes:
            return False
        every = self.run.config.log.every
        if jax.process_count() > 1 and all(step % every for step in steps):
            # Asking the leader costs all processes a wait.
            return False
        seconds = time.monotonic() - self.last
        return bool(from_leader(int(seconds >= 60 * self.config.minutes)))


def finished(run: Run, folder: RunFolder) -> bool:
    """Return whether the run in `folder` has had its last step; if so, say it, and draw its curve if missing."""
    if run.config.resume != "auto":
        return False
    train = run.config.train
    # A longer run may be requested than the one that was saved.
    requested = 0 if train.epochs else train.steps
    checkpoints = StepDir(folder.checkpoints)
    last_step = checkpoints.last_step(requested) if leader() else None
    step = from_leader(last_step or 0)
    if step and leader():
        # The run was killed between its last checkpoint and its end.
        if not folder.plot.exists():
            plot_loss(folder.metrics, folder.plot, **checkpoints.facts(step)["baseline"])
        print(f"{folder.path} is finished at step {step}; to start anew, name another --run-dir", file=sys.stderr)
    return bool(step)
