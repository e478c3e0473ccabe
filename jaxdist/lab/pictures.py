"""Draw pictures of the lecture that no other module draws. matplotlib is imported only where something is drawn."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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


def sends(schedule: Schedule, path: Path) -> None:
    """Draw a schedule of one micro-batch, with an arrow for each message between neighbours."""
    times = Times(F=2)
    figure = timeline.figure(schedule, times)
    (axes,) = figure.axes
    there = 0
    for kind, onward in (("F", 1), ("B", -1)):
        units = {bar.rank: bar for bar in timeline.bars(schedule, times) if bar.kind == kind}
        for rank, bar in units.items():
            receiver = units.get(rank + onward)
            if receiver is None:
                continue
            there += 1
            arrow = {"arrowstyle": "-|>", "color": BLACK, "linewidth": 1.8, "shrinkA": 0, "shrinkB": 0}
            start = (bar.start + 0.8 * bar.length, rank + 0.3 * onward)
            axes.annotate("", (receiver.start + 0.3 * receiver.length, rank + 0.75 * onward), start, arrowprops=arrow)
    axes.set_title(
        f"one micro-batch over {schedule.stages} stages: {there} messages, activations down and gradients up",
        loc="left",
        fontsize=10,
    )
    write_picture(path, figure, dpi=DPI)


def primitives(held: Mapping[str, Sequence[Sequence[int]]], path: Path) -> None:
    """Draw a row for each collective and a box for each device, with the numbers that it holds in the end."""
    from matplotlib.patches import Rectangle

    rows = {"before": [[rank] for rank in range(len(next(iter(held.values()))))], **held}
    figure = blank(8, 0.5 * len(rows) + 0.9)
    axes = figure.add_subplot(ylim=(len(rows) - 0.4, -0.6), title="what each device holds; blue: by what it received")
    for at, (name, devices) in enumerate(rows.items()):
        for rank, numbers in enumerate(devices):
            changed = name != "before" and numbers != [rank]
            colour = BLUE if changed else GREY
            axes.add_patch(Rectangle((rank + 0.05, at - 0.36), 0.9, 0.72, color=colour, alpha=0.45))
            axes.text(rank + 0.5, at, " ".join(map(str, numbers)), ha="center", va="center")
    axes.set_xlim(0, len(rows["before"]))
    devices = range(len(rows["before"]))
    axes.set_xticks([rank + 0.5 for rank in devices], [f"device {rank}" for rank in devices])
    axes.set_yticks(range(len(rows)), list(rows))
    axes.tick_params(length=0)
    axes.spines[["top", "right", "left", "bottom"]].set_visible(False)
    write_picture(path, figure, dpi=DPI)


def phases(bytes: Mapping[str, int], path: Path) -> None:
    """Draw a bar for each numbered phase of a step, as long as the bytes that a device holds after it."""
    figure = blank(8, 0.27 * len(bytes) + 0.9)
    axes = figure.add_subplot(xlabel="bytes on each device after the phase", title="one step of FSDP, phase by phase")
    for at, (name, held) in enumerate(bytes.items()):
        colour = BLUE
        if " gather " in name:
            colour = ORANGE
        elif " free " in name:
            colour = GREY
        axes.barh(at, held, color=colour)
        axes.text(held + 4, at, str(held), va="center", fontsize=8)
    axes.set_yticks(range(len(bytes)), list(bytes), fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.08, y=0.01)
    for label, colour in (("gathers a layer", ORANGE), ("computes or reduces", BLUE), ("frees", GREY)):
        axes.plot([], [], "s", color=colour, label=label)
    axes.legend(fontsize=8, loc="lower right")
    write_picture(path, figure, dpi=DPI)


def tokens(published: Sequence[tuple[float, float]], median: float, path: Path) -> None:
    """Draw the tokens for each parameter of compute-optimal (parameters, tokens), their median, and the rule of 20."""
    figure = blank(7, 4.2)
    axes = figure.add_subplot(
        xscale="log",
        xlabel="parameters",
        ylabel="tokens for each parameter",
        ylim=(0, 26),
        title="compute-optimal training (Hoffmann et al. 2022)",
    )
    axes.axhline(median, color=BLUE, label=f"median, {median:.1f}")
    axes.axhline(20, color=RED, linestyle="--", label="the lecture's 20")
    axes.plot([size for size, _ in published], [each / size for size, each in published], "o", color=BLACK)
    axes.legend(loc="lower right")
    write_picture(path, figure, dpi=DPI)


def speed_up(of: Callable[[float], float], devices: int, title: str, path: Path) -> None:
    """Draw the speed-up `of` a number of devices beside the ideal one."""
    figure = blank(7, 4.4)
    counts = np.linspace(1, 2 * devices, 200)
    axes = figure.add_subplot(xlabel="devices", ylabel="speed-up", title=title)
    axes.plot(counts, counts, "--", color=GREY, label="ideal")
    axes.plot(counts, [of(n) for n in counts], color=BLUE, label="Amdahl")
    axes.plot([devices], [of(devices)], "o", color=RED)
    axes.annotate(f"{of(devices):.1f}", (devices, of(devices)), (6, -14), textcoords="offset points", color=RED)
    axes.legend()
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
    axes.text(4.7, 1.95, "nothing moves here", ha="center", va="center")
    write_picture(path, figure, dpi=DPI)


def _box(axes: Axes, x: float, y: float, text: str, colour: str, width: float = 1.3) -> None:
    from matplotlib.patches import Rectangle

    axes.add_patch(Rectangle((x, y), width, 0.7, facecolor=colour, alpha=0.35, edgecolor=colour))
    axes.text(x + width / 2, y + 0.35, text, ha="center", va="center", fontsize=9)
