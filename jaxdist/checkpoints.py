"""`python -m jaxdist.checkpoints RUN`: list, verify, prune or export checkpoints. Listing does not import jax."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxdist.cluster.process_env import check_alone
from jaxdist.config import Config, RequestError
from jaxdist.config.values import Checkpoint, FileName, WeightDtype
from jaxdist.files import WRONG_CONTENT
from jaxdist.output.units import counted
from jaxdist.request import Extra, Request, arguments, check_output, check_output_folder, run
from jaxdist.request.knobs import option
from jaxdist.training.checkpoint.step_dir import UNREADABLE_SEAL, UNSEALED, StepDir
from jaxdist.training.export_target import exporting
from jaxdist.training.run_dir import RunFolder
from jaxdist.weights.named_bases import check_not_needed

DESCRIPTION = (
    "List the checkpoints of a run: size, time, the mesh that wrote them, and whether they are intact. The exit code "
    "is 1 if --verify finds one that is damaged or has no checksums."
)
EXTRAS = [
    Extra("verify", False, "Read every file and compare its checksum; without this option only sizes are compared."),
    Extra(
        "prune",
        False,
        "Remove partially written steps, older ones than checkpoint.keep keeps, and damaged or set-aside ones if a "
        "later step is intact; list the others.",
    ),
    Extra(
        "export",
        "",
        "Write the weights to this .safetensors file, under our names in float32; or to this folder (a name that ends "
        "in /, or a folder that exists), in the form of Hugging Face's transformers.",
        FileName,
    ),
    Extra(
        "adapter",
        False,
        "Of a LoRA run, let --export FOLDER/ write the adapters alone, in the form of PEFT; without it they are merged "
        "into the weights.",
    ),
    Extra(
        "dtype",
        "",
        "Dtype of an exported folder: float32, bfloat16 or float16; empty: the dtype of the folder that the run began "
        "with, or else of the run's precision; float32 with --adapter.",
        WeightDtype,
    ),
    Extra(
        "force",
        False,
        "Let --export replace an earlier export that nobody has changed since; it replaces nothing else.",
    ),
    Extra("checkpoint", "latest", "Step to export: latest, best (by validation loss) or a number.", Checkpoint),
    Extra("json", False, "Print one JSON object and nothing else."),
]

KINDS = {"": "newest", "best": "best", "aside": "aside", "aside/best": "aside"}
"""Folders in `checkpoints/`, with the kind of the steps in each."""


def main(argv: list[str] | None = None) -> int:
    """Print the checkpoints of a run, after exporting or pruning them if requested. Return the exit code."""
    knobs = ("checkpoint.keep", "checkpoint.keep_every")
    request = arguments(argv, "checkpoints", DESCRIPTION, positional="RUN", extras=EXTRAS, knobs=knobs)
    check_alone("checkpoints")
    config = request.config
    extras = request.extras
    _check_used(request)
    folder = config.folder
    RunFolder(folder).check_layout()
    result: dict[str, Any] = {"run": str(folder)}
    if extras["dtype"] and not _is_folder(extras["export"]):
        raise RequestError(
            f"--dtype {extras['dtype']} is for a folder, and --export is '{extras['export']}'; "
            f"add --export FOLDER/, or leave --dtype out"
        )
    if extras["adapter"]:
        _check_adapter(config, extras["export"])
    if extras["export"]:
        result["export"] = export(config, extras)
    if extras["prune"]:
        result.update(prune(folder, config.checkpoint.keep, config.checkpoint.keep_every))
    rows = list(listing(folder, extras["verify"]))
    result["checkpoints"] = rows
    if extras["json"]:
        print(json.dumps(result))
    else:
        print("\n".join(as_text(result)))
    bad = any(row["state"] in ("damaged", "unsealed") for row in rows)
    return 1 if extras["verify"] and bad else 0


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
    return [(StepDir(folder / "checkpoints" / name, run), kind) for name, kind in KINDS.items()]


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


def as_text(result: dict[str, Any]) -> Iterator[str]:
    """Yield the lines that show the result to the user."""
    if "export" in result:
        yield _exported(result["export"])
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
        kind = "" if row["kind"] == "newest" else row["kind"]
        size = "?"
        if row["bytes"] is not None:
            size = f"{row['bytes'] / 1e6:,.2f} MB"
        saved = "?"
        if row["time"]:
            saved = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row["time"]))
        state = row["state"]
        if row["damage"]:
            state += f": {row['damage']}"
        yield form(row["step"], kind, size, saved, row["mesh"] or "?", state)
    yield from _bases(result["checkpoints"])


def _bases(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield a line for each base beside which adapters were trained, with the steps that hold these adapters."""
    steps: dict[str, list[str]] = {}
    for row in rows:
        if row["base"]:
            base = f"{row['base'].get('path')} of digest {row['base'].get('digest')}"
            steps.setdefault(base, []).append(str(row["step"]))
    for base, named in steps.items():
        yield f"adapters of step {', '.join(dict.fromkeys(named))} beside {base}"


