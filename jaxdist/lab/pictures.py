"""Draw pictures of the lecture that no other module draws. matplotlib is imported only where something is drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from jaxdist.output.pictures import BLACK, BLUE, GREEN, GREY, ORANGE, RED, blank, write_picture
from jaxdist.output.units import counted
from jaxdist.parallel.pipeline import timeline
from jaxdist.parallel.pipeline.schedules import Schedule
from jaxdist.parallel.pipeline.simulate import Times

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DPI = 110


def bars(columns: Mapping[str, Mapping[str, float]], unit: str, title: str, path: Path) -> None:
    """Draw a stacked bar for each column, of the parts that all columns have."""
    figure = blank(7, 4.2)
    axes = figure.add_subplot(ylabel=unit, title=title)
    names = list(columns)
    bottom = np.zeros(len(columns))
    parts = dict.fromkeys(part for column in columns.values() for part in column)
    for part, colour in zip(parts, (BLUE, ORANGE, GREEN, RED), strict=False):
        heights = np.array([column[part] for column in columns.values()])
        axes.bar(names, heights, bottom=bottom, label=part, color=colour)
        bottom += heights
    for place, total in enumerate(bottom):
        axes.text(place, total, f"{total:.1f}", ha="center", va="bottom")
    axes.margins(y=0.1)
    axes.legend()
    write_picture(path, figure, dpi=DPI)


def years(found: Mapping[str, tuple[float, float]], title: str, path: Path) -> None:
    """Draw for each GPU the years without its matrix units and with them, as bars on a logarithmic axis."""
    figure = blank(8, 0.9 + 0.75 * len(found))
    axes = figure.add_subplot(xscale="log", xlabel="years on one GPU, at its peak", title=title)
    ways = (("float32, without matrix units", BLUE), ("bfloat16, with matrix units", ORANGE))
    for number, (label, colour) in enumerate(ways):
        for place, times in enumerate(found.values()):
            at = place + (number - 0.5) * 0.38
            axes.barh(at, times[number], height=0.34, color=colour, label=label if not place else None)
            axes.text(times[number] * 1.05, at, f"{times[number]:.3g}", va="center")
    axes.set_yticks(range(len(found)), list(found))
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12 - 0.5 / len(found)), ncols=2, frameon=False)
    write_picture(path, figure, dpi=DPI)


def of_stages(counts: Sequence[int], quantity: str, title: str, path: Path) -> None:
    """Draw a square for each of a stage's `counts` things, such as versions of its weights, and their number."""
    most = max(*counts, 1)
    figure = blank(7, 0.5 * len(counts) + 1.2)
    axes = figure.add_subplot(xlim=(0, most + 0.5), ylim=(len(counts) - 0.4, -0.6), xlabel=quantity, title=title)
    for stage, count in enumerate(counts):
        axes.barh([stage] * count, [0.9] * count, left=np.arange(count) + 0.05, height=0.7, color=BLUE)
        axes.text(count + 0.12, stage, str(count), va="center")
    axes.set_xticks(range(most + 1))
    axes.set_yticks(range(len(counts)), [f"stage {stage}" for stage in range(len(counts))])
    write_picture(path, figure, dpi=DPI)


def steady(schedule: Schedule, path: Path) -> None:
    """Draw a schedule whose units all last as long, and frame each stage from its first backward unit to its last F."""
    from matplotlib.patches import Rectangle

    # A backward unit has two parts, each as long as a forward unit by default.
    figure = timeline.figure(schedule, Times(F=2))
    (axes,) = figure.axes
    for rank in range(schedule.stages):
        bars = [bar for bar in timeline.bars(schedule, Times(F=2)) if bar.rank == rank]
        first = min(bar.start for bar in bars if bar.kind == "B")
        last = max(bar.start + bar.length for bar in bars if bar.kind == "F")
        axes.add_patch(Rectangle((first, rank - 0.47), last - first, 0.94, fill=False, edgecolor=BLACK, linewidth=2.5))
    axes.set_title(
        f"{schedule.name}: {schedule.stages} stages; inside the frame, from a stage's first backward to its last "
        "forward unit, it never waits",
        loc="left",
        fontsize=10,
    )
    write_picture(path, figure, dpi=DPI)


def grid(path: Path, model: int, layers: Sequence[int]) -> None:
    """Draw a square for each device of model x pipeline; `layers` are the layers of each stage."""
    from matplotlib.patches import Rectangle

    figure = blank(11, 2.9)
    stages = len(layers)
    axes = figure.add_subplot(
        xlim=(0, stages),
        ylim=(0, model),
        aspect="equal",
        xlabel=f"pipeline: stage 1 to {stages}",
        ylabel=f"tensor: 1 to {model}",
    )
    counts = sorted(set(layers), reverse=True)
    # The stages with the most layers set the pace, and have the strongest colour.
    colours = dict(zip(counts, (BLUE, ORANGE, GREEN, RED), strict=False))
    for count in counts:
        of_count = [stage for stage, own in enumerate(layers) if own == count]
        label = f"{len(of_count)} stages of {counted(count, 'layer')}: {len(of_count) * model} devices"
        places = [(stage, rank) for stage in of_count for rank in range(model)]
        for stage, rank in places:
            axes.add_patch(Rectangle((stage + 0.1, rank + 0.1), 0.8, 0.8, color=colours[count]))
        axes.plot([], [], "s", color=colours[count], label=label)
    axes.set_xticks([stage + 0.5 for stage in (0, *range(7, stages, 8))], [1, *range(8, stages + 1, 8)])
    axes.set_yticks([])
    axes.set_title(f"{model} x {stages} = {model * stages} devices, {sum(layers)} layers; each square is a device")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.25), ncols=len(counts), frameon=False)
    write_picture(path, figure, dpi=DPI)


def column_row(path: Path, forward: int, backward: int) -> None:
    """Draw Megatron's two matmuls on two devices, with the all-reduces counted in the compiled program."""
    figure = blank(9, 3.6)
    axes = figure.add_subplot(xlim=(0, 9), ylim=(0, 4))
    axes.set_axis_off()
    for device, y in enumerate((2.6, 0.6)):
        _box(axes, 1.2, y, "x", GREY, 0.6)
        _box(axes, 2.5, y, f"A, columns {device}", BLUE)
        _box(axes, 4.3, y, "gelu", GREY, 0.8)
        _box(axes, 5.6, y, f"B, rows {device}", GREEN)
        _box(axes, 7.4, y, "part of y", GREY, 1.0)
        axes.text(0.1, y + 0.35, f"device {device}", va="center")
        for start, end in ((1.8, 2.5), (3.8, 4.3), (5.1, 5.6), (6.9, 7.4)):
            axes.annotate("", (end, y + 0.35), (start, y + 0.35), arrowprops={"arrowstyle": "->"})
    for x, count, what in ((7.9, forward, "forward"), (1.5, backward, "backward")):
        axes.annotate("", (x, 1.3), (x, 2.6), arrowprops={"arrowstyle": "<->", "color": RED, "linewidth": 2})
        axes.text(x + 0.1, 1.95, f"{what}: {count} all-reduce", color=RED, va="center")
    axes.text(4.7, 1.95, "nothing moves here", ha="center", va="center", color=GREY)
    write_picture(path, figure, dpi=DPI)


def _box(axes: Axes, x: float, y: float, text: str, colour: str, width: float = 1.3) -> None:
    from matplotlib.patches import Rectangle

    axes.add_patch(Rectangle((x, y), width, 0.7, facecolor=colour, alpha=0.35, edgecolor=colour))
    axes.text(x + width / 2, y + 0.35, text, ha="center", va="center", fontsize=9)
