"""Draw pictures of the lecture that no other module draws. matplotlib is imported only where something is drawn."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from jaxdist.output.pictures import BLUE, GREEN, GREY, ORANGE, RED, blank, write_picture
from jaxdist.planning.hardware import CARDS, GPUS

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


def roofline(path: Path) -> None:
    """Draw the FLOP/s that GPUs reach over the FLOPs for each byte of memory (Williams et al. 2009)."""
    figure = blank(7, 4.2)
    axes = figure.add_subplot(
        xscale="log",
        yscale="log",
        xlabel="FLOPs for a byte of memory",
        ylabel="bfloat16 FLOP/s at most",
        title="roofline: left of its bend a GPU waits for memory",
    )
    intensity = np.logspace(-1, 4, 200)
    modules = {name: gpu for name, gpu in GPUS.items() if name not in CARDS}
    for number, (name, gpu) in enumerate(modules.items()):
        colour = f"C{number}"
        # From here on, the peak is the limit and not the memory.
        bend = gpu.peak / gpu.bandwidth
        line = np.minimum(gpu.peak, gpu.bandwidth * intensity)
        axes.plot(intensity, line, color=colour, label=f"{name}: bend at {bend:.0f}")
        axes.plot(bend, gpu.peak, "o", color=colour)
    for words, place in (("matrix x vector", 1), ("square product of 4096", 4096 / 3)):
        axes.axvline(place, color=GREY, linestyle=":")
        axes.text(place, axes.get_ylim()[0] * 1.5, words, rotation=90, ha="right", color=GREY)
    axes.legend()
    axes.grid(alpha=0.3)
    write_picture(path, figure, dpi=DPI)


def cube(path: Path, model: int, layers: Sequence[int], data: int = 2) -> None:
    """Draw a box for each device of data x model x pipeline; `layers` are the layers of each stage."""
    figure = blank(10, 4.6)
    axes = figure.add_subplot(projection="3d")
    filled = np.ones((len(layers), data, model), bool)
    colours = np.empty(filled.shape, object)
    # The stages with the most layers set the pace, so they have a colour of their own.
    for stage, count in enumerate(layers):
        colours[stage] = BLUE if count == max(layers) else ORANGE
    axes.voxels(filled, facecolors=colours, edgecolor="white", linewidth=0.2, clip_on=False)
    axes.set_box_aspect((6, 1.2, 2), zoom=1.4)
    axes.set(ylabel=f"data: {data}", zlabel=f"model: {model}")
    axes.set_xlabel(f"pipeline: {len(layers)} stages", labelpad=20)
    axes.set_yticks(range(data + 1))
    axes.view_init(elev=22, azim=-62)
    stages = Counter(layers)
    split = ", ".join(f"{stages[count]} stages of {count}" for count in sorted(stages, reverse=True))
    axes.set_title(f"{filled.size} devices, {sum(layers)} layers: {split} (blue: the most layers)", fontsize=10)
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
