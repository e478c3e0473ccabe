"""When a run is saved: the facts of a checkpoint, and the best step so far."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import jax

from jaxdist.cluster.consensus import from_leader
from jaxdist.config import CheckpointConfig
from jaxdist.mesh import describe
from jaxdist.training.checkpoint.finite_state import first_not_finite
from jaxdist.training.checkpoint.manager import Checkpoints, Found
from jaxdist.training.engine import Engine
from jaxdist.training.forward.step import TrainState
from jaxdist.training.intervals import due
from jaxdist.training.meter import Diverged
from jaxdist.training.plots import Baseline

ENDED = "ended"
"""The fact of a checkpoint after which a run has ended, though more steps were requested."""


class SavePolicy:
    """Decides when the checkpoints of a run are saved, and what is in them."""

    def __init__(
        self,
        engine: Engine,
        checkpoints: Checkpoints,
        config: CheckpointConfig,
        steps: int,
        facts: Callable[[int], dict[str, Any]],
        baseline: Baseline | None = None,
        log_every: int = 1,
        ends_epoch: Callable[[int], bool] = lambda step: False,
        check: Callable[[int, TrainState], None] | None = None,
    ):
        """Take the number of steps of the run, and of those between lines of its log.

        `facts(step)` are what its checkpoints hold beside what those of every run do; `ends_epoch(step)` says whether
        the last row of an epoch is in that step's batch. `check(step, state)` raises `Diverged` for a state that must
        not be saved; None: every state may be.
        """
        self.engine = engine
        self.checkpoints = checkpoints
        self.config = config
        self.steps = steps
        self.baseline = baseline
        self.best = math.inf
        """The lowest validation loss so far."""
        self.last = time.monotonic()
        """When the last checkpoint was saved."""
        self._ended = False
        self.check = check or (lambda step, state: None)
        self._facts = facts
        self._log_every = log_every
        self._ends_epoch = ends_epoch

    def restore(self, found: Found) -> TrainState:
        """Return the state of that step as it was saved, and remember the best loss up to there."""
        best = self.checkpoints.facts(found)["best"]
        # Without the checkpoint of that loss, which was set aside, the best one is to be found again.
        if best is not None and self.checkpoints.has_best():
            self.best = best
        return self.checkpoints.restore(self.engine.abstract_logical(), found)

    def due(self, steps: range) -> bool:
        """Return whether to save after the round of `steps`; every process asks, and all get the same answer.

        The reasons are `checkpoint.every`, the last step, the end of an epoch, and the time since the last save.
        """
        if steps[-1] == self.steps or due(steps, self.config.every):
            return True
        return (self.config.epochs and any(map(self._ends_epoch, steps))) or self._overdue(steps)

    def end(self, step: int) -> None:
        """Let the run have no steps after `step`."""
        self.steps = step
        self._ended = True

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
        """Return `state` as a checkpoint holds it, checked to be finite, and otherwise as the run asks.

        The steps themselves check only losses and gradients: an update, or a moment of the optimizer, may overflow
        though these are finite.
        """
        self.check(step, state)
        logical = self.engine.step.logical(state)
        name = first_not_finite(logical)
        if name:
            raise Diverged(f"{name} holds NaN or infinity after step {step}, which is not saved")
        return logical

    def facts(self, step: int) -> dict[str, Any]:
        """Return what a checkpoint holds beside arrays: the position in the data is (seed, step)."""
        return {
            "step": step,
            "steps": self.steps,
            "best": None if math.isinf(self.best) else self.best,
            "baseline": self.baseline,
            "mesh": describe(self.engine.mesh.shape),
            "processes": jax.process_count(),
            **self._facts(step),
            **({ENDED: True} if self._ended else {}),
            "time": time.time(),
        }

    def outcome(self) -> str:
        """Return how the run has ended, in a few words."""
        if math.isinf(self.best):
            return f"step {self.steps}"
        best = f"best validation loss {self.best:.4f}"
        if not self.baseline:
            return best
        return (
            f"{best} nats per {self.baseline['unit']}; {self.baseline['name']} of the held-out part "
            f"{self.baseline['nats']:.4f}"
        )

    def _overdue(self, steps: range) -> bool:
        """Return whether `checkpoint.minutes` have passed since the last save, by the leader's clock."""
        if not self.config.minutes:
            return False
        if jax.process_count() > 1 and all(step % self._log_every for step in steps):
            # Asking the leader costs all processes a wait.
            return False
        seconds = time.monotonic() - self.last
        return bool(from_leader(int(seconds >= 60 * self.config.minutes)))
