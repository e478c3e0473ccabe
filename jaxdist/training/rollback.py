"""Going back before repeated spikes, when a run is started again (`fault.rollbacks`): to where, and how often. No jax.

run.json has `diverged`, the steps that have ended the run, until its next start, and `rollbacks`, a row for each time
that the run went back. What the run does then is what `--resume STEP --data.skip A-B` does, to the bit.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, Field, TypeAdapter, ValidationError

from jaxdist.config import Config, RequestError
from jaxdist.config.left_out import batches_of, joined, problem_of
from jaxdist.files import write_whole
from jaxdist.output.streams import clock
from jaxdist.output.units import counted
from jaxdist.training.checkpoint.step_dir import StepDir
from jaxdist.training.run_dir import RunFolder
from jaxdist.training.run_facts import FILE, run_facts

DIVERGED = "diverged"
ROLLBACKS = "rollbacks"

LONGEST = 1000
"""Characters of a reason that are kept."""

Read = TypeVar("Read")


def _batches(text: str) -> str:
    if not text or problem_of(text):
        raise ValueError(problem_of(text) or "is empty")
    return text


Step = Annotated[int, Field(strict=True, ge=0, le=10**9)]
Batches = Annotated[str, Field(max_length=LONGEST), AfterValidator(_batches)]
Reason = Annotated[str, Field(max_length=LONGEST)]


@dataclass(frozen=True)
class Trouble:
    """What has ended a run: steps whose batches may be the cause."""

    first: Step
    """The first of these steps."""
    left_out: Batches
    """Their batches, as `data.skip` has them."""
    reason: Reason


@dataclass(frozen=True)
class Rollback:
    """A run that went back."""

    step: Step
    """The step that it went on from; 0 for the beginning."""
    left_out: Batches
    """The batches that it leaves out since then."""
    reason: Reason
    time: Annotated[str, Field(max_length=40)]


@dataclass(frozen=True)
class Outlook:
    """How a run that has diverged goes on."""

    step: int | None
    """The step that it goes back to; None if it does not."""
    text: str
    """Where it goes on, after the word "from"; or why it does not, as a clause."""


_TROUBLE = TypeAdapter(Trouble)
_ROLLBACK = TypeAdapter(Rollback)


def trouble_of(config: Config, steps: range, reason: str) -> Trouble:
    """Return what `steps` of a run of `config` are to its next start."""
    return Trouble(steps[0], batches_of(config.data.skip, steps[0] - 1, steps[-1]), reason[:LONGEST])


def note(folder: RunFolder, trouble: Trouble) -> None:
    """Write to run.json what has ended the run. Raises `OSError`."""
    _write(folder.path, run_facts(folder.path) | {DIVERGED: asdict(trouble)})


def rollbacks_of(run_dir: Path) -> list[Rollback]:
    """Return when the run in this folder went back; a row that is damaged is left out."""
    return _rows(run_facts(run_dir))


def outlook(folder: RunFolder, config: Config, trouble: Trouble | None = None) -> Outlook | None:
    """Return how the run goes on after `trouble`, by default that of run.json; None without any, or if not asked."""
    facts = run_facts(folder.path)
    trouble = trouble or _parsed(_TROUBLE, facts.get(DIVERGED))
    most = config.fault.rollbacks
    if trouble is None or not most:
        return None
    done = len(_rows(facts))
    if done >= most:
        return Outlook(
            None,
            f"the run has gone back {counted(done, 'time')}, and fault.rollbacks is {most}: raise it, or begin a run "
            f"with a lower optimizer.learning_rate",
        )
    sealed = StepDir(folder.checkpoints).sealed()
    before = [step for step in sealed if step < trouble.first]
    if not before and any(steps.steps() for steps in folder.step_dirs()):
        return Outlook(
            None,
            f"no checkpoint before step {trouble.first} is left to go back to: raise checkpoint.keep in a new "
            f"--run-dir, with --data.skip {trouble.left_out}",
        )
    step = max(before, default=0)
    where = f"step {step}" if step else "the beginning"
    return Outlook(step, f"{where}, without batches {trouble.left_out} (rollback {done + 1} of at most {most})")


def going_on(folder: RunFolder, config: Config) -> Config:
    """Return `config` as it continues the run in `folder`: without the batches of its rollbacks, and of a new one.

    A request that goes back by itself (`--resume STEP`) is left as it is. Raises `RequestError` where the run has
    diverged and may not go back once more.
    """
    if config.resume != "auto":
        return config
    facts = run_facts(folder.path)
    skip = config.data.skip
    for done in _rows(facts):
        skip = joined(skip, done.left_out)
    resume = config.resume
    found = outlook(folder, config)
    if found:
        trouble = _TROUBLE.validate_python(facts[DIVERGED])
        if found.step is None:
            raise RequestError(f"run folder {folder.path} holds a run that has ended: {trouble.reason}; {found.text}")
        skip = joined(skip, trouble.left_out)
        folder.notes.append(f"goes on from {found.text}, because it has ended: {trouble.reason}")
        if found.step:
            resume = str(found.step)
    if (skip, resume) == (config.data.skip, config.resume):
        return config
    return config.with_knobs({"data.skip": skip, "resume": resume})


def settle(folder: RunFolder, config: Config, first: int) -> None:
    """Note that the run goes on from step `first`; it has gone back if the batches of the trouble are left out.

    Rollbacks whose batches `config` does not leave out were undone by a person. Raises `OSError`.
    """
    facts = run_facts(folder.path)
    trouble = _parsed(_TROUBLE, facts.get(DIVERGED))
    skip = config.data.skip
    rows = [one for one in _rows(facts) if joined(skip, one.left_out) == skip]
    if trouble and first < trouble.first and joined(skip, trouble.left_out) == skip:
        rows.append(Rollback(first, trouble.left_out, trouble.reason, clock()))
    settled = {name: value for name, value in facts.items() if name not in (DIVERGED, ROLLBACKS)}
    if rows:
        settled[ROLLBACKS] = [asdict(one) for one in rows]
    if facts and settled != facts:
        _write(folder.path, settled)


def _rows(facts: Mapping[str, Any]) -> list[Rollback]:
    rows = facts.get(ROLLBACKS)
    parsed = [_parsed(_ROLLBACK, row) for row in rows] if isinstance(rows, list) else []
    return [row for row in parsed if row is not None]


def _parsed(parser: TypeAdapter[Read], value: object) -> Read | None:
    """Return what run.json holds, if it is of that form."""
    if value is None:
        return None
    try:
        return parser.validate_python(value)
    except ValidationError:
        return None


def _write(run_dir: Path, facts: Mapping[str, Any]) -> None:
    write_whole(run_dir / FILE, json.dumps(facts) + "\n")
