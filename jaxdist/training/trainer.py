"""The training loop: batch, step, metrics of the step before, validation, checkpoint, stop."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import jax

from jaxdist.cluster import xla_options
from jaxdist.cluster.consensus import check_alike, from_leader, leader, leader_first
from jaxdist.cluster.job import Job
from jaxdist.cluster.phases import AWAITING, COMPILING, READING, SAVING, STARTING, STEPPING, VALIDATING, WAITING
from jaxdist.cluster.preflight import check_folder
from jaxdist.cluster.stopping import STOPPED
from jaxdist.data.batches import Prefetch, global_rows
from jaxdist.request import to_toml
from jaxdist.training import history
from jaxdist.training.checkpoint.manager import Checkpoints, Found
from jaxdist.training.checkpoint.orbax_writer import SaveFailed
from jaxdist.training.checkpoint.step_dir import StepDir
from jaxdist.training.console import Screen
from jaxdist.training.data_progress import DataProgress
from jaxdist.training.forward.step import Batch, TrainState
from jaxdist.training.meter import Diverged, Meter
from jaxdist.training.metrics import Log, Silent
from jaxdist.training.plots import plot_loss
from jaxdist.training.profile import Profile
from jaxdist.training.run import Run
from jaxdist.training.run_dir import RunFolder
from jaxdist.training.run_lock import LockLost
from jaxdist.training.save_policy import SavePolicy, checkpoint_bytes, finished, locked, no_room
from jaxdist.training.startup_checks import check_attention
from jaxdist.training.summary import beginning, folded, summary

DONE, FAILED = 0, 1
"""Exit codes: finished, and failed. `STOPPED` is that of a run which the same command goes on with."""


def train(run: Run, folder: RunFolder, job: Job) -> int:
    """Train `run` in `folder`, from the beginning or from its newest checkpoint. Returns the exit code.

    With several processes each of them runs this; the leader alone writes and tells.
    """
    job.stop.newest = lambda: goes_on(folder)
    screen = Screen(log=job.log)
    check_alike("configuration", to_toml(run.config), "give all processes the same options")
    if finished(run, folder):
        return DONE
    begun = open_data(run, job, screen)  # nothing is written before it is known to be there and fit
    check_alike("data", run.task.fingerprint, "let all processes read the same files")
    with (
        jax.set_mesh(run.mesh),
        locked(folder, run.config.fault.heartbeat_seconds, screen.say) as check_lock,
        Checkpoints(folder.path, run.config.checkpoint.keep, run.config.checkpoint.keep_every) as checkpoints,
    ):
        job.note(STARTING)
        job.log.open(folder.log, rotates=leader())
        job.watchdog.beat_in(folder.heartbeats)
        found = checkpoints.find_start(run.config.resume, expected=run.abstract_logical)
        if found:
            folder.same_data(checkpoints.facts(found)["data"], run.task.fingerprint)
        check_folder(folder.checkpoints, checkpoint_bytes(run))
        first = found.step if found else 0
        checkpoints.set_aside(after=first)
        if leader():
            devices = [f"{device} ({device.device_kind})" for device in run.mesh.devices.flat]
            checkpoints.notes += [*folder.notes, *folder.cut_metrics(first, run.config.log.every)]
            more = {"processes": jax.process_count()} | xla_options.told(run.layout.platform, run.compiler_options)
            folder.write(run.config, run.task.tokenizer, devices, more)
        with (Log if leader() else Silent)(run.config, folder, run.steps, first, screen) as log, job.failing(log.pause):
            try:
                return Trainer(run, folder, checkpoints, log, job, check_lock, begun).train(found)
            except Diverged as error:  # in all processes alike
                log.say(f"stopped: {error}; {checkpoints.describe_latest()}")
            except LockLost as error:  # in all processes alike; the checkpoints are another run's
                log.say(f"stopped: {error}")
            except (SaveFailed, OSError) as error:
                told = no_room(error, folder) if isinstance(error, OSError) else error
                job.give_up(f"stopped: {told}; {goes_on(folder)}")
                log.say(f"stopped: {told}; {checkpoints.describe_latest()}")
            return FAILED


def open_data(run: Run, job: Job, screen: Screen) -> bool:
    """Read, and at the first use tokenize, the data: the leader first, whose files the others find. Whether that took
    so long that the summary was begun before it."""
    told: list[str] = []

    def begin() -> None:
        told.extend(beginning(run))
        for line in told:
            screen.say(line)

    def read() -> None:
        job.note(READING)
        run.open_data()

    run.task.progress = DataProgress(lambda: job.note(READING), screen if leader() else None, begin)
    job.note(READING if leader() else AWAITING)
    try:
        leader_first("tokens", read)
    finally:
        screen.pause()
    return bool(told)


def goes_on(folder: RunFolder) -> str:
    """Where the run in `folder` goes on, as its files tell."""
    steps = StepDir(folder.checkpoints).sealed()
    return f"the same command goes on from step {max(steps)}" if steps else "the same command starts from the beginning"


class Trainer:
    """The loop and what it needs from step to step."""

    def __init__(
        self,
        run: Run,
        folder: RunFolder,
        checkpoints: Checkpoints,
        log: Log,
        job: Job,
        check_lock: Callable[[], None],
        begun: bool,
    ):
        """`check_lock` raises `LockLost` where another run has taken the folder. `begun`: the beginning of the summary
        was told."""
        self.run, self.folder, self.checkpoints, self.log, self.job = run, folder, checkpoints, log, job
        self.check_lock, self.begun = check_lock, begun
        self.config, self.steps = run.config, run.steps
        self.saving = SavePolicy(run, checkpoints)

    def train(self, found: Found | None) -> int:
        """Go on after the step that was `found`, or begin."""
        state, first = self.start(found), found.step if found else 0
        self.program, self.settled_at = self.compile(), first
        self.meter = Meter(self.run, self.log)
        if self.overdue(first):
            self.validate(first, state)
        stop, depth = self.job.stop, self.config.data.prefetch
        profile = Profile(self.run, self.folder, self.program, self.meter, self.job, first)
        with profile, Prefetch(self.batch, first, self.steps, depth, enough=stop.due) as batches:
            for step in range(first + 1, self.steps + 1):
                self.meter.catch_up()
                self.job.note(WAITING)
                batch = self.meter.next(batches)
                if stop.here():
                    return self.stopped(step - 1, state)
                self.job.note(STEPPING, step)
                profile.before(step, state)
                state = self.step(step, state, batch)
                profile.after(step, state)
                self.checkpoints.check()
                if self.due(step, self.config.validation.every):
                    state = self.settled(step, state)
                    self.validate(step, state)
                if self.saving.due(step):
                    state = self.settled(step, state)
                    self.save(step, state)
        self.finish()
        return DONE

    def stopped(self, step: int, state: TrainState) -> int:
        """Save `step`, the last that was taken, and tell so when it is on disk. Raises `Diverged` as a save does: then
        the same command would not go on."""
        self.save(step, self.settled(step, state))
        self.checkpoints.wait()
        self.log.say(f"stopped by {self.job.stop.name}: step {step} is saved; the same command goes on")
        return STOPPED

    def start(self, found: Found | None) -> TrainState:
        """Tell what is going to be run, and make or restore the state."""
        resume = f"from the checkpoint of step {found.step}" if found else "from the beginning"
        lines = folded(summary(self.run, self.folder.path, resume, self.begun), sys.stderr)
        for line in [*lines, *self.checkpoints.notes]:
            self.log.say(line)
        if checked := check_attention(self.run):
            self.log.say(f"checked     {checked}")
        say = self.log.say
        return self.saving.go_on(found, say) if found else self.saving.begin(say)

    def compile(self) -> jax.stages.Compiled:
        self.job.note(COMPILING)
        started = time.perf_counter()
        step = self.run.compile()
        self.log.say(f"compiled    in {time.perf_counter() - started:.1f} s")
        return step

    def batch(self, step: int) -> Batch:
        """The global batch of the step that follows `step` steps: a function of (seed, step) alone."""
        train, task = self.config.train, self.run.task
        return task.batch(global_rows(train.seed, step, train.global_batch_size, task.rows), step)

    def step(self, step: int, state: TrainState, batch: Batch) -> TrainState:
        """Give `batch` to the program, and tell the results of the step that ends with it."""
        state, metrics = self.program(state, batch)
        ends = step - self.run.step.late
        if ends > self.settled_at:
            self.meter.step(ends, metrics)
        return state

    def settled(self, step: int, state: TrainState) -> TrainState:
        """The state with the updates of all steps up to `step`: what an asynchronous pipeline still has in it comes
        through."""
        if self.settled_at < step:
            for late in range(1, self.run.step.late + 1):
                state = self.step(step + late, state, self.run.no_batch())
            self.settled_at = step
        return state

    def due(self, step: int, every: int) -> bool:
        return step == self.steps or (every > 0 and step % every == 0)

    def validate(self, step: int, state: TrainState) -> None:
        """Tell the loss on the held-out part; keep the state if it is the best so far.

        A stop ends it between two batches, to be made up for by `overdue`; but not the last one of the run.
        """

        def enough() -> bool:
            self.job.note(VALIDATING)
            return step < self.steps and self.job.stop.here()

        with self.meter.paused():
            found = self.run.validate(state.params, state.variables, self.config.validation.batches, enough)
            if found is None:
                return
            self.log.metrics({"step": step, **{f"validation_{name}": value for name, value in found.items()}})
            self.check_lock()
            self.saving.save_if_best(step, state, found["loss"])

    def overdue(self, first: int) -> bool:
        """Whether the run was stopped in the validation of the step that it goes on from."""
        if not 0 < first < self.steps or not self.due(first, self.config.validation.every):
            return False
        if not leader():
            return bool(from_leader(0))
        there = {line["step"] for line in history.read(self.folder.metrics) if history.VALIDATED in line}
        return bool(from_leader(int(first not in there)))

    def save(self, step: int, state: TrainState) -> None:
        self.job.note(SAVING)
        with self.meter.paused():  # the metrics of this step are on disk before its checkpoint is
            self.check_lock()
            self.saving.save(step, state)

    def finish(self) -> None:
        """Compare the outcome with that of one who has not looked, and draw it."""
        self.meter.flush()
        self.checkpoints.wait()
        told = self.saving.baseline
        self.log.say(
            f"done        best validation loss {self.saving.best:.4f} nats per {told['unit']}; "
            f"{told['name']} of the held-out part {told['nats']:.4f}"
        )
        if leader():
            plot_loss(self.folder.metrics, self.folder.plot, **told)
