"""The training loop: batch, step, metrics of the step before, validation, checkpoint, stop."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import NamedTuple

import jax

from jaxdist.cluster import xla_options
from jaxdist.cluster.consensus import check_alike, from_leader, leader, leader_first
from jaxdist.cluster.heartbeat import (
    AWAITING,
    COMPILING,
    READING,
    SAMPLING,
    SAVING,
    STARTING,
    STEPPING,
    VALIDATING,
    WAITING,
)
from jaxdist.cluster.job import Job
from jaxdist.cluster.preflight import check_folder
from jaxdist.cluster.runtime import check_computes
from jaxdist.config import NotFinite, RequestError
from jaxdist.data.batches import Prefetch
from jaxdist.mesh import REPLICA
from jaxdist.process.exit_codes import DONE, FAILED, STOPPED
from jaxdist.request import to_toml
from jaxdist.sharding import Tree
from jaxdist.training import history
from jaxdist.training.checkpoint.manager import Checkpoints, Found
from jaxdist.training.checkpoint.orbax_writer import SaveFailed
from jaxdist.training.checkpoint.step_dir import StepDir
from jaxdist.training.console import Screen
from jaxdist.training.copies import check_named
from jaxdist.training.data_progress import DataProgress
from jaxdist.training.disk_errors import disk_error, one_sentence
from jaxdist.training.entering import lost_step
from jaxdist.training.forward.local_step import LocalStep
from jaxdist.training.forward.step import Batch, Step, TrainState
from jaxdist.training.meter import Diverged, Meter
from jaxdist.training.metrics import Log, SilentLog
from jaxdist.training.plots import plot_loss
from jaxdist.training.profile import Profile
from jaxdist.training.rounds import RoundRunner, round_until, rounds
from jaxdist.training.run import Run
from jaxdist.training.run_dir import RunFolder
from jaxdist.training.run_facts import note_saved
from jaxdist.training.run_lock import LockLost
from jaxdist.training.samples import Samples
from jaxdist.training.save_policy import SavePolicy, checkpoint_bytes, finished, locked
from jaxdist.training.startup_checks import check_attention
from jaxdist.training.step_runner import StepRunner
from jaxdist.training.summary import afterwards, beginning, folded, summary
from jaxdist.weights.base import Base, NoBase, base_for
from jaxdist.weights.pretrained import keep_files
from jaxdist.weights.source import source_of

RUNNERS: dict[type[Step], type[StepRunner] | type[RoundRunner]] = {LocalStep: RoundRunner}
"""What takes the steps that are programs of more than one kind."""


class Prepared(NamedTuple):
    """A run that may begin: nothing refuses it any more."""

    checkpoints: Checkpoints
    found: Found | None
    """The step to resume from; None for the beginning."""
    check_lock: Callable[[], None]
    """Raises `LockLost` where another run has taken the folder."""
    summary_begun: bool
    """Whether the beginning of the summary was printed while data were read."""
    samples: Samples | None
    """What the run writes while it trains, if anything."""
    base: Base | NoBase
    """What stands beside the parameters that it saves."""

    @property
    def first(self) -> int:
        """The number of steps that are already taken."""
        return self.found.step if self.found else 0


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


@contextmanager
def prepare(run: Run, folder: RunFolder, job: Job, screen: Screen) -> Iterator[Prepared]:
    """Do everything that can refuse the run, in order: data, lock, checkpoints, disk. Holds the lock and the mesh."""
    # Nothing is written before the data are known to be there and to fit the model.
    summary_begun = open_data(run, folder, job, screen)
    check_alike("data", run.task.fingerprint, "let all processes read the same files")
    config = run.config
    samples = Samples(run) if config.sample.every else None
    keep = config.checkpoint.keep
    with ExitStack() as stack:
        stack.enter_context(jax.set_mesh(run.mesh))
        check_lock = stack.enter_context(locked(folder, config.fault.heartbeat_seconds, screen.say))
        checkpoints = stack.enter_context(Checkpoints(folder.path, keep, config.checkpoint.keep_every))
        # Only the holder of the lock writes into the folder.
        job.note(STARTING)
        job.log.open(folder.log, rotates=leader())
        job.watchdog.beat_in(folder.heartbeats)

        found = checkpoints.find_start(config.resume, expected=run.engine.abstract_logical)
        facts = checkpoints.facts(found) if found else None
        if facts:
            folder.same_data(facts["data"], run.task.fingerprint)
        else:
            check_new(run)
        job.note(READING)
        base = base_for(config, facts, resumes=True)
        check_folder(folder.checkpoints, checkpoint_bytes(run))

        prepared = Prepared(checkpoints, found, check_lock, summary_begun, samples, base)
        # Later steps will be taken, and saved, again.
        checkpoints.set_aside(after=prepared.first)
        if leader():
            write_folder(run, folder, prepared)
        yield prepared


def check_new(run: Run) -> None:
    """Raise `RequestError` for what only a run that is resumed may ask for."""
    if run.split.size(REPLICA) > 1:
        return
    problems = run.split.crossing_traits.without_replicas(run.config.mesh)
    if problems:
        raise RequestError(*problems)


def write_folder(run: Run, folder: RunFolder, prepared: Prepared) -> None:
    """Write how the run is made, and cut its metrics back to the step that it resumes from."""
    notes = [*folder.notes, *lost_step(folder, prepared.first), *folder.cut_metrics(prepared.first, run.config)]
    prepared.checkpoints.notes += notes
    if prepared.samples and prepared.samples.note:
        prepared.checkpoints.notes.append(f"sample.prompts: {prepared.samples.note}")
    if prepared.found:
        # An older jaxdist did not, and a kill may have come between the save and the note of it.
        note_saved(folder.path, prepared.found.step)
    else:
        # Before config.toml, which says that a run began with these files.
        keep_files(source_of(run.config.init_from).kept_files(), folder.path)
    devices = [f"{device} ({device.device_kind})" for device in run.mesh.devices.flat]
    xla = xla_options.settings(run.layout.platform, run.compiler_options)
    folder.write(
        run.config, run.task.tokenizer, run.task.special_tokens, devices, {"processes": jax.process_count()} | xla
    )


def loop(run: Run, folder: RunFolder, job: Job, screen: Screen, prepared: Prepared) -> int:
    """Train, and report what ends the run early. Returns the exit code."""
    log_of_process = Log if leader() else SilentLog
    checkpoints = prepared.checkpoints
    with (
        log_of_process(run.config, folder, run.steps, prepared.first, screen) as log,
        job.failing(log.pause),
    ):
        try:
            return Trainer(run, folder, log, job, prepared).train()
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


def open_data(run: Run, folder: RunFolder, job: Job, screen: Screen) -> bool:
    """Read, and at the first use tokenize, the data: the leader first, because the others find its files.

    Returns whether that took so long that the summary was begun before it ended.
    """
    begun = False

    def begin_summary() -> None:
        nonlocal begun
        begun = True
        for line in beginning(run):
            screen.say(line)

    def note_reading() -> None:
        job.note(READING)

    def read() -> None:
        note_reading()
        run.open_data()

    run.task.begun = folder.data_begun()
    run.task.progress = DataProgress(note_reading, screen if leader() else None, begin_summary)
    job.note(READING if leader() else AWAITING)
    try:
        leader_first("tokens", read)
    finally:
        screen.pause()
    return begun


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
        """Print what is going to be run, and make or restore the state."""
        found = self.prepared.found
        resume = f"from the checkpoint of step {found.step}" if found else "from the beginning"
        say = self.log.say
        for line in folded(summary(self.run, self.folder.path, resume, self.prepared.summary_begun), sys.stderr):
            say(line)
        for note in self.checkpoints.notes:
            say(note)
        attention = check_attention(self.run)
        if attention:
            say(f"checked     {attention}")
        if found:
            return self.save_policy.go_on(found, say)
        return self.save_policy.begin(say)

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
        """Compare the best validation loss with the baseline, draw the curve, and say what may come next."""
        self.meter.flush()
        self.checkpoints.wait()
        baseline = self.save_policy.baseline
        self.log.say(
            f"done        best validation loss {self.save_policy.best:.4f} nats per {baseline['unit']}; "
            f"{baseline['name']} of the held-out part {baseline['nats']:.4f}"
        )
        if leader():
            plot_loss(self.folder.metrics, self.folder.plot, **baseline)
        for line in afterwards(self.run, self.folder):
            self.log.say(line)
