"""Whether a run may start or resume in a folder, and with which configuration. No jax here."""

from __future__ import annotations

import os
from contextlib import suppress

from jaxdist.config import Config, RequestError
from jaxdist.files import WRONG_CONTENT
from jaxdist.huggingface.folder import KEPT
from jaxdist.request.pretrained import as_asked
from jaxdist.training import rollback
from jaxdist.training.checkpoint.step_dir import StepDir
from jaxdist.training.mixture_record import MixtureRecord, asked_by, check_mixture
from jaxdist.training.resume_check import lengthened, other_batches, other_data, refusal
from jaxdist.training.run_dir import RunFolder
from jaxdist.training.run_facts import SAVED, run_facts
from jaxdist.training.saved_before import what_shows_a_save
from jaxdist.weights.named import model_folder
from jaxdist.weights.source import source_of

BEFORE_A_RUN = {".lock", "checkpoints", "heartbeats", KEPT, "slurm", "run.json", "starts.jsonl", "log.txt", "log.txt.1"}
"""Names that may exist in a folder in which no run has begun yet, or one was killed as it began."""

LISTED = 3
"""Unexpected names that an error lists at most."""


def enter(folder: RunFolder, config: Config) -> Config:
    """Return the configuration to run in `folder`: `config`, completed from the run that is there.

    That run gives its precision where `config` leaves it open, and the run whose weights `config` begins with gives
    its tokenizer. Raises `RequestError` when `config` must not be run there. Writes nothing.
    """
    folder.check_layout()
    committed = [step for steps in folder.step_dirs() for step in steps.steps()]
    if not folder.config.exists():
        _check_new(folder, config, committed)
        _note_new(folder, config)
        return source_of(config.init_from).inherit(config)
    if config.resume == "never":
        raise RequestError(
            f"run folder {folder.path} holds a run already and --resume is never; "
            f"name another --run-dir, or go on with --resume auto"
        )
    config = rollback.going_on(folder, config)
    steps = StepDir(folder.checkpoints).steps()
    if config.resume.isdecimal() and int(config.resume) not in steps:
        there = f"its steps are {', '.join(map(str, steps))}" if steps else "it holds none"
        raise RequestError(f"run folder {folder.path} holds no checkpoint of step {config.resume}; {there}")
    if not committed:
        # The run died before it had learned anything that could be kept, or that is not where it was.
        _refuse_lost(folder, folder.own_config())
        _note_new(folder, config)
        return source_of(config.init_from).inherit(config)
    return _continuing(folder, config, steps or committed)


def enter_own(folder: RunFolder, resume: str) -> int:
    """Check that a script may train in `folder`. Returns 0, or raises `RequestError`; writes nothing."""
    folder.check_layout()
    if folder.config.exists():
        raise RequestError(f"run folder {folder.path} holds a run of jaxdist.train; name another run_dir")
    if any(steps.steps() for steps in folder.step_dirs()):
        if resume == "never":
            raise RequestError(
                f"run folder {folder.path} holds a run already and resume is never; name another run_dir, or go on "
                f"with resume='auto'"
            )
        return 0
    _refuse_lost(folder, None)
    if resume.isdecimal():
        raise RequestError(
            f"run folder {folder.path} holds no run to go back to step {resume} of; leave resume out to start one, or "
            f"name the run_dir of the run"
        )
    return 0


def check_beginning(folder: RunFolder, config: Config) -> None:
    """Refuse an `init_from` as `enter` does, for a run that is only described: a folder need not hold its weights.

    A run that has saved a step needs what it began with no more. Raises `RequestError`.
    """
    begun = folder.config.exists() and any(steps.steps() for steps in folder.step_dirs())
    if not begun and config.init_from and not model_folder(config.init_from, folder.path):
        source_of(config.init_from).inherit(config)


def lost_step(folder: RunFolder, first: int) -> list[str]:
    """Return a sentence about the step that was saved last, where it is gone and the run goes on from `first`."""
    step = run_facts(folder.path).get(SAVED)
    if not isinstance(step, int) or step <= first or any(step in steps.steps() for steps in folder.step_dirs()):
        return []
    return [f"step {step} was saved, but is gone: the steps after {first} are taken again"]


