"""The training loop: batch, step, metrics of the step before, validation, checkpoint, stop."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial

from jaxdist.cluster.consensus import check_alike, from_leader, leader
from jaxdist.cluster.heartbeat import (
    COMPILING,
    SAMPLING,
    SAVING,
    STEPPING,
    VALIDATING,
    WAITING,
)
from jaxdist.cluster.job import Job
from jaxdist.cluster.runtime import check_computes
from jaxdist.config import NotFinite
from jaxdist.data.batches import Prefetch
from jaxdist.process.exit_codes import DONE, FAILED, STOPPED
from jaxdist.request import to_toml
from jaxdist.sharding import Tree
from jaxdist.training import history
from jaxdist.training.checkpoint.orbax_writer import SaveFailed
from jaxdist.training.checkpoint.step_dir import StepDir
from jaxdist.training.console import Screen
from jaxdist.training.copies import check_named
from jaxdist.training.disk_errors import disk_error, one_sentence
from jaxdist.training.forward.local_step import LocalStep
from jaxdist.training.forward.step import Batch, Step, TrainState
from jaxdist.training.meter import Diverged, Meter
from jaxdist.training.metrics import Log, SilentLog
from jaxdist.training.plots import plot_loss
from jaxdist.training.preparing import Prepared, announce, prepare
from jaxdist.training.profile import Profile
from jaxdist.training.rounds import RoundRunner, round_until, rounds
from jaxdist.training.run import Run
from jaxdist.training.run_dir import RunFolder
from jaxdist.training.run_lock import LockLost
from jaxdist.training.samples import Samples
from jaxdist.training.save_policy import SavePolicy, finished
from jaxdist.training.step_runner import StepRunner
from jaxdist.training.summary import afterwards

RUNNERS: dict[type[Step], type[StepRunner] | type[RoundRunner]] = {LocalStep: RoundRunner}
"""What takes the steps that are programs of more than one kind."""


def train(run: Run, folder: RunFolder, job: Job) -> int:
    """Train `run` in `folder`, from the beginning or from its newest checkpoint. Returns the exit code.

    With several processes each of them runs this; only the leader writes and prints.
    """
    job.stop.newest = partial(where_it_resumes, folder)
    screen = Screen(log=job.log)
    check_alike("configuration", to_toml(run.config), "give all processes the same options")
    check_computes(run.mesh)
    with one_sentence(folder, partial(where_it_resumes, folder)):
        # Before the data are read: a finished run needs none.
        if finished(run, folder):
            return DONE
        check_named(run.config)
        with prepare(run, folder, job, screen) as prepared:
            return loop(run, folder, job, screen, prepared)


def loop(run: Run, folder: RunFolder, job: Job, screen: Screen, prepared: Prepared) -> int:
    """Train, and report what ends the run early. Returns the exit code."""
    log_of_process = Log if leader() else SilentLog
    checkpoints = prepared.checkpoints
    with (
        log_of_process(run.config, folder, run.steps, prepared.first, screen) as log,
        job.failing(log.pause),
    ):
        try:
            announce(run, folder, prepared, log.say)
            code = Trainer(run, folder, log, job, prepared).train()
            if code == DONE:
                for line in afterwards(run, folder):
                    log.say(line)
            return code
        except Diverged as error:
            # In all processes alike.
            log.say(f"stopped: {error}; {checkpoints.describe_latest()}")
        except LockLost as error:
            # In all processes alike. The checkpoints are another run's now: none of them is recommended.
            log.say(f"stopped: {error}")
        except (SaveFailed, OSError) as error:
            reason = disk_error(error, folder) if isinstance(error, OSError) else error
            # Perhaps in this process alone: the others must not wait for it.
            job.give_up(f"stopped: {reason}; {where_it_resumes(folder)}")
            log.say(f"stopped: {reason}; {checkpoints.describe_latest()}")
        return FAILED


def where_it_resumes(folder: RunFolder) -> str:
    """Return where the run in `folder` resumes, by the files there.

    A step with a seal counts. Its arrays are not read back here, since this is printed while a run ends.
    """
    steps = StepDir(folder.checkpoints).sealed()
    if steps:
        return f"the same command continues from step {max(steps)}"
    return "the same command starts from the beginning"


class Trainer:
    """The loop over steps, and what it needs from step to step."""

    def __init__(self, run: Run, folder: RunFolder, log: Log, job: Job, prepared: Prepared):
        self.run = run
        self.config = run.config
        self.steps = run.steps
        self.every = run.step.crossing.every
        self.folder = folder
        self.log = log
        self.job = job
        self.prepared = prepared
        self.checkpoints = prepared.checkpoints
        self.first = prepared.first
        self.samples = prepared.samples
        self.save_policy = SavePolicy(run, prepared.checkpoints, prepared.base)

    def train(self) -> int:
        """Take the steps of the run that are left. Returns the exit code."""
        state = self.start()
        self.meter = Meter(self.run, self.log, self.first)
        runner = RUNNERS.get(type(self.run.step), StepRunner)
        self.runner = runner(self.run, self.first, report=self.meter.step)
        self.compile()
        if self.validation_overdue():
            self.validate(self.first, state)

        stop = self.job.stop
        stop.newest = self.where_it_resumes
        self.profile = Profile(self.run, self.folder, self.runner.program, self.meter, self.job, self.first)
        prefetch = Prefetch(
            self.run.task.batch_after, self.first, self.steps, self.config.data.prefetch, enough=self.stops_here
        )
        with self.profile, prefetch as batches:
            for steps in rounds(self.first, self.steps, self.every):
                for step in steps:
                    batch = self.next_batch(batches)
                    # All processes ask at the same places, so that they stop at the same step.
                    if step == steps[0] and stop.here():
                        return self.stop_early(step - 1, state)
                    state = self.step(step, state, batch)
                # Validation and checkpoints need the updates of all steps so far: nothing may be in flight.
                if self.validation_due(steps):
                    state = self.runner.drain(step, state)
                    self.validate(step, state)
                if self.samples and self.samples.due(steps):
                    # What is in flight stays there: with a drain the run would learn something else.
                    self.sample(self.samples, step, state)
                if self.save_policy.due(steps):
                    state = self.runner.drain(step, state)
                    self.save(step, state)
        self.finish()
        return DONE

    def start(self) -> TrainState:
        """Make or restore the state."""
        found = self.prepared.found
        if found:
            return self.save_policy.go_on(found, self.log.say)
        return self.save_policy.begin(self.log.say)

    def compile(self) -> None:
        """Compile the train step, and say how long that took.

        While it compiles the heartbeats say so: the watchdog has more patience then.
        """
        self.job.note(COMPILING)
        started = time.perf_counter()
        self.runner.compile()
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
        return self.runner.unfinished + where_it_resumes(self.folder)

    def step(self, step: int, state: Tree, batch: Batch) -> Tree:
        """Take one step, from what the runner carries to what it carries on.

        Raises `SaveFailed` where a checkpoint in the background could not be written.
        """
        # What is usual is a whole round, whose last step has the outer step in it.
        self.job.note(STEPPING, step, begins=not self.runner.unfinished)
        self.profile.before(step, state)
        state = self.runner.take(step, state, batch)
        self.profile.after(step, state)
        self.checkpoints.check()
        return state

    def stop_early(self, step: int, state: TrainState) -> int:
        """Save `step`, the last that was taken, and say so when it is on disk.

        Raises `Diverged` as `save` does: then the same command would not continue the run.
        """
        self.save(step, self.runner.drain(step, state))
        self.checkpoints.wait()
        self.log.say(f"stopped by {self.job.stop.name}: step {step} is saved; the same command continues")
        return STOPPED

    def validation_due(self, steps: range) -> bool:
        """Return whether to validate after the round of `steps`: at the interval that is asked for, and at the end."""
        every = self.config.validation.every
        return steps[-1] == self.steps or (every > 0 and any(step % every == 0 for step in steps))

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

    def validate(self, step: int, state: TrainState) -> None:
        """Report the loss on the held-out part; save the state if it is the best so far.

        A stop ends it between two batches, and `validation_overdue` makes up for it; but not the last one of the run.
        Raises `Diverged` for a loss that is not finite.
        """

        def enough() -> bool:
            self.job.note(VALIDATING)
            return step < self.steps and self.job.stop.here()

        with self.meter.paused():
            params = self.run.step.whole(state)
            found = self.run.validate(params, state.variables, self.config.validation.batches, enough)
            if found is None:
                return
            self.log.metrics({"step": step, **{f"validation_{name}": value for name, value in found.items()}})
            self.prepared.check_lock()
            self.save_policy.save_if_best(step, state, found["loss"])

    def sample(self, samples: Samples, step: int, state: TrainState) -> None:
        """Report how the weights of `state` continue the prompts of the request. Raises `Diverged`."""
        with self.meter.paused():
            try:
                texts = samples.write(self.run.step.whole(state), partial(self.job.note, SAMPLING))
            except NotFinite as error:
                raise Diverged(f"samples after step {step}: {error}") from error
            self.log.samples(step, texts)

    def save(self, step: int, state: TrainState) -> None:
        """Save `state` as `step`, in the background. Raises `Diverged`, `LockLost` or `SaveFailed`."""
        self.job.note(SAVING)
        # The metrics of this step are on disk before its checkpoint is.
        with self.meter.paused():
            self.prepared.check_lock()
            self.save_policy.save(step, state)

    def finish(self) -> None:
        """Compare the best validation loss with the baseline, and draw the curve."""
        self.meter.flush()
        self.checkpoints.wait()
        baseline = self.save_policy.baseline
        self.log.say(
            f"done        best validation loss {self.save_policy.best:.4f} nats per {baseline['unit']}; "
            f"{baseline['name']} of the held-out part {baseline['nats']:.4f}"
        )
        if leader():
            plot_loss(self.folder.metrics, self.folder.plot, **baseline)
