"""The picture of runs side by side: losses over steps, tokens and hours. matplotlib is imported to draw it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from jaxdist.output.pictures import BLACK, BLUE, GREEN, GREY, ORANGE, PINK, RED, SKY, blank, literal, write_picture
from jaxdist.training.comparison import ComparedRun, Point

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = (BLUE, RED, GREEN, ORANGE, SKY, PINK, BLACK, GREY)

STYLES = ("-", "--", ":", "-.")
"""A further run gets the next style, where all colours are taken."""


def plot_comparison(runs: Sequence[ComparedRun], picture: Path) -> None:
    """Draw the training loss of each run as a line, and its validation loss as dots, in three panels."""
    figure = blank(15, 4.8)
    by_step, by_unit, by_hour = figure.subplots(1, 3, sharey=True)
    kinds = dict.fromkeys(f"{run.unit}s" for run in runs if run.unit)
    _draw(by_step, runs, lambda point: point.step)
    _draw(by_unit, runs, lambda point: point.units)
    _draw(by_hour, runs, lambda point: point.seconds / 3600)
    by_step.set(xlabel="step", ylabel="loss: lines of training, dots of validation")
    by_unit.set(xlabel=", ".join(kinds) or "tokens")
    by_hour.set(xlabel="hours of steps")
    by_step.legend(fontsize="small")
    write_picture(picture, figure, dpi=120)


def _draw(axes: Axes, runs: Sequence[ComparedRun], place: Callable[[Point], float | None]) -> None:
    """Draw the losses of all runs; `place` returns where a point lies from left to right, if that is known."""
    for number, run in enumerate(runs):
        colour = COLOURS[number % len(COLOURS)]
        style = STYLES[number // len(COLOURS) % len(STYLES)]
        label = literal(run.name)
        for points, marks in ((run.training, style), (run.validation, "o")):
            placed = [(place(point), point.loss) for point in points if place(point) is not None]
            if placed:
                axes.plot(*zip(*placed, strict=True), marks, color=colour, linewidth=1, markersize=4, label=label)
                # The dots of a run share the entry of its line.
                label = "_"
    axes.grid(alpha=0.3)
