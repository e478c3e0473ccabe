"""Draw schedules, as time goes in lockstep: one row per rank, F, B and W with the number of the micro-batch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from jaxdist.output.pictures import BLUE, GREEN, ORANGE, blank, write_picture
from jaxdist.output.units import counted
from jaxdist.parallel.pipeline.schedules import Schedule
from jaxdist.parallel.pipeline.simulate import EQUAL, Column, Times, bubble, columns, costs

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {"F": BLUE, "B": ORANGE, "W": GREEN}
IDLE = "#e9e9e9"
DARK = 0.2
"""Below this luminance, white letters are easier to read than black ones."""
WIDTH = 14
"""Of a picture, in inches."""


@dataclass(frozen=True)
class Bar:
    """One unit."""

    rank: int
    kind: str
    chunk: int
    """Virtual index."""
    micro: int
    start: float
    length: float
    column: int
    """The number of its column among `columns`."""


def bars(schedule: Schedule, times: Times = EQUAL) -> list[Bar]:
    """Return every unit with its place in time."""
    all_columns = columns(schedule, times)
    column_of = {(column.tick, kind): i for i, column in enumerate(all_columns) for kind in column.kinds}
    cost = costs(schedule, times)
    S = schedule.stages
    result = []
    for kind, ticks in schedule.units.items():
        for (g, m), tick in np.ndenumerate(ticks):
            column = column_of[tick, kind]
            result.append(Bar(g % S, kind, g // S, m, all_columns[column].start, cost[kind], column))
    return result


def text(schedule: Schedule, width: int = 120) -> str:
    """Draw a schedule for a terminal of `width` columns: one cell for each slot of a tick, wrapped where they are many.

    `F3` is the forward pass of micro-batch 3, `F3b` that of the rank's second chunk; a dot is a rank that waits.
    """
    letters = "abcdefghijklmnopqrstuvwxyz" if schedule.virtual > 1 else [""]
    all_columns = columns(schedule, EQUAL)
    cells = [["."] * len(all_columns) for _ in range(schedule.stages)]
    for bar in bars(schedule):
        cells[bar.rank][bar.column] = f"{bar.kind}{bar.micro}{letters[bar.chunk % len(letters)]}"
    margin = len(f"rank {schedule.stages - 1} ")
    cell_width = max(len(cell) for row in [*cells, [str(schedule.ticks)]] for cell in row) + 1
    fit = max(1, (width - margin) // cell_width)
    rows = {"tick": _tick_numbers(all_columns, fit)}
    for rank, row in enumerate(cells):
        rows[f"rank {rank}"] = row
    parts = []
    for begin in range(0, len(all_columns), fit):
        lines = []
        for name, row in rows.items():
            line = name.ljust(margin) + "".join(cell.ljust(cell_width) for cell in row[begin : begin + fit])
            lines.append(line.rstrip())
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def _tick_numbers(all_columns: list[Column], fit: int) -> list[str]:
    """Return the number of the tick above its first column, and above the first column of each line."""
    numbers = []
    for i, column in enumerate(all_columns):
        is_new = i % fit == 0 or all_columns[i - 1].tick != column.tick
        numbers.append(str(column.tick) if is_new else "")
    return numbers


def picture(schedules: Schedule | Sequence[Schedule], path: Path | str, times: Times = EQUAL) -> None:
    """Write a PNG with one panel for each schedule, all with the same scale of time."""
    write_picture(path, figure(schedules, times), dpi=150)


def figure(schedules: Schedule | Sequence[Schedule], times: Times = EQUAL) -> Figure:
    """Return a figure with one panel for each schedule, all with the same scale of time."""
    if isinstance(schedules, Schedule):
        schedules = [schedules]
    longest = max(bubble(schedule, times).lockstep for schedule in schedules)
    heights = [0.32 * schedule.stages + 0.85 for schedule in schedules]
    result = blank(WIDTH, sum(heights) + 0.5)
    panels = result.subplots(len(schedules), squeeze=False, height_ratios=heights)[:, 0]
    for schedule, axes in zip(schedules, panels, strict=True):
        _draw(axes, schedule, times, longest)
    _legend(result, schedules)
    return result


def _draw(axes: Axes, schedule: Schedule, times: Times, longest: float) -> None:
    """Draw one panel. The grey under the bars is the time that a rank waits."""
    cost = bubble(schedule, times)
    ranks = range(schedule.stages)
    points = 0.95 * 72 * WIDTH / longest
    axes.barh(ranks, [cost.lockstep] * len(ranks), height=0.9, color=IDLE)
    # Bars of one colour are drawn together: thousands of bars one by one take half a minute.
    alike = defaultdict(list)
    for bar in bars(schedule, times):
        colour = shade(bar.kind, bar.chunk, schedule.virtual)
        alike[bar.rank, colour].append((bar.start, bar.length))
        # Numbers stand where they have the room.
        if bar.length * points > 4 + 5 * len(str(bar.micro)):
            middle = bar.start + bar.length / 2
            ink = "white" if _luminance(colour) < DARK else "black"
            axes.text(middle, bar.rank, str(bar.micro), ha="center", va="center", fontsize=8, color=ink)
    for (rank, colour), spans in alike.items():
        axes.broken_barh(spans, (rank - 0.45, 0.9), facecolors=colour, edgecolors="white", linewidth=0.6)
    shown = _tick_labels(columns(schedule, times), 14 / points, longest)
    axes.set_xticks(list(shown), [str(tick) for tick in shown.values()], fontsize=7)
    axes.set(xlim=(0, longest), ylim=(schedule.stages - 0.5, -0.5), xlabel="tick", ylabel="rank", yticks=ranks)
    axes.spines[["top", "right", "left", "bottom"]].set_visible(False)
    virtual = f", {schedule.virtual} virtual" if schedule.virtual > 1 else ""
    title = (
        f"{schedule.name}: {schedule.stages} stages{virtual}, {counted(schedule.micro_batches, 'micro-batch')}; "
        f"bubble {cost.share:.1%} of the time"
    )
    if f"{cost.free_share:.1%}" != f"{cost.share:.1%}":
        title += f", {cost.free_share:.1%} if no rank waits for a tick to end"
    axes.set_title(title, loc="left", fontsize=10)


def _luminance(colour: tuple[float, float, float]) -> float:
    """Return how light a colour is, from 0 to 1, nearly as WCAG 2 defines it."""
    return sum(weight * part**2.2 for weight, part in zip((0.2126, 0.7152, 0.0722), colour, strict=True))


def _tick_labels(all_columns: list[Column], room: float, longest: float) -> dict[float, int]:
    """Return start -> number of those ticks whose labels have `room`, a length of time, between them."""
    starts: dict[int, float] = {}
    for column in all_columns:
        starts.setdefault(column.tick, column.start)
    shown: dict[float, int] = {}
    for tick, start in starts.items():
        if start >= max(shown, default=-longest) + room:
            shown[start] = tick
    return shown


def shade(kind: str, chunk: int, virtual: int) -> tuple[float, float, float]:
    """Return the colour of a unit: the full one for the first chunk of a rank, a lighter one for each further chunk."""
    pale = 0.5 * chunk / max(1, virtual - 1)
    red, green, blue = (int(COLOURS[kind][i : i + 2], 16) / 255 for i in (1, 3, 5))
    return red + (1 - red) * pale, green + (1 - green) * pale, blue + (1 - blue) * pale


def _legend(figure: Figure, schedules: Sequence[Schedule]) -> None:
    from matplotlib.patches import Patch

    backward = []
    if not all(schedule.split for schedule in schedules):
        backward.append("backward")
    if any(schedule.split for schedule in schedules):
        backward.append("gradient of the input")
    meanings = {"F": "forward", "B": " or ".join(backward), "W": "gradient of the weights"}
    patches = []
    for kind, meaning in meanings.items():
        virtual = max((schedule.virtual for schedule in schedules if kind in schedule.units), default=0)
        for chunk in range(virtual):
            suffix = f", chunk {chunk}" if virtual > 1 else ""
            patches.append(Patch(color=shade(kind, chunk, virtual), label=f"{kind} {meaning}{suffix}"))
    patches.append(Patch(color=IDLE, label="waits"))
    figure.legend(handles=patches, loc="outside upper right", ncols=min(len(patches), 6), fontsize=8, frameon=False)
