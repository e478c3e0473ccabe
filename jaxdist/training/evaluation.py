"""Judge weights by the loss on held-out data, by the losses of files, or by multiple-choice questions."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Float

from jaxdist.cluster.consensus import check_alike, leader_first
from jaxdist.cluster.heartbeat import AWAITING, READING, VALIDATING
from jaxdist.cluster.job import Job
from jaxdist.config import Config, NotFinite, RequestError
from jaxdist.data.held_out import HeldOut, open_held_out
from jaxdist.data.multiple_choice import NAMED, Question, Rows, results, rows_of, scored
from jaxdist.data.naming.paths import paths_of
from jaxdist.output.units import rounded
from jaxdist.training.console import Screen
from jaxdist.training.data_progress import DataProgress
from jaxdist.training.file_losses import file_losses, together
from jaxdist.training.leader_knows import knowing
from jaxdist.training.reference import refer
from jaxdist.training.restore import Trained
from jaxdist.training.run import Run
from jaxdist.training.run_dir import RunFolder
from jaxdist.training.scoring import log_probabilities
from jaxdist.training.starting import initial_weights
from jaxdist.training.task_text import TextTask
from jaxdist.training.validation import OF_SOURCE, losses_of_sources
from jaxdist.weights.inheriting import check_tokenizer
from jaxdist.weights.source import stored_at


class Judgement(NamedTuple):
    """What was found, in words and as numbers."""

    lines: list[str]
    figures: dict[str, Any]
    """By name, for JSON; all of them are finite."""


def on_held_out(trained: Trained, job: Job, stride: int | None) -> Judgement:
    """Judge by the loss on the held-out part of the run's data; with a `stride` rolling, also over an incomplete row.

    Raises `NotFinite` where it is no number.
    """
    open_data(trained, job)
    run = trained.run
    with jax.set_mesh(run.mesh):
        if stride is None:
            metrics = run.validate(trained.params, trained.variables, 0, partial(job.note, VALIDATING))
        else:
            assert isinstance(run.task, TextTask)
            parts = run.task.rolling_parts(stride)
            metrics = run.measure_parts(trained.params, trained.variables, parts, partial(job.note, VALIDATING))
    assert metrics is not None
    for name, value in metrics.items():
        _check_finite(trained, f"the {name} on the held-out part", value)
    baseline = run.task.baseline()
    units = f"{run.task.loss_unit}s"
    windows = _windows(run, stride)
    sources = losses_of_sources(metrics)
    metrics = {name: value for name, value in metrics.items() if not name.startswith(OF_SOURCE)}
    others = {name: value for name, value in metrics.items() if name not in ("loss", "batches", units)}
    percentages = "".join(f"  {name} {_shown(name, value)}" for name, value in others.items())
    line = (
        f"{_weights_of(trained)}  validation loss {metrics['loss']:.4f} nats per {run.task.loss_unit} over "
        f"{rounded(metrics[units])} {units}{windows}{percentages}  ({run.task.baseline_name} {baseline:.4f})"
    )
    figures: dict[str, Any] = {
        "step": trained.step,
        **metrics,
        "baseline": baseline,
        "baseline_name": run.task.baseline_name,
    }
    if not run.config.model.images:
        figures["stride"] = stride or run.config.model.sequence
    if sources:
        figures["sources"] = sources
    lines = [f"{name}  validation loss {loss:.4f} nats per {run.task.loss_unit}" for name, loss in sources.items()]
    return Judgement([*lines, line], figures)


def on_files(trained: Trained, job: Job, stride: int | None = None) -> Judgement:
    """Judge by the loss of each file that data.validation_path names, and of all of them together.

    With a `stride` it is rolling. Raises `NotFinite` for a loss that is no number.
    """
    run = trained.run
    if run.config.train.learns_pairs:
        raise RequestError(
            f"'{run.config.folder}' has learned pairs of answers, and data.validation_path is judged as text; leave it "
            "out, or give pairs as --data.path"
        )
    model = run.config.model
    data = run.config.data
    given = stored_at(run.config.folder).given_tokenizer(data.tokenizer)
    files: list[HeldOut] = []

    def read() -> None:
        for path in paths_of(data.validation_path, data.text):
            opened = open_held_out(
                path,
                given,
                model.vocab,
                model.documents_apart,
                run.task.progress,
                data.dtype,
                data.text,
                data.skips,
            )
            files.append(opened)

    _read_first(trained, job, read)
    _tell(job, *(file.note for file in files))
    check_alike("data", " ".join(file.fingerprint for file in files), "let all processes read the same files")
    with jax.set_mesh(run.mesh):
        apart = stride or model.sequence
        losses = file_losses(run, trained.params, trained.variables, files, apart, partial(job.note, VALIDATING))
    for file, loss in zip(files, losses, strict=True):
        _check_finite(trained, f"the loss of '{file.path}'", loss.loss)
    whole = together(losses)
    lines = []
    if len(files) > 1:
        lines = [f"{file.path}  {loss}" for file, loss in zip(files, losses, strict=True)]
    lines.append(f"{_weights_of(trained)}  validation {whole}{_windows(run, stride)}")
    of_each = [{"path": str(file.path), **loss.figures()} for file, loss in zip(files, losses, strict=True)]
    return Judgement(lines, {"step": trained.step, **whole.figures(), "stride": apart, "files": of_each})


def encoded(config: Config, questions: list[Question], apart: bool, skip: bool) -> Rows:
    """Return the rows of the questions, alike in all processes; `apart` and `skip` are as for `rows_of`.

    Raises `RequestError` if there is no tokenizer, and for questions that cannot be scored.
    """
    given = stored_at(config.folder).given_tokenizer(config.data.tokenizer)
    if given is None:
        raise RequestError(f"'{config.folder}' has no tokenizer to read questions with; give its --data.tokenizer")
    rows = rows_of(questions, given.load(), given.special, config.model.sequence, apart, skip)
    check_alike("questions", rows.fingerprint, "let all processes read the same file")
    return rows


def on_questions(trained: Trained, job: Job, rows: Rows) -> Judgement:
    """Judge by the answers to multiple-choice questions, whose rows `encoded` returns. Raises `NotFinite`."""
    questions = rows.questions
    _tell(job, rows.note)
    with jax.set_mesh(trained.run.mesh):
        found = log_probabilities(trained.run, trained.params, rows, partial(job.note, VALIDATING))
    _check_scores(trained, questions, found)
    score = scored(questions, found)
    line = f"{_weights_of(trained)}  {score}  of {len(questions)} questions"
    if rows.cut:
        line += f"  ({rows.cut} of them cut on the left to model.sequence {trained.run.config.model.sequence})"
    if rows.spanning:
        line += f"  (in {rows.spanning} of them a token spans the join of context and choice)"
    if rows.left_out:
        line += f"  ({len(rows.left_out)} more left out, which cannot be scored)"
    figures = {
        "step": trained.step,
        "questions": len(questions),
        "cut": rows.cut,
        "spanning": rows.spanning,
        "left_out": [{"line": question.line, "why": why} for question, why in rows.left_out],
        **score._asdict(),
        "results": results(questions, found),
    }
    return Judgement([line], figures)


def _check_scores(trained: Trained, questions: list[Question], found: Float[np.ndarray, " n"]) -> None:
    """Raise `NotFinite` with a sentence for each question that has a choice whose score is NaN or infinite."""
    wrong = []
    place = 0
    for question in questions:
        scores = found[place : place + len(question.choices)]
        place += len(question.choices)
        bad = np.flatnonzero(~np.isfinite(scores))
        if bad.size:
            wrong.append(f"choice {bad[0]} of {question.where} has the log probability {scores[bad[0]]}")
    if wrong:
        raise NotFinite(
            *wrong[:NAMED],
            f"{len(wrong)} of {len(questions)} questions cannot be answered with the {_weights_of(trained)}; "
            f"{trained.run.against_overflow}",
        )


def open_data(trained: Trained, job: Job) -> None:
    """Read the data to validate on, and tokenize it on first use; the leader does so before the other processes."""
    task = trained.run.task
    task.begun = trained.data

    def read() -> None:
        _ = task.data
        # The leader reads what tells it, and the others hear that.
        task.ask({} if trained.data is None else {"data": trained.data})

    _read_first(trained, job, read)
    if trained.data is None:
        check_tokenizer(trained.run.config.folder, trained.run.config.data.tokenizer)
    elif not task.is_of(trained.data):
        if job.env.leader:
            print(f"note: this is not the data that the run was trained on{task.kept}", file=sys.stderr)
        # The loss is comparable only with the tokenizer of the run.
        tokenizer = RunFolder(trained.run.config.folder).tokenizer_source
        leader_first("tokens of the run's tokenizer", partial(task.keep, tokenizer))
    check_alike("data", task.fingerprint, "let all processes read the same files")
    with jax.set_mesh(trained.run.mesh):
        refer(trained.run, partial(initial_weights, trained.run), note=partial(job.note, VALIDATING))


def _tell(job: Job, *notes: str | None) -> None:
    """Let the leader print the notes that there are."""
    for note in notes:
        if note and job.env.leader:
            print(f"note: {note}", file=sys.stderr)


def _read_first(trained: Trained, job: Job, read: Callable[[], None]) -> None:
    """Call `read` in the leader and then in the other processes, and show how far it is."""

    def noted() -> None:
        job.note(READING)
        read()

    screen = Screen()
    trained.run.task.progress = DataProgress(partial(job.note, READING), screen if job.env.leader else None)
    job.note(READING if job.env.leader else AWAITING)
    try:
        leader_first("tokens", partial(knowing, noted))
    finally:
        screen.pause()


def _weights_of(trained: Trained) -> str:
    """Return the words for what is judged."""
    if trained.step is None:
        return f"weights of {trained.run.config.folder}"
    return f"step {trained.step}"


def _windows(run: Run, stride: int | None) -> str:
    """Return the words for how a text was cut; empty for images."""
    if run.config.model.images:
        return ""
    if stride is None:
        return f" in windows of {run.config.model.sequence}"
    return f" in windows of {run.config.model.sequence} rolling by {stride}"


def _shown(name: str, value: float) -> str:
    """Return a figure beside the loss: a share in percent, another as it is."""
    return f"{value:.2%}" if name == "accuracy" else f"{value:.4f}"


def _check_finite(trained: Trained, what: str, value: float) -> None:
    """Raise `NotFinite` for a figure that is NaN or infinite; `what` says which one it is."""
    if not math.isfinite(value):
        raise NotFinite(f"{what} is {value} with the {_weights_of(trained)}; {trained.run.against_overflow}")
