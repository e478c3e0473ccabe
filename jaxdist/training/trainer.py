"""The training loop: batch, step, metrics of the step before, validation, checkpoint, stop.

It knows no model and no configuration: `training.train_run` makes its parts for `jaxdist.train`, `api.fitting` for
`jaxdist.fit`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import jax

from jaxdist.cluster.consensus import from_leader, leader
from jaxdist.cluster.heartbeat import COMPILING, SAVING, STEPPING, VALIDATING, WAITING
from jaxdist.cluster.job import Job
from jaxdist.data.batches import Prefetch
from jaxdist.output.patience import saying_that_it_takes
from jaxdist.process.exit_codes import DONE, STOPPED
from jaxdist.training import history
from jaxdist.training.ending import CANNOT_RESUME, where_it_resumes
from jaxdist.training.forward.asked import Batch
from jaxdist.training.forward.step import TrainState
from jaxdist.training.goodput import Goodput, Start, earlier_starts, goodput
from jaxdist.training.intervals import due, round_until, rounds
from jaxdist.training.meter import Meter
from jaxdist.training.metrics import Log
from jaxdist.training.plots import plot_loss
from jaxdist.training.profile import Profile
from jaxdist.training.run_dir import RunFolder
from jaxdist.training.save_policy import SavePolicy

LEAST_GOODPUT = 600.0
"""Seconds of a run whose goodput is said at its end: a shorter one has mainly started and compiled."""

Figures = Mapping[str, float]
"""The figures of a validation, by their names in metrics.jsonl."""

Callback = Callable[[range, TrainState, Figures], bool]
"""Gets (steps of the round that has ended, the state after it, the figures of a validation after it, if there was one).

