"""The steps that a run has saved: what each is, whether it is intact, and which ones no run needs. No jax here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxdist.files import WRONG_CONTENT
from jaxdist.training.checkpoint.step_dir import UNREADABLE_SEAL, UNSEALED, StepDir
from jaxdist.training.run_dir import STEP_DIRS, RunFolder


def listing(folder: Path, thorough: bool) -> Iterator[dict[str, Any]]:
    """Yield every committed step.

    Its `state` is `whole` (its checksums match, if `thorough`), `complete` (its sizes match, if not `thorough`),
    `damaged`, or `unsealed` (it has no checksums).
    """
    for step_dir, kind in step_dirs(folder):
        for step in step_dir.steps():
            damage = step_dir.damage(step, thorough)
            yield {
                "step": step,
                "kind": kind,
                "bytes": _size(step_dir, step),
                "state": _state(damage, thorough),
                "damage": damage,
                **_facts(step_dir, step),
            }


def step_dirs(folder: Path) -> list[tuple[StepDir, str]]:
    """Return the folders that hold the steps of a run, each with the kind of its steps."""
    run = RunFolder(folder).identity()
    return [(StepDir(folder / name, run), kind) for name, kind in STEP_DIRS.items()]


def _state(damage: str | None, thorough: bool) -> str:
    if damage in (UNSEALED, UNREADABLE_SEAL):
        return "unsealed"
    if damage is not None:
        return "damaged"
    return "whole" if thorough else "complete"


def _size(step_dir: StepDir, step: int) -> int | None:
    """Return the bytes on disk, or None if the files cannot be listed."""
    try:
        return step_dir.size(step)
    except OSError:
        return None


def _facts(step_dir: StepDir, step: int) -> dict[str, Any]:
    """Return when and on which mesh a step was saved, and the base of its adapters; None for what is not recorded."""
    # The facts of a damaged step may be missing or wrong; the listing shows "?" for them.
    try:
        facts = step_dir.facts(step)
    except WRONG_CONTENT:
        facts = {}
    if step_dir.wrong_facts(step):
        facts = {}
    return {name: facts.get(name) for name in ("time", "mesh", "processes", "base")}


def prune(folder: Path, newest: int, every: int) -> dict[str, Any]:
    """Remove steps from which no run would resume.

    Returns the paths that were `removed`, and in `left` a reason for each bad step that was kept. A damaged step is
    removed only if the run has a later intact one; a step that was set aside also if the run has reached the same step
    again. A step is never removed for lack of checksums. Raises `RequestError` while a run trains in `folder`.
    """
    removed: list[Path] = []
    left: dict[str, str] = {}
    with RunFolder(folder).locked():
        steps = [
            (step_dir, kind, step, step_dir.damage(step))
            for step_dir, kind in step_dirs(folder)
            for step in step_dir.steps()
        ]
        intact = [step for _, kind, step, damage in steps if kind != "aside" and damage is None]
        furthest = max(intact, default=-1)
        for step_dir, kind, step, damage in steps:
            if kind != "aside" and damage is None:
                continue
            superseded = step <= furthest if kind == "aside" else step < furthest
            if not superseded:
                left[str(step_dir.path(step))] = f"{damage or 'it is set aside'}, and no later step is whole"
            elif kind != "aside" and damage in (UNSEALED, UNREADABLE_SEAL):
                # Without checksums it may still be intact.
                left[str(step_dir.path(step))] = f"{damage}; a run that resumes from it reads it back"
            else:
                step_dir.remove(step)
                removed.append(step_dir.path(step))
        for step_dir, kind in step_dirs(folder):
            # Remove what a process that died while saving has left.
            step_dir.clear()
            if kind == "newest":
                removed += [step_dir.path(step) for step in step_dir.keep(newest, every)]
            if kind == "best":
                removed += [step_dir.path(step) for step in step_dir.keep(1)]
    return {"removed": [str(path) for path in removed], "left": left}
