"""The training loop: batch, step, metrics of the step before, validation, checkpoint, stop."""

from __future__ import annotations

import signal
import time

import jax

from jaxdist.cluster.agreement import leader
from jaxdist.cluster.preflight import check_folder
from jaxdist.data.batches import Prefetch, global_rows
from jaxdist.training.checkpoint import Checkpoints, Found
from jaxdist.training.folder import RunFolder
from jaxdist.training.meter import Diverged, Meter
from jaxdist.training.metrics import Log
from jaxdist.training.plots import plot_loss
from jaxdist.training.run import Run
from jaxdist.training.saving import Saving, checkpoint_bytes, finished, locked, no_room
from jaxdist.training.step import Batch, TrainState
from jaxdist.training.store import SaveFailed
from jaxdist.training.summary import summary

DONE, FAILED, STOPPED = 0, 1, 85
"""Exit codes: finished, failed, and stopped early with a checkpoint saved."""


def train(run: Run, folder: RunFolder) -> int:
    """Train `run` in `folder`, from the beginning or from its newest checkpoint. Returns the exit code."""
    if finished(run, folder):
        return DONE
    run.open_data()  # nothing is written before it is known to be there and fit
    with (
        jax.set_mesh(run.mesh),
        locked(folder),
        Checkpoints(folder.path, run.config.checkpoint.keep, run.config.checkpoint.keep_every) as checkpoints,
    ):
        found = checkpoints.find_start(run.config.resume)
        if found:
            folder.same_data(checkpoints.facts(found)["data"], run.task.fingerprint)
        check_folder(folder.checkpoints, checkpoint_bytes(run))
        first = found.step if found else 0
        checkpoints.set_aside(after=first)
        if leader():
            devices = [f"{device} ({device.device_kind})" for device in run.mesh.devices.flat]
            folder.write(run.config, run.task.tokenizer, devices)
            folder.cut_metrics(first)
        with Log(run.config, folder, run.steps, first) as log, StopSignal() as stop:
            try:
                return Trainer(run, folder, checkpoints, log, stop).train(found)
            except (Diverged, SaveFailed) as error:
                log.say(f"stopped: {error}; {checkpoints.told()}")
            except OSError as error:
                log.say(f"stopped: {no_room(error, folder)}; {checkpoints.told()}")
            return FAILED


class StopSignal:
    """SIGTERM, SIGUSR1 and Ctrl-C ask the loop to save and stop; a second Ctrl-C interrupts at once."""

    def __init__(self):
        self.name: str | None = None

    def __enter__(self) -> StopSignal:
        numbers = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
        self._old = {number: signal.signal(number, self._note) for number in numbers}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)

    def _note(self, number: int, _frame: object) -> None:
        if self.name and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.name = signal.Signals(number).name


class Trainer:
    """The loop and what it needs from step to step."""

    def __init__(self, run: Run, folder: RunFolder, checkpoints: Checkpoints, log: Log, stop: StopSignal):
        self.run, self.folder, self.checkpoints, self.log, self.stop = run, folder, checkpoints, log, stop
        self.config, self.steps = run.config, run.steps
        self.saving = Saving(run, checkpoints)

    def train(self, found: Found | None) -> int:
        """Go on after the step that was `found`, or begin."""
        state, first = self.start(found), found.step if found else 0
        self.program, self.settled_at = self.compile(), first
        self.meter = Meter(self.run, self.log)
        with Prefetch(self.batch, first, self.steps, self.config.data.prefetch) as batches:
            for step in range(first + 1, self.steps + 1):
                batch = self.meter.next(batches)
                state = self.step(step, state, batch)
                self.checkpoints.check()
                if self.due(step, self.config.validation.every):
                    state = self.settled(step, state)
                    self.validate(step, state)
                stopped_by = self.stop.name
                if self.saving.due(step) or stopped_by:
                    state = self.settled(step, state)
                    self.save(step, state)
                if stopped_by and step < self.steps:
                    self.checkpoints.wait()
                    self.log.say(f"stopped by {stopped_by}: step {step} is saved; the same command goes on")
                    return STOPPED
        self.finish()
        return DONE

    def start(self, found: Found | None) -> TrainState:
        """Tell what is going to be run, and make or restore the state."""
        resume = f"from the checkpoint of step {found.step}" if found else "from the beginning"
        for line in [*summary(self.run, self.folder.path, resume), *self.checkpoints.notes]:
            self.log.say(line)
        return self.saving.go_on(found) if found else self.saving.begin(self.log.say)

    def compile(self) -> jax.stages.Compiled:
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
        """Tell the loss on the held-out part; keep the state if it is the best so far."""
        with self.meter.paused():
            found = self.run.validate(state.params, state.variables, self.config.validation.batches)
            self.log.metrics({"step": step, **{f"validation_{name}": value for name, value in found.items()}})
            self.saving.save_if_best(step, state, found["loss"])

    def save(self, step: int, state: TrainState) -> None:
        with self.meter.paused():  # the metrics of this step are on disk before its checkpoint is
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
        plot_loss(self.folder.metrics, self.folder.plot, **told)