def _check_new(folder: RunFolder, config: Config, committed: list[int]) -> None:
    """Raise `RequestError` where a folder without a config.toml is not fit for a new run."""
    if committed:
        raise RequestError(
            f"run folder {folder.path} holds checkpoints but not the config.toml of their run; copy it there, or "
            f"name another --run-dir"
        )
    _refuse_lost(folder, None)
    names = os.listdir(folder.path) if folder.path.exists() else []
    strangers = sorted(set(names) - BEFORE_A_RUN)
    if strangers:
        raise RequestError(
            f"run folder {folder.path} holds no run, but other things ({', '.join(strangers[:LISTED])}); "
            f"name another --run-dir"
        )
    if config.resume.isdecimal():
        raise RequestError(
            f"run folder {folder.path} holds no run to go back to step {config.resume} of; leave --resume out to start "
            f"one, or name the --run-dir of the run"
        )


def _note_new(folder: RunFolder, config: Config) -> None:
    """Note what has no effect on a run that begins."""
    if config.data.changed:
        folder.notes.append("data.changed is true, and the run begins here: its mixture is the first one")


def _refuse_lost(folder: RunFolder, config: Config | None) -> None:
    """Raise `RequestError` if the run there, which has no step, has ever saved one; `config` is its own."""
    seals = [step for steps in folder.step_dirs() for step in steps.seals()]
    shown = what_shows_a_save(folder.path, seals, config)
    if shown:
        raise RequestError(
            f"run folder {folder.path} holds no step of its run, but {shown}; bring {folder.checkpoints} back (a "
            f"volume may not be mounted), or name another run folder, or move {folder.path} away to start from the "
            f"beginning"
        )


def _continuing(folder: RunFolder, config: Config, steps: list[int]) -> Config:
    """Return `config` as it continues the run in `folder`, which has saved `steps`. Raises `RequestError`."""
    old = folder.own_config()
    if config.precision == "auto":
        config = config.model_copy(update={"precision": old.precision})
    if config.init_from and not config.data.tokenizer:
        config = config.with_knobs({"data.tokenizer": old.data.tokenizer})
    from_step = int(config.resume) if config.resume.isdecimal() else max(steps)
    if config.data.mixture and not config.data.tokenizer and _has_own_tokenizer(folder, config, old):
        config = config.with_knobs({"data.tokenizer": folder.tokenizer_source})
    _check_left_out(folder, config, old, from_step)
    asked = as_asked(config)
    longer = lengthened(old, asked, from_step)
    if longer:
        _check_mixture(folder, config, from_step)
        folder.notes.append(longer)
        return config.with_knobs({"optimizer.warmup": old.optimizer.warmup})
    refused = refusal(old, asked)
    if refused:
        raise RequestError(f"run folder {folder.path} holds a run with another config: {refused}")
    _check_mixture(folder, config, from_step)
    _check_finished(folder, config, old)
    return config


def _check_left_out(folder: RunFolder, config: Config, old: Config, step: int) -> None:
    """Raise `RequestError` where other batches are left out than before `step`, from where the run goes on."""
    problem = other_batches(old, config, step)
    if problem:
        raise RequestError(f"run folder {folder.path} holds a run with another config: {problem}")
    if config.data.skip != old.data.skip:
        there, here = old.data.skip or "empty", config.data.skip or "empty"
        folder.notes.append(f"data.skip was {there} and is {here}: other batches are left out after step {step}")


def _check_finished(folder: RunFolder, config: Config, old: Config) -> None:
    """Raise `RequestError` where a run has ended, and data are asked for that nobody will compare with its own."""
    other = other_data(old, config)
    requested = 0 if config.train.epochs else config.train.steps
    if other and config.resume == "auto" and StepDir(folder.checkpoints).last_step(requested, thorough=False):
        raise RequestError(
            f"run folder {folder.path} holds a run that is finished with other data: {other}; name another --run-dir"
        )


def _has_own_tokenizer(folder: RunFolder, config: Config, old: Config) -> bool:
    """Return whether a run that goes on with another mixture, now or before, reads it with its own tokenizer.

    One that is trained on other sources would make other tokens of the same texts.
    """
    changed = config.data.changed and not old.data.tokenizer
    return folder.tokenizer.is_file() and (changed or old.data.tokenizer == folder.tokenizer_source)


def _check_mixture(folder: RunFolder, config: Config, step: int) -> None:
    """Raise `RequestError` before any data are read, where a step was saved with another mixture than asked for."""
    asked = asked_by(config)
    there = None
    # A step that cannot be read is dealt with where the run looks for its start.
    with suppress(*WRONG_CONTENT):
        there = MixtureRecord.of(StepDir(folder.checkpoints).facts(step))
    if asked and there:
        check_mixture(there, asked, config.data.changed, config.train.global_batch_size, folder.path)
