"""`python -m jaxdist.checkpoints RUN`: what a run has saved, and whether it is whole. Listing needs no jax."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxdist.cluster.place import check_alone
from jaxdist.config import RequestError
from jaxdist.request import Extra, arguments, run
from jaxdist.training.shelf import Shelf

DESCRIPTION = (
    "List the checkpoints of a run: size, time, the mesh that wrote them, and whether they are whole. Exit code 1 when "
    "--verify finds a damaged one."
)
EXTRAS = [
    Extra("verify", False, "Read every file and compare it with its checksum; without it sizes alone are compared."),
    Extra("prune", False, "Remove what is damaged, half-written or set aside, and what checkpoint.keep does not keep."),
    Extra("export", "", "Write the weights into this .safetensors file, one tensor for each parameter of each layer."),
    Extra("checkpoint", "latest", "Which step to export: latest, best (by validation loss) or a number."),
    Extra("json", False, "Print one JSON object and nothing else."),
]

KINDS = {"": "newest", "best": "best", "aside": "aside"}
"""Folders in `checkpoints/`, and what their steps are."""


def main(argv: list[str] | None = None) -> int:
    knobs = ("checkpoint.keep", "checkpoint.keep_every")
    asked = arguments(argv, "checkpoints", DESCRIPTION, positional="RUN", extras=EXTRAS, knobs=knobs)
    check_alone("checkpoints")
    extras, folder = asked.extras, asked.config.run_dir
    result: dict[str, Any] = {"run": str(folder)}
    if extras["export"]:
        result["export"] = export(asked.config, extras["checkpoint"], Path(extras["export"]))
    if extras["prune"]:
        result["removed"] = prune(folder, asked.config.checkpoint.keep, asked.config.checkpoint.keep_every)
    rows = result["checkpoints"] = list(listing(folder, extras["verify"]))
    print(json.dumps(result) if extras["json"] else "\n".join(told(result)))
    return int(extras["verify"] and any(row["state"] == "damaged" for row in rows))


def listing(folder: Path, thorough: bool) -> Iterator[dict[str, Any]]:
    """Every step that is there under its name, `state` being `whole` (its checksums hold, if `thorough`), `complete`
    (its sizes do, if not), `damaged` or `unsaved`."""
    for name, kind in KINDS.items():
        shelf = Shelf(folder / "checkpoints" / name)
        for step in shelf.steps():
            damage = shelf.damage(step, thorough)
            fine = "whole" if thorough else "complete"
            state = fine if damage is None else "damaged" if step in shelf.sealed() else "unsaved"
            row = {"step": step, "kind": kind, "bytes": shelf.size(step), "state": state, "damage": damage}
            yield row | _facts(shelf, step)


def _facts(shelf: Shelf, step: int) -> dict[str, Any]:
    """When, and on which mesh, a step was saved; None where it does not tell."""
    try:
        facts = shelf.facts(step)
        return {"time": facts.get("time"), "mesh": facts.get("mesh"), "processes": facts.get("processes")}
    except (OSError, ValueError, AttributeError):
        return {"time": None, "mesh": None, "processes": None}


def told(result: dict[str, Any]) -> Iterator[str]:
    """The result for people."""
    if "export" in result:
        yield "wrote {path}: {tensors} tensors, {bytes:,} bytes, of step {step}".format(**result["export"])
    for path in result.get("removed", ()):
        yield f"removed {path}"
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
        yield form(row["step"], kind, f"{row['bytes'] / 1e6:,.2f} MB", when, row["mesh"] or "?", state)


def prune(folder: Path, newest: int, every: int) -> list[str]:
    """Remove what no run would go on from, and return it. Raises `RequestError` while a run trains in `folder`."""
    from jaxdist.training.folder import RunFolder

    removed = []
    with RunFolder(folder).locked():
        for name, kind in KINDS.items():
            shelf = Shelf(folder / "checkpoints" / name)
            gone = shelf.clear()
            useless = [step for step in shelf.sealed() if kind == "aside" or shelf.damage(step)]
            for step in useless:
                shelf.remove(step)
            gone += useless + shelf.keep(newest if kind == "newest" else 1, every if kind == "newest" else 0)
            removed += [str(shelf.path(step)) for step in sorted(gone)]
    return removed


def export(config: Any, which: str, path: Path) -> dict[str, Any]:
    """Write the weights of a step into `path`. Raises `RequestError` before they are read, if that cannot be."""
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise RequestError(f"export '{path}' is no file in a folder that exists; name one such as weights.safetensors")
    from jaxdist.training.export import write_safetensors

    return write_safetensors(config, which, path)


if __name__ == "__main__":
    run(main)