def _exported(exported: Mapping[str, Any]) -> str:
    """Return the line about an export."""
    size = f"{exported['bytes']:,} bytes"
    if "files" in exported:
        size += f" of {exported['dtype']} in {counted(exported['files'], 'file')}"
    return f"wrote {exported['path']}: {exported['tensors']} tensors, {size}, of step {exported['step']}"


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


def export(config: Config, extras: Mapping[str, Any]) -> dict[str, Any]:
    """Write the weights of a step, and return what was written.

    Raises `RequestError`, before reading them, if that is not possible.
    """
    given = Path(extras["export"])
    target = Path(os.path.abspath(given))
    folder = _is_folder(extras["export"])
    if folder and config.model.images:
        raise RequestError(
            f"--export '{given}' is a folder, and transformers has no form of family {config.model.family}; name a "
            f".safetensors file"
        )
    if folder:
        check_output_folder("--export", given)
    else:
        check_output("--export", given, "weights.safetensors")
    check_not_needed(config.folder, target)
    with exporting(target, replace=extras["force"]) as new:
        # This module imports jax.
        from jaxdist.training.export import write_adapter_folder, write_folder, write_safetensors

        which = extras["checkpoint"]
        if not folder:
            return {"path": str(given), **write_safetensors(config, which, new)}
        write = write_adapter_folder if extras["adapter"] else write_folder
        return {"path": str(target), **write(config, which, new, extras["dtype"])}


def _check_used(request: Request) -> None:
    """Raise `RequestError` with a sentence for each option that has no effect without another one."""
    extras = request.extras
    written = {}
    if not extras["prune"]:
        written = {f"{option(name)} {text}": "--prune" for name, text in request.overrides.items()}
    if not extras["export"]:
        if extras["force"]:
            written["--force"] = "--export"
        if extras["checkpoint"] != "latest":
            written[f"--checkpoint {extras['checkpoint']}"] = "--export"
    if written:
        raise RequestError(
            *(f"{what} has no effect without {needed}; add that, or leave it out" for what, needed in written.items())
        )


def _check_adapter(config: Config, target: str) -> None:
    """Raise `RequestError` where --adapter has nothing to write, or nowhere to write it to."""
    if not config.model.lora_rank:
        raise RequestError(
            f"--adapter is for the adapters of a LoRA run, and the run in '{config.folder}' has none; leave it out to "
            f"export its weights"
        )
    if not _is_folder(target):
        raise RequestError(f"--adapter writes a folder, and --export is '{target}'; add --export FOLDER/")


def _is_folder(target: str) -> bool:
    """Return whether the text of --export means a folder."""
    return target.endswith("/") or os.path.isdir(target)


if __name__ == "__main__":
    run(main)
