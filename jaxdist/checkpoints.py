"""`python -m jaxdist.checkpoints RUN`: what a run has saved, and whether it is whole. Listing needs no jax."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxdist.cluster.process_env import check_alone
from jaxdist.config import RequestError
from jaxdist.request import Extra, arguments, check_output, run
from jaxdist.training.checkpoint.step_dir import UNREADABLE_SEAL, UNSEALED, WRONG_CONTENT, StepDir
from jaxdist.training.run_dir import RunFolder
from jaxdist.values import Checkpoint, FileName

DESCRIPTION = (
    "List the checkpoints of a run: size, time, the mesh that wrote them, and whether they are whole. Exit code 1 when "
    "--verify finds one that is damaged or has no checksums."
)
EXTRAS = [
    Extra("verify", False, "Read every file and compare it with its checksum; without it sizes alone are compared."),
    Extra(
        "prune",
        False,
        "Remove half-written steps, older ones than checkpoint.keep keeps, and damaged or set-aside "
        "ones where a later step is whole; list the others.",
    ),
    Extra(
        "export",
        "",
        "Write the weights into this .safetensors file, one tensor for each parameter of each layer.",
        FileName,
    ),
    Extra("force", False, "Let --export replace a file that exists; never one of a run, nor what is no regular file."),
    Extra("checkpoint", "latest", "Which step to export: latest, best (by validation loss) or a number.", Checkpoint),
    Extra("json", False, "Print one JSON object and nothing else."),
]

KINDS = {"": "newest", "best": "best", "aside": "aside", "aside/best": "aside"}
"""Folders in `checkpoints/`, and what their steps are."""


def main(argv: list[str] | None = None) -> int:
    knobs = ("checkpoint.keep", "checkpoint.keep_every")
    asked = arguments(argv, "checkpoints", DESCRIPTION, positional="RUN", extras=EXTRAS, knobs=knobs)
    check_alone("checkpoints")
    extras, folder = asked.extras, asked.config.run_dir
    RunFolder(folder).check_layout()
    result: dict[str, Any] = {"run": str(folder)}
    if extras["export"]:
        result["export"] = export(asked.config, extras["checkpoint"], Path(extras["export"]), extras["force"])
    if extras["prune"]:
        result |= prune(folder, asked.config.checkpoint.keep, asked.config.checkpoint.keep_every)
    rows = result["checkpoints"] = list(listing(folder, extras["verify"]))
    print(json.dumps(result) if extras["json"] else "\n".join(told(result)))
    return int(extras["verify"] and any(row["state"] in ("damaged", "unsealed") for row in rows))


def listing(folder: Path, thorough: bool) -> Iterator[dict[str, Any]]:
    """Every committed step, `state` being `whole` (its checksums hold, if `thorough`), `complete` (its sizes do, if
    not), `damaged`, or `unsealed` (it has no checksums)."""
    for shelf, kind in shelves(folder):
        for step in shelf.steps():
            damage = shelf.damage(step, thorough)
            row = {"step": step, "kind": kind, "bytes": _size(shelf, step), "state": _state(damage, thorough)}
            yield row | {"damage": damage} | _facts(shelf, step)


def shelves(folder: Path) -> list[tuple[StepDir, str]]:
    """Where the steps of a run lie, and of what kind they are."""
    run = RunFolder(folder).identity()
    return [(StepDir(folder / "checkpoints" / name, run), kind) for name, kind in KINDS.items()]


def _state(damage: str | None, thorough: bool) -> str:
    if damage in (UNSEALED, UNREADABLE_SEAL):
        return "unsealed"
    if damage is not None:
        return "damaged"
    return "whole" if thorough else "complete"


def _size(shelf: StepDir, step: int) -> int | None:
    """Bytes on disk; None where they cannot be listed."""
    try:
        return shelf.size(step)
    except OSError:
        return None


def _facts(shelf: StepDir, step: int) -> dict[str, Any]:
    """When, and on which mesh, a step was saved; None where it does not tell."""
    try:
        facts = shelf.facts(step)
    except WRONG_CONTENT:
        facts = {}
    if shelf.wrong_facts(step):
        facts = {}
    return {name: facts.get(name) for name in ("time", "mesh", "processes")}


def told(result: dict[str, Any]) -> Iterator[str]:
    """The result for people."""
    if "export" in result:
        yield "wrote {path}: {tensors} tensors, {bytes:,} bytes, of step {step}".format(**result["export"])
    for path in result.get("removed", ()):
        yield f"removed {path}"
    for path, reason in result.get("left", {}).items():
        yield f"left {path}: {reason}"
    if not result["checkpoints"]:
        yield f"{result['run']} has saved no checkpoint"
        return
    width = max(len(row["mesh"] or "mesh") for row in result["checkpoints"])
    form = f"{{:>8}} {{:<6}} {{:>13}}  {{:<19}}  {{:<{width}}}  {{}}".format
    yield form("step", "", "size", "saved", "mesh", "state").rstrip()
    for row in result["checkpoints"]:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row["time"])) if row["time"] else "?"
        kind = "" if row["kind"] == "newest" else row["kind"]
        state = row["state"] + (f": {row['damage']}" if row["damage"] else "")
        size = "?" if row["bytes"] is None else f"{row['bytes'] / 1e6:,.2f} MB"
        yield form(row["step"], kind, size, when, row["mesh"] or "?", state)


def prune(folder: Path, newest: int, every: int) -> dict[str, Any]:
    """Remove what no run would resume from: `removed` are the paths, `left` has a reason for each bad step that stays.

    A damaged step goes only where the run has a later one that is whole; one set aside also where the run has come as
    far again. One without checksums is never removed for that. Raises `RequestError` while a run trains in `folder`.
    """
    removed: list[Path] = []
    left: dict[str, str] = {}
    with RunFolder(folder).locked():
        found = [(shelf, kind, step, shelf.damage(step)) for shelf, kind in shelves(folder) for step in shelf.steps()]
        whole = [step for _, kind, step, damage in found if kind != "aside" and damage is None]
        furthest = max(whole, default=-1)
        for shelf, kind, step, damage in found:
            if kind != "aside" and damage is None:
                continue
            superseded = step <= furthest if kind == "aside" else step < furthest
            if not superseded:
                left[str(shelf.path(step))] = f"{damage or 'it is set aside'}, and no later step is whole"
            elif kind != "aside" and damage in (UNSEALED, UNREADABLE_SEAL):
                left[str(shelf.path(step))] = f"{damage}; a run that resumes from it reads it back"
            else:
                shelf.remove(step)
                removed.append(shelf.path(step))
        for shelf, kind in shelves(folder):
            shelf.clear()
            if kind == "newest":
                removed += [shelf.path(step) for step in shelf.keep(newest, every)]
            if kind == "best":
                removed += [shelf.path(step) for step in shelf.keep(1)]
    return {"removed": [str(path) for path in removed], "left": left}


def export(config: Any, which: str, path: Path, force: bool) -> dict[str, Any]:
    """Write the weights of a step into `path`. Raises `RequestError` before they are read, if that cannot be."""
    check_output("--export", path, "weights.safetensors")
    if path.exists() and not force:
        raise RequestError(f"--export '{path}' exists; name another file, or add --force to replace it")
    from jaxdist.training.checkpoint.export import write_safetensors

    return write_safetensors(config, which, path)


if __name__ == "__main__":
    run(main)
