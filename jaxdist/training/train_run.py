"""A run of `jaxdist.train`: the parts of its loop, made from its configuration, and its exit code."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

from jaxdist.cluster.consensus import check_alike, from_leader, leader
from jaxdist.cluster.heartbeat import READING, SAMPLING
from jaxdist.cluster.job import Job
from jaxdist.cluster.runtime import check_computes
from jaxdist.config import Config, NotFinite
from jaxdist.planning.hardware import peak_flops
from jaxdist.process.exit_codes import DONE, FAILED, REFUSED
from jaxdist.request import to_toml
from jaxdist.training import rollback
from jaxdist.training.checkpoint.step_dir import StepDir
from jaxdist.training.console import Screen
from jaxdist.training.copies import check_named
from jaxdist.training.disk_errors import one_sentence
from jaxdist.training.ending import Ended, reporting_end, where_it_resumes
from jaxdist.training.forward.balance import REPORTED, CollapseWatch
from jaxdist.training.forward.group_norms import names_of
from jaxdist.training.forward.local_step import LocalStep
from jaxdist.training.forward.optimizer import RateTable, schedule
from jaxdist.training.forward.preferences import FIGURES
from jaxdist.training.forward.step import Metrics, TrainState
from jaxdist.training.meter import Diverged, Meter, Reporting
from jaxdist.training.metrics import Log, SilentLog
from jaxdist.training.plots import plot_loss
from jaxdist.training.preparing import Prepared, announce, prepare
from jaxdist.training.profile import Profile
from jaxdist.training.raised_loss import RaisedLoss
from jaxdist.training.reference import refer
from jaxdist.training.rounds import RoundRunner
from jaxdist.training.run import Run
from jaxdist.training.run_dir import RunFolder
from jaxdist.training.samples import Samples
from jaxdist.training.starting import begin, go_on, initial_weights, save_policy_of
from jaxdist.training.step_runner import StepRunner
from jaxdist.training.summary import afterwards
from jaxdist.training.trainer import Callback, Figures, Runner, Trainer, Validation, comparing


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
    settings = run.config.model_dump(mode="json")
    with (
        log_of_process(run.config.log, folder, run.steps, prepared.held.first, screen, settings) as log,
        job.failing(log.pause),
    ):
        try:
            diverged = partial(goes_back, folder, run.config)
            with reporting_end(folder, prepared.held.checkpoints, job, log.say, diverged=diverged):
                announce(run, folder, prepared, log.say)
                code = trainer_of(run, folder, job, log, prepared).train()
        except Ended as ended:
            return code_of(ended, folder, run.config)
        if code == DONE:
            for line in afterwards(run, folder):
                log.say(line)
        return code


def goes_back(folder: RunFolder, config: Config, error: Diverged) -> str:
    """Note which steps have ended the run, and return how it goes on, as a clause; empty if not by itself."""
    if error.steps is None:
        return ""
    trouble = rollback.trouble_of(config, error.steps, str(error))
    if leader():
        rollback.note(folder, trouble)
    found = rollback.outlook(folder, config, trouble)
    if found is None:
        return ""
    return found.text if found.step is None else f"started again, the run goes on from {found.text}"


def code_of(ended: Ended, folder: RunFolder, config: Config) -> int:
    """Return the exit code of a run that cannot go on; launchers do not start one again that would be refused."""
    error = ended.__cause__
    if isinstance(error, Diverged) and error.steps is not None:
        found = rollback.outlook(folder, config, rollback.trouble_of(config, error.steps, str(error)))
        if found and found.step is None:
            return REFUSED
    return FAILED


def trainer_of(run: Run, folder: RunFolder, job: Job, log: Log, prepared: Prepared) -> Trainer:
    """Return the loop of a run that may begin."""
    held = prepared.held
    config = run.config
    raised = RaisedLoss(config.train.max_raised, held.checkpoints.facts(held.found) if held.found else None)
    meter = Meter(replace(reporting_of(run), raised=raised), log, held.first)
    runner = runner_of(run, held.first, meter.step)
    saving = save_policy_of(run, held.checkpoints, prepared.base, raised)

    def start() -> TrainState:
        note = partial(job.note, READING)
        if held.found:
            refer(run, partial(initial_weights, run), log.say, note)
            return go_on(run, prepared.base, saving, held.found, log.say)
        state = begin(run, prepared.base, log.say)
        refer(run, lambda: run.step.whole(state), log.say, note, begins=True)
        return state

    return Trainer(
        first=held.first,
        steps=run.steps,
        every=run.step.crossing.every,
        start=start,
        batch_after=run.task.batch_after,
        prefetch=config.data.prefetch,
        runner=runner,
        meter=meter,
        log=log,
        profile=Profile(config.profile, folder, lambda: runner.program, meter, job, held.first),
        validation=Validation(config.validation.every, partial(validated, run)),
        save_policy=saving,
        check_lock=held.check_lock,
        folder=folder,
        job=job,
        callbacks=[
            *([comparing(config.fault.compare, saving, meter)] if config.fault.compare else []),
            *([sampling(run, prepared.samples, meter, job)] if prepared.samples else []),
        ],
    )


def reporting_of(run: Run) -> Reporting:
    """Return what the lines of a run report."""
    config = run.config
    return Reporting(
        mesh=run.mesh,
        steps=run.steps,
        every=config.log.every,
        max_skipped=config.train.max_skipped,
        unit=run.task.unit,
        per_step=run.task.units_per_step,
        learning_rate=RateTable(schedule(config.optimizer, run.steps)),
        flops=run.task.flops,
        peak=peak_flops(run.mesh.local_devices[0].device_kind, config.precision),
        predicted=run.predicted_memory.total,
        further=(
            *REPORTED,
            *(FIGURES if config.train.learns_pairs else ()),
            *(names_of(run.step.differentiated) if config.log.norms else ()),
        ),
        left_out=config.data.skip,
        collapse=CollapseWatch(config.model),
    )


def runner_of(run: Run, first: int, report: Callable[[int, Metrics], None]) -> Runner:
    """Return what takes the steps of a run that goes on after step `first`."""
    if isinstance(run.step, LocalStep):
        return RoundRunner(run, first, report)
    return StepRunner(run.engine, run.batch(), first, report)


def validated(run: Run, state: TrainState, enough: Callable[[], bool]) -> Mapping[str, float] | None:
    """Return the figures of the held-out part; None if `enough()`."""
    return run.validate(run.step.whole(state), state.variables, run.config.validation.batches, enough)


def sampling(run: Run, samples: Samples, meter: Meter, job: Job) -> Callback:
    """Return what reports how the weights continue the prompts of the request. It raises `Diverged`."""

    def sample(steps: range, state: TrainState, figures: Figures) -> bool:
        if not samples.due(steps):
            return False
        with meter.paused():
            try:
                texts = samples.write(run.step.whole(state), partial(job.note, SAMPLING))
            except NotFinite as error:
                raise Diverged(f"samples after step {steps[-1]}: {error}") from error
            meter.log.samples(steps[-1], texts)
        return False

    return sample


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
            plot_loss(folder.metrics, folder.plot, checkpoints.facts(step)["baseline"])
        print(f"{folder.path} is finished at step {step}; to start anew, name another --run-dir", file=sys.stderr)
    return bool(step)
