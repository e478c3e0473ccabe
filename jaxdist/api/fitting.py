"""One call of `jaxdist.fit`: the parts of the loop of `jaxdist.train`, made for a module of one's own."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax

from jaxdist.api import Parallel
from jaxdist.api.fit_parts import Ahead, Call, Runner, called
from jaxdist.api.sources import Source
from jaxdist.cluster import xla_options
from jaxdist.cluster.consensus import agreed, check_alike, leader
from jaxdist.cluster.job import Job
from jaxdist.cluster.preflight import check_folder
from jaxdist.cluster.runtime import check_computes
from jaxdist.cluster.script import join
from jaxdist.cluster.script_job import ScriptJob
from jaxdist.config import Config, RequestError
from jaxdist.process.exit_codes import FAILED, STOPPED
from jaxdist.request.own_runs import MADE_BY
from jaxdist.training.console import Screen
from jaxdist.training.device_copies import DeviceCopies
from jaxdist.training.disk_errors import one_sentence
from jaxdist.training.ending import Ended, reporting_end, reporting_failure, where_it_resumes
from jaxdist.training.entering import enter_own, lost_step
from jaxdist.training.forward.step import TrainState
from jaxdist.training.meter import Meter, Reporting
from jaxdist.training.metrics import Log, SilentLog
from jaxdist.training.opening import Opened, opened
from jaxdist.training.profile import Profile
from jaxdist.training.run_dir import RunFolder
from jaxdist.training.run_facts import note_saved
from jaxdist.training.save_policy import ENDED, SavePolicy
from jaxdist.training.summary import folded, of_library
from jaxdist.training.trainer import Trainer, Validation, comparing

IDENTITY = "fit"
"""The fact of a checkpoint with what must be the same in a run that goes on."""

LOG_EVERY = "log_every"
"""The fact of a checkpoint with the steps between lines of the log."""

_calls = itertools.count(1)
"""Numbers the calls of `fit`: every process makes the same ones, in the same order."""


class Fitting:
    """A call of `fit`, whose arguments are valid."""

    def __init__(
        self,
        trainer: Parallel,
        source: Source,
        steps: int,
        folder: RunFolder,
        seed: int,
        params: Any,
        config: Config,
    ):
        self.trainer = trainer
        self.engine = trainer._engine
        self.source = source
        self.steps = steps
        self.folder = folder
        self.seed = seed
        self.params = params
        self.config = config
        # Read once, because it takes a digest of the rows.
        self.identity = {"seed": seed, "form of batches": type(source).__name__, **source.identity()}
        """What must be the same in a run that goes on."""

    def run(self, validation: Validation | None, callbacks: Sequence[Call]) -> TrainState:
        """Train what is left, in this process and the others. Returns the last state."""
        folder = self.folder
        where = partial(where_it_resumes, folder, self.source.can_resume)
        state = None
        error = None
        with ScriptJob(join(), self.config) as job, one_sentence(folder, where), jax.set_mesh(self.trainer.mesh):
            job.stop.newest = where
            self.check_alike()
            check_computes(self.trainer.mesh)
            agreed(lambda: enter_own(folder, self.config.resume))
            screen = Screen(log=job.log)
            with opened(folder, self.config, self.engine, job, screen.say) as held:
                saving = self.saving(held)
                notes, over = self.prepare(held)
                with self.log(held, screen) as log, job.failing(log.pause):
                    if over:
                        log.say(f"{folder.path} is finished at step {held.first}; to start anew, name another run_dir")
                        return self.start(held, saving)
                    try:
                        state = self.train(held, saving, notes, log, job, validation, callbacks)
                    except Ended as ended:
                        error = ended.__cause__
                        # The error leaves the job first, which then knows of none.
                        job.watchdog.ended(FAILED)
        if error is not None:
            raise error
        if state is None:
            sys.exit(STOPPED)
        return state

    def check_alike(self) -> None:
        """Raise `RequestError` in a process that calls `fit` otherwise than the leader."""
        arguments = {"steps": self.steps, "run_dir": str(self.folder.path), **self.identity}
        lines = "\n".join(f"{name} {value}" for name, value in arguments.items())
        check_alike(f"call {next(_calls)} of jaxdist.fit", lines, "give all processes the same arguments")

    def log(self, held: Opened, screen: Screen) -> Log:
        """Return the outputs of this process."""
        settings = {"steps": self.steps, **self.identity, "trainer": repr(self.trainer)}
        of_process = Log if leader() else SilentLog
        return of_process(self.config.log, self.folder, self.steps, held.first, screen, settings)

    def saving(self, held: Opened) -> SavePolicy:
        """Return when the run is saved, and what is in its checkpoints."""
        return SavePolicy(
            self.engine,
            held.checkpoints,
            self.config.checkpoint,
            self.steps,
            self.facts,
            log_every=self.config.log.every,
            check=DeviceCopies(self.trainer.mesh).check if self.config.fault.compare else None,
        )

    def prepare(self, held: Opened) -> tuple[list[str], bool]:
        """Do everything that can refuse the run, but for its first batch; return notes, and whether the run is over."""
        facts = held.checkpoints.facts(held.found) if held.found else {}
        notes = self.compare(facts, held.first) if held.found else []
        if held.first == self.steps or facts.get(ENDED):
            return notes, True
        if held.found:
            self.source.go_on(held.first, facts)
        check_folder(self.folder.checkpoints, self.engine.checkpoint_bytes)
        # Later steps will be taken, and saved, again.
        held.checkpoints.set_aside(after=held.first)
        if leader():
            notes += self.write_folder(held, facts)
        return [*notes, *held.checkpoints.notes], False

    def start(self, held: Opened, saving: SavePolicy) -> TrainState:
        """Make or restore the state."""
        if held.found:
            return self.engine.step.resume(saving.restore(held.found))
        return self.trainer.init(self.seed, self.params)

    def train(
        self,
        held: Opened,
        saving: SavePolicy,
        notes: Sequence[str],
        log: Log,
        job: Job,
        validation: Validation | None,
        callbacks: Sequence[Call],
    ) -> TrainState | None:
        """Train what is left. Returns the last state; None if the run was stopped early."""
        ahead = Ahead(self.trainer, self.source, held.first)
        self.announce(held, ahead.rows, notes, log.say)
        meter = Meter(self.reporting(ahead.rows), log, held.first)
        compare = self.config.fault.compare
        runner = Runner(self.trainer, ahead.abstract, held.first, meter, job)
        loop = Trainer(
            first=held.first,
            steps=self.steps,
            every=1,
            start=partial(self.start, held, saving),
            batch_after=ahead,
            prefetch=self.config.data.prefetch,
            runner=runner,
            meter=meter,
            log=log,
            profile=Profile(self.config.profile, self.folder, lambda: runner.program, meter, job, held.first),
            validation=validation,
            save_policy=saving,
            check_lock=held.check_lock,
            folder=self.folder,
            job=job,
            callbacks=[
                *([comparing(compare, saving, meter)] if compare else []),
                *(called(meter, call) for call in callbacks),
            ],
            can_resume=self.source.can_resume,
        )
        with (
            reporting_failure(held.checkpoints, log.say, loop.where_it_resumes),
            reporting_end(self.folder, held.checkpoints, job, log.say, self.source.can_resume),
        ):
            if loop.train() == STOPPED:
                job.watchdog.ended(STOPPED)
        return loop.state

    def compare(self, facts: Mapping[str, Any], first: int) -> list[str]:
        """Return notes on what differs from the run of a checkpoint. Raises `RequestError` where it must not."""
        there = facts.get(IDENTITY, {})
        here = self.identity
        differing = [
            f"{name} ({there.get(name, 'none')} there, {here.get(name, 'none')} here)"
            for name in {**there, **here}
            if there.get(name) != here.get(name)
        ]
        if differing:
            raise RequestError(
                f"run folder {self.folder.path} holds a run with other arguments of jaxdist.fit: "
                f"{', '.join(differing)}; give the same, or name another run_dir"
            )
        if first > self.steps:
            raise RequestError(
                f"run folder {self.folder.path} has taken {first} steps, and steps is {self.steps}; give as many "
                f"or more, or name another run_dir"
            )
        before = facts["steps"]
        if before == self.steps or facts.get(ENDED):
            return []
        return [f"note        steps was {before} and is {self.steps}: a learning rate that depends on it changes here"]

    def write_folder(self, held: Opened, facts: Mapping[str, Any]) -> list[str]:
        """Write how the run is made, and cut its metrics back to the step that it resumes from; return notes."""
        folder = self.folder
        mesh = self.trainer.mesh
        if held.found:
            # A kill may have come between the save and the note of it.
            note_saved(folder.path, held.first)
        devices = [f"{device} ({device.device_kind})" for device in mesh.devices.flat]
        xla = xla_options.settings(self.engine.layout.platform, self.engine.compiler_options)
        folder.write_environment(devices, MADE_BY | {"processes": jax.process_count()} | xla)
        every = self.config.log.every
        return [*lost_step(folder, held.first), *folder.cut_metrics(held.first, [every, facts.get(LOG_EVERY, every)])]

    def announce(self, held: Opened, rows: int, notes: Sequence[str], say: Callable[[str], None]) -> None:
        """Print what is going to be run."""
        resume = f"from the checkpoint of step {held.first}" if held.found else "from the beginning"
        about = [
            ("batch", f"{rows:,} rows per step, {self.steps} steps"),
            ("data", self.source.about),
            ("run folder", f"{self.folder.path}; {resume}"),
        ]
        lines = of_library(self.trainer.mesh, repr(self.trainer), self.engine.compiler_options, about)
        for line in [*folded(lines, sys.stderr), *notes]:
            say(line)

    def reporting(self, rows: int) -> Reporting:
        """Return what the lines of the run report, for steps of so many rows."""
        return Reporting(
            mesh=self.trainer.mesh,
            steps=self.steps,
            every=self.config.log.every,
            max_skipped=self.config.train.max_skipped,
            unit="row",
            per_step=rows,
        )

    def facts(self, step: int) -> dict[str, Any]:
        """Return what a checkpoint of this run holds beside what those of every run do."""
        return {
            "seed": self.seed,
            "data": self.source.about,
            IDENTITY: self.identity,
            LOG_EVERY: self.config.log.every,
            **self.source.facts(step),
        }
