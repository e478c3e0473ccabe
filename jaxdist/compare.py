"""`python -m jaxdist.compare RUN RUN ...`: runs side by side, as a table and a picture. It does not import jax."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxdist.cluster.process_env import check_alone
from jaxdist.config import RequestError
from jaxdist.config.values import FileName
from jaxdist.output.tables import table
from jaxdist.output.units import hours, rounded
from jaxdist.process.exit_codes import DONE
from jaxdist.request import JSON, Extra, arguments, check_picture, run
from jaxdist.training import comparison

DESCRIPTION = (
    "Compare runs by what is in their folders: steps, the last and the best loss, tokens per second, hours, and the "
    "knobs in which they differ."
)
WIDE = 1e9
"""A number from which on a cell has its first digits alone."""

EXTRAS = [
    Extra("picture", "", "Draw the losses over steps, tokens and hours into this PNG file.", FileName),
    JSON,
]


def main(argv: list[str] | None = None) -> int:
    """Print runs side by side, and draw them if requested. Return the exit code."""
    request = arguments(argv, "compare", DESCRIPTION, positional="RUNS", extras=EXTRAS, knobs=())
    check_alone("compare")
    picture = request.extras["picture"]
    check_picture(picture, "runs.png")
    folders = [Path(word) for word in request.words]
    foreign = {folder: why for folder in folders if (why := comparison.why_no_run(folder))}
    missing = [why for folder, why in foreign.items() if not os.path.exists(folder)]
    if missing or len(foreign) == len(folders):
        raise RequestError(*(missing or foreign.values()))
    runs = comparison.compare([folder for folder in folders if folder not in foreign])
    if picture:
        # It imports matplotlib.
        from jaxdist.training.comparison_picture import plot_comparison

        plot_comparison(runs, Path(picture))
    result = {
        "runs": [one.figures for one in runs],
        "knobs": comparison.differing_knobs(runs),
        "notes": [*foreign.values(), *(note for one in runs for note in one.notes)],
        "picture": picture or None,
    }
    print(json.dumps(result) if request.extras["json"] else "\n".join(as_text(result)))
    return DONE


def as_text(result: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines that show the result to people."""
    heading = ("run", "steps", "loss", "validation", "best", "at step", "seen", "a second", "hours of steps", "goodput")
    yield from table([heading, *(tuple(_cells(figures)) for figures in result["runs"])], right=True)
    if result["knobs"]:
        yield ""
        rows = [(name, *(value or "?" for value in values)) for name, values in result["knobs"].items()]
        yield from table([("knob", *(figures["run"] for figures in result["runs"])), *rows])
    elif len(result["runs"]) > 1:
        yield "no knob differs among the configurations that could be read"
    yield from result["notes"]
    if result["picture"]:
        yield f"drawn in {result['picture']}"


def _cells(figures: Mapping[str, Any]) -> Iterator[str]:
    """Yield what stands in the row of a run."""
    yield figures["run"]
    yield str(figures["steps"])
    for name in ("loss", "validation_loss", "best_validation_loss"):
        yield _cell(figures[name], ".4f")
    yield _cell(figures["best_step"], "d")
    for name in ("units", "units_per_second"):
        value = figures[name]
        yield "-" if value is None else f"{rounded(round(value))} {figures['unit']}s"
    yield hours(3600 * figures["step_hours"])
    yield "-" if figures["goodput"] is None else f"{100 * figures['goodput']:.1f} %"


def _cell(value: float | None, form: str) -> str:
    if value is None:
        return "-"
    # The loss of a run that has diverged may have hundreds of digits.
    return format(value, form) if abs(value) < WIDE else f"{value:.4g}"


if __name__ == "__main__":
    run(main)
