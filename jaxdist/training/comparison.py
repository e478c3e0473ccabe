"""Runs side by side: the figures of each metrics.jsonl, and the knobs in which the configurations differ.

The folders of the runs are the only store: nothing is kept elsewhere, and nothing is written. No jax here.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from jaxdist.config import Config, RequestError, leaves
from jaxdist.files.reasons import why_closed
from jaxdist.request.knobs import unquoted, within
from jaxdist.request.own_runs import is_of_fit
from jaxdist.training import history
from jaxdist.training.goodput import goodput, starts_of
from jaxdist.training.history import PER_SECOND, number, unit_of
from jaxdist.training.run_dir import RunFolder

OF_A_START = ("run_dir", "resume", "data.changed", "cluster")
"""Knobs, or sections, that say where and how a run was started, and are not compared."""


class Point(NamedTuple):
    """A loss, and what was spent until then."""

    step: int
    units: float | None
    """Tokens, images or rows so far; None where the lines do not say."""
    seconds: float
    """Time of the steps so far, without what is between them: compiling, saving, validating, restarts."""
    loss: float


@dataclass
class ComparedRun:
    """What the folder of a run says of it."""

    name: str
    unit: str = ""
    """What its speed is given per, such as `token`; empty where no line says."""
    steps: int = 0
    """The last step that has a line; 0 where none has."""
    units: float | None = None
    """Tokens, images or rows until then; None where the lines do not say."""
    seconds: float = 0.0
    """Time of the steps until then, as in `Point`."""
    training: list[Point] = field(default_factory=list)
    validation: list[Point] = field(default_factory=list)
    goodput: float | None = None
    """The share of its wall time in steps that it has kept; None where its folder does not say."""
    per_second: float | None = None
    """Median of the speeds in its lines."""
    config: Config | None = None
    """Its configuration; None where it has none that this version reads."""
    notes: list[str] = field(default_factory=list)
    """A sentence for each thing that it lacks."""

    @property
    def figures(self) -> dict[str, Any]:
        """The row of the run, for people and for JSON; a figure that is not known is None."""
        best = min(self.validation, key=lambda point: point.loss, default=None)
        return {
            "run": self.name,
            "steps": self.steps,
            "loss": self.training[-1].loss if self.training else None,
            "validation_loss": self.validation[-1].loss if self.validation else None,
            "best_validation_loss": best.loss if best else None,
            "best_step": best.step if best else None,
            "unit": self.unit or None,
            "units": self.units,
            "units_per_second": self.per_second,
            "step_hours": self.seconds / 3600,
            "goodput": self.goodput,
        }


def why_no_run(folder: Path) -> str | None:
    """Return a sentence about a folder in which no run can be read; None for that of a run."""
    run = RunFolder(folder)
    closed = why_closed(folder)
    if closed:
        return f"run folder '{folder}' {closed}"
    if not (os.path.isfile(run.config) or os.path.isfile(run.metrics) or is_of_fit(folder)):
        return f"'{folder}' is not the folder of a run: it has neither config.toml nor metrics.jsonl"
    try:
        run.check_layout()
    except RequestError as error:
        return error.problems[0]
    return None


def compare(folders: Sequence[Path]) -> list[ComparedRun]:
    """Read the runs in `folders`, each of which may lack files; its notes say which."""
    return [read_run(folder) for folder in folders]


def read_run(folder: Path) -> ComparedRun:
    """Return what the folder of a run says of it."""
    run = ComparedRun(str(folder))
    files = RunFolder(folder)
    lines = history.read(files.metrics)
    _read_lines(run, lines)
    if lines and not run.training and not run.validation:
        run.notes.append(f"no line in metrics.jsonl of {folder} has a finite loss: it has no losses to compare")
    elif not lines:
        run.notes.append(f"{folder} has no line in metrics.jsonl that can be read: it has no losses to compare")
    if run.training and run.training[-1].step < run.steps:
        run.notes.append(
            f"{folder} has no finite loss after step {run.training[-1].step}, up to step {run.steps}: the loss that is "
            f"shown is that of step {run.training[-1].step}"
        )
    run.goodput = goodput(starts_of(files)).share
    if is_of_fit(folder):
        run.notes.append(f"{folder} holds a run of jaxdist.fit, without a config.toml: its knobs are not compared")
    elif not os.path.isfile(files.config):
        run.notes.append(f"{folder} has no config.toml: its knobs are not compared")
    else:
        try:
            run.config = files.own_config()
        except RequestError as error:
            run.notes.append(f"{error.problems[0]}: the knobs of {folder} are not compared")
    return run


def _read_lines(run: ComparedRun, lines: Iterable[Mapping[str, Any]]) -> None:
    """Add the losses and speeds of the lines of metrics.jsonl, in their order, to `run`."""
    speeds = []
    for line in lines:
        if history.VALIDATED in line:
            loss = number(line, history.VALIDATED)
            if loss is not None:
                run.validation.append(Point(line["step"], run.units, run.seconds, loss))
            continue
        run.unit = run.unit or unit_of(line)
        run.seconds += max(line["step"] - run.steps, 0) * (number(line, "step_seconds") or 0.0)
        run.steps = line["step"]
        run.units = number(line, f"{run.unit}s")
        speed = number(line, f"{run.unit}{PER_SECOND}")
        if speed is not None:
            speeds.append(speed)
        loss = number(line, "loss")
        if loss is not None:
            run.training.append(Point(run.steps, run.units, run.seconds, loss))
    if speeds:
        run.per_second = statistics.median(speeds)


def differing_knobs(runs: Sequence[ComparedRun]) -> dict[str, list[str | None]]:
    """Return the value in each run of every knob in which their configurations differ; None without a configuration."""
    values = [leaves(run.config) if run.config else None for run in runs]
    known = [of_run for of_run in values if of_run is not None]
    found: dict[str, list[str | None]] = {}
    for name in known[0] if known else ():
        if within(name, OF_A_START) or all(of_run[name] == known[0][name] for of_run in known):
            continue
        found[name] = [None if of_run is None else unquoted(of_run[name]) for of_run in values]
    return found
