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
from jaxdist.output.units import counted
from jaxdist.request import Extra, Request, arguments, check_output, check_output_folder, means_folder, run
from jaxdist.request.knobs import option
from jaxdist.request.own_runs import is_of_fit, no_config
from jaxdist.training.export_target import exporting
from jaxdist.training.listing import listing, prune
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
        "Let --export replace an earlier export that has not been changed since; it replaces nothing else.",
    ),
    Extra("checkpoint", "latest", "Step to export: latest, best (by validation loss) or a number.", Checkpoint),
    Extra("json", False, "Print one JSON object and nothing else."),
]


def main(argv: list[str] | None = None) -> int:
    """Print the checkpoints of a run, after exporting or pruning them if requested. Return the exit code."""
    knobs = ("checkpoint.keep", "checkpoint.keep_every")
    request = arguments(argv, "checkpoints", DESCRIPTION, positional="RUN", extras=EXTRAS, knobs=knobs, of_fit=True)
    check_alone("checkpoints")
    config = request.config
    extras = request.extras
    _check_used(request)
    folder = config.folder
    if is_of_fit(folder):
        _check_of_fit(request)
    RunFolder(folder).check_layout()
    result: dict[str, Any] = {"run": str(folder)}
    if extras["dtype"] and not means_folder(extras["export"]):
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


def export(config: Config, extras: Mapping[str, Any]) -> dict[str, Any]:
    """Write the weights of a step, and return what was written.

    Raises `RequestError`, before reading them, if that is not possible.
    """
    given = Path(extras["export"])
    target = Path(os.path.abspath(given))
    folder = means_folder(extras["export"])
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


def _check_of_fit(request: Request) -> None:
    """Raise `RequestError` for what the folder of a run of `jaxdist.fit` does not tell."""
    if request.extras["export"]:
        raise RequestError(no_config(request.config.folder, "--export"))
    if request.extras["prune"] and "checkpoint.keep" not in request.overrides:
        raise RequestError(
            "--prune cannot know how many checkpoints this run of jaxdist.fit keeps; add --checkpoint.keep, and "
            "--checkpoint.keep_every if the script gives checkpoint_keep_every"
        )


def _check_adapter(config: Config, target: str) -> None:
    """Raise `RequestError` where --adapter has nothing to write, or nowhere to write it to."""
    if not config.model.frozen:
        raise RequestError(
            f"--adapter is for the adapters of a LoRA run, and the run in '{config.folder}' has none; leave it out to "
            f"export its weights"
        )
    if not means_folder(target):
        raise RequestError(f"--adapter writes a folder, and --export is '{target}'; add --export FOLDER/")


if __name__ == "__main__":
    run(main)