All processes call it after each round. The run ends there where it returns True, in all of them alike.
"""


class Runner(Protocol):
    """What calls the compiled programs of a step (`StepRunner`, `RoundRunner`)."""

    @property
    def program(self) -> jax.stages.Compiled:
        """Return the step, once it is compiled."""

    @property
    def unfinished(self) -> str:
        """Return what is lost, as the beginning of a sentence, if the run ends now."""

    def compile(self, state: TrainState) -> None:
        """Compile all that the steps from `state` on need."""

    def take(self, step: int, state: Any, batch: Batch) -> Any:
        """Give the batch of `step` to the program, and report the step that ends with it."""

    def drain(self, step: int, state: Any) -> TrainState:
        """Return the state with the updates of all steps up to `step`, after which nothing is in flight."""


@dataclass(frozen=True)
class Validation:
    """The loss on held-out data."""

    every: int
    """Steps between validations; 0: only at the end."""
    measure: Callable[[TrainState, Callable[[], bool]], Mapping[str, float] | None]
    """Returns `loss` and further figures of a state; None if the function that it is given, and asks now and then, says
    that it is enough."""


@dataclass
class Trainer:
    """The loop over steps, and what it takes."""

    first: int
    """The number of steps that are already taken."""
    steps: int
    """The number of steps of the whole run."""
    every: int
    """Steps of a round, within which the run neither stops nor saves."""
    start: Callable[[], TrainState]
    """Makes or restores the state."""
    batch_after: Callable[[int], Batch]
    """Returns the global batch of the step that follows that many steps; a thread calls it, in order."""
    prefetch: int
    """The number of batches that are made ahead."""
    runner: Runner
    meter: Meter
    log: Log
    profile: Profile
    validation: Validation | None
    save_policy: SavePolicy
    check_lock: Callable[[], None]
    """Raises `LockLost` where another run has taken the folder."""
    folder: RunFolder
    job: Job
    callbacks: Sequence[Callback] = ()
    can_resume: bool = True
    """Whether a run that is started again gets the batches that it would have got."""
    state: TrainState | None = None
    """The state after the last step, once the run has ended."""

    def train(self) -> int:
        """Take the steps of the run that are left. Returns the exit code."""
        state = self.start()
        if leader():
            self.meter.share_kept = lambda: self.goodput().share
        self.compile(state)
        self.meter.restart()
        if self.validation_overdue():
            self.validate(self.first, state)

        stop = self.job.stop
        stop.newest = self.where_it_resumes
        prefetch = Prefetch(self.batch_after, self.first, self.steps, self.prefetch, enough=self.stops_here)
        with self.profile, prefetch as batches:
            for steps in rounds(self.first, self.steps, self.every):
                for step in steps:
                    batch = self.next_batch(batches)
                    # All processes ask at the same places, so that they stop at the same step.
                    if step == steps[0] and stop.here():
                        return self.stop_early(step - 1, state)
                    state = self.step(step, state, batch)
                # Validation and checkpoints need the updates of all steps so far: nothing may be in flight.
                figures: Figures = {}
                if self.validation_due(steps):
                    state = self.runner.drain(step, state)
                    figures = self.validate(step, state)
                # What is in flight stays there: with a drain the run would learn something else.
                ends = [call(steps, state, figures) for call in self.callbacks]
                if any(ends):
                    state = self.end_here(step, state, figures)
                    break
                if self.save_policy.due(steps):
                    state = self.runner.drain(step, state)
                    self.save(step, state)
        self.finish(state)
        return DONE

    def compile(self, state: TrainState) -> None:
        """Compile the train step for the `state` with which it begins, and say how long that took.

        While it compiles the heartbeats say so: the watchdog has more patience then.
        """
        self.job.note(COMPILING)
        started = time.perf_counter()
        with saying_that_it_takes(self.log.say, "compiling   the train step"):
            self.runner.compile(state)
        self.log.say(f"compiled    in {time.perf_counter() - started:.1f} s")

    def next_batch(self, batches: Iterator[Batch]) -> Batch:
        """Wait for the next batch, after the metrics of a step that has already ended are reported."""
        self.meter.catch_up()
        self.job.note(WAITING)
        return self.meter.next(batches)

    def stops_here(self) -> bool:
        """Return whether the run stops before the next batch. A round that has begun is finished."""
        return not self.runner.unfinished and self.job.stop.due()

    def where_it_resumes(self) -> str:
        """Return what is lost, and where the run resumes, if it ends on the spot."""
        return self.runner.unfinished + where_it_resumes(self.folder, self.can_resume)

    def step(self, step: int, state: Any, batch: Batch) -> Any:
        """Take one step, from what the runner carries to what it carries on.

        Raises `SaveFailed` where a checkpoint in the background could not be written.
        """
        # What is usual is a whole round, whose last step has the outer step in it.
        self.job.note(STEPPING, step, begins=not self.runner.unfinished)
        self.profile.before(step, state)
        state = self.runner.take(step, state, batch)
        self.profile.after(step, state)
        self.save_policy.checkpoints.check()
        return state

    def stop_early(self, step: int, state: TrainState) -> int:
        """Save `step`, the last that was taken, and say so when it is on disk.

        Raises `Diverged` as `save` does: then the same command would not continue the run.
        """
        self.save(step, self.runner.drain(step, state))
        self.save_policy.checkpoints.wait()
        goes_on = "the same command continues" if self.can_resume else CANNOT_RESUME
        self.log.say(f"stopped by {self.job.stop.name}: step {step} is saved; {goes_on}")
        return STOPPED

    def validation_due(self, steps: range) -> bool:
        """Return whether to validate after the round of `steps`: at the interval that is asked for, and at the end."""
        if not self.validation:
            return False
        return steps[-1] == self.steps or due(steps, self.validation.every)

    def validation_overdue(self) -> bool:
        """Return whether the run was stopped in the validation of the step that it resumes from."""
        last_round = round_until(self.first, self.every)
        if not 0 < self.first < self.steps or not self.validation_due(last_round):
            return False
        missing = False
        # Only the leader reads the file, and all follow its answer.
        if leader():
            validated = {line["step"] for line in history.read(self.folder.metrics) if history.VALIDATED in line}
            missing = self.first not in validated
        return bool(from_leader(int(missing)))

    def validate(self, step: int, state: TrainState) -> Figures:
        """Report the loss on the held-out part; save the state if it is the best so far. Returns the figures.

        A stop ends it between two batches, and `validation_overdue` makes up for it; but not the last one of the run.
        Raises `Diverged` for a loss that is not finite.
        """
        assert self.validation is not None

        def enough() -> bool:
            self.job.note(VALIDATING)
            return step < self.steps and self.job.stop.here()

        with self.meter.paused():
            found = self.validation.measure(state, enough)
            if found is None:
                return {}
            figures = {f"validation_{name}": value for name, value in found.items()}
            self.log.metrics({"step": step, **figures})
            self.check_lock()
            self.save_policy.save_if_best(step, state, found["loss"])
            return figures

    def save(self, step: int, state: TrainState) -> None:
        """Save `state` as `step`, in the background. Raises `Diverged`, `LockLost` or `SaveFailed`."""
        # The metrics of this step are on disk before its checkpoint is.
        with self.meter.paused():
            self.job.note(SAVING)
            self.check_lock()
            self.save_policy.save(step, state)

    def end_here(self, step: int, state: Any, figures: Figures) -> TrainState:
        """Validate and save after `step`, as after the last step of a run; return the state with all updates.

        `figures` are those of a validation that has been made.
        """
        self.steps = step
        self.meter.end(step)
        self.save_policy.end(step)
        state = self.runner.drain(step, state)
        if self.validation and not figures:
            self.validate(step, state)
        self.save(step, state)
        self.log.say(f"ended       by a callback after step {step}")
        return state

    def finish(self, state: TrainState) -> None:
        """Keep the last state, compare the best validation loss with the baseline, and draw the curve."""
        self.state = state
        self.meter.flush()
        self.save_policy.checkpoints.wait()
        self.log.say(f"done        {self.save_policy.outcome()}")
        if leader():
            self.say_goodput()
            plot_loss(self.folder.metrics, self.folder.plot, self.save_policy.baseline)

    def goodput(self) -> Goodput:
        """Return how the time of the run divides so far, over all of its starts; the leader alone calls this."""
        watchdog = self.job.watchdog
        now = Start(watchdog.clock.read(), watchdog.step, time.time())
        return goodput([*self._earlier, now])

    @cached_property
    def _earlier(self) -> list[Start]:
        """The starts before this one, of which a file tells that nobody else changes meanwhile."""
        return earlier_starts(self.folder)

    def say_goodput(self) -> None:
        """Say how much of the run's time went into steps that it has kept, of a run that was not short."""
        found = self.goodput()
        if found.total >= LEAST_GOODPUT:
            self.log.say(f"goodput     {found}")


def comparing(every: int, saving: SavePolicy, meter: Meter) -> Callback:
    """Return what checks the state as before a save, each so many steps. It raises `Diverged`."""

    def compare(steps: range, state: TrainState, figures: Figures) -> bool:
        if due(steps, every):
            with meter.paused():
                saving.check(steps[-1], state)
        return False

    return compare
