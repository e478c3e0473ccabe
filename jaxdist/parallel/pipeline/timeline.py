"""Schedules drawn, as time goes in lockstep: one row per rank, F, B and W with the number of the micro-batch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from jaxdist.colours import BLUE, GREEN, ORANGE
from jaxdist.files import write_picture
from jaxdist.parallel.pipeline.schedules import Schedule
from jaxdist.parallel.pipeline.simulate import EQUAL, Times, bubble, columns, costs

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {"F": BLUE, "B": ORANGE, "W": GREEN}
IDLE = "#e9e9e9"
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
    """Of those of `columns`."""


def bars(schedule: Schedule, times: Times = EQUAL) -> list[Bar]:
    """Every unit, where it lies in time."""
    all_columns = columns(schedule, times)
    at = {(column.tick, kind): i for i, column in enumerate(all_columns) for kind in column.kinds}
    cost, S = costs(schedule, times), schedule.stages
    return [
        Bar(g % S, kind, g // S, m, all_columns[at[tick, kind]].start, cost[kind], at[tick, kind])
        for kind, ticks in schedule.units.items()
        for (g, m), tick in np.ndenumerate(ticks)
    ]


def text(schedule: Schedule, width: int = 120) -> str:
    """For a terminal of `width` columns: a column for each slot of a tick, wrapped where they are too many.

    `F3` is the forward pass of micro-batch 3, `F3b` that of the rank's second chunk; a dot is a rank that waits.
    """
    letter = "abcdefghijklmnopqrstuvwxyz" if schedule.virtual > 1 else [""]
    all_columns = columns(schedule, EQUAL)
    cells = [["."] * len(all_columns) for _ in range(schedule.stages)]
    for bar in bars(schedule):
        cells[bar.rank][bar.column] = f"{bar.kind}{bar.micro}{letter[bar.chunk % len(letter)]}"
    margin = len(f"rank {schedule.stages - 1} ")
    wide = max(len(cell) for row in [*cells, [str(schedule.ticks)]] for cell in row) + 1
    fit = max(1, (width - margin) // wide)
    new = lambda i: i % fit == 0 or all_columns[i - 1].tick != all_columns[i].tick
    ticks = [str(column.tick) if new(i) else "" for i, column in enumerate(all_columns)]
    rows = {"tick": ticks, **{f"rank {rank}": row for rank, row in enumerate(cells)}}
    line = lambda name, some: (name.ljust(margin) + "".join(cell.ljust(wide) for cell in some)).rstrip()
    parts = [
        "\n".join(line(name, row[begin : begin + fit]) for name, row in rows.items())
        for begin in range(0, len(all_columns), fit)
    ]
    return "\n\n".join(parts)


def picture(schedules: Schedule | Sequence[Schedule], path: Path | str, times: Times = EQUAL) -> None:
    """Write a PNG with one panel for each schedule, all with the same scale of time."""
    write_picture(path, figure(schedules, times), dpi=150)


def figure(schedules: Schedule | Sequence[Schedule], times: Times = EQUAL) -> Figure:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    schedules = [schedules] if isinstance(schedules, Schedule) else schedules
    longest = max(bubble(schedule, times).lockstep for schedule in schedules)
    heights = [0.32 * schedule.stages + 0.85 for schedule in schedules]
    result = Figure(figsize=(WIDTH, sum(heights) + 0.5), layout="constrained")
    FigureCanvasAgg(result)
    panels = result.subplots(len(schedules), squeeze=False, height_ratios=heights)[:, 0]
    for schedule, axes in zip(schedules, panels, strict=True):
        _draw(axes, schedule, times, longest)
    _legend(result, schedules)
    return result


def _draw(axes: Axes, schedule: Schedule, times: Times, longest: float) -> None:
    """One panel. The grey under the bars is what the rank waits. Numbers stand where they have the room."""
    cost, ranks = bubble(schedule, times), range(schedule.stages)
    points = 0.95 * 72 * WIDTH / longest
    axes.barh(ranks, [cost.lockstep] * len(ranks), height=0.9, color=IDLE)
    alike = defaultdict(list)  # drawn together: thousands of bars one by one take half a minute
    for bar in bars(schedule, times):
        colour = shade(bar.kind, bar.chunk, schedule.virtual)
        alike[bar.rank, colour].append((bar.start, bar.length))
        if bar.length * points > 4 + 5 * len(str(bar.micro)):
            middle, ink = bar.start + bar.length / 2, "black" if sum(colour) > 1.8 else "white"
            axes.text(middle, bar.rank, bar.micro, ha="center", va="center", fontsize=8, color=ink)
    for (rank, colour), spans in alike.items():
        axes.broken_barh(spans, (rank - 0.45, 0.9), facecolors=colour, edgecolors="white", linewidth=0.6)
    starts, shown = {}, {}
    for column in columns(schedule, times):
        starts.setdefault(column.tick, column.start)
    for tick, start in starts.items():
        if start >= max(shown, default=-longest) + 14 / points:
            shown[start] = tick
    axes.set_xticks(list(shown), list(shown.values()), fontsize=7)
    axes.set(xlim=(0, longest), ylim=(schedule.stages - 0.5, -0.5), xlabel="tick", ylabel="rank", yticks=ranks)
    axes.spines[["top", "right", "left", "bottom"]].set_visible(False)
    virtual = f", {schedule.virtual} virtual" if schedule.virtual > 1 else ""
    axes.set_title(
        f"{schedule.name}: {schedule.stages} stages{virtual}, {schedule.micro_batches} micro-batches; "
        f"bubble {cost.share:.1%} of the time, {cost.free_share:.1%} if no rank waits for a tick to end",
        loc="left",
        fontsize=10,
    )


def shade(kind: str, chunk: int, virtual: int) -> tuple[float, float, float]:
    """The colour of a kind of unit: the first chunk of a rank has it as it is, each further one is lighter."""
    pale = 0.5 * chunk / max(1, virtual - 1)
    value = [int(COLOURS[kind][i : i + 2], 16) / 255 for i in (1, 3, 5)]
    return tuple(part + (1 - part) * pale for part in value)


def _legend(figure: Figure, schedules: Sequence[Schedule]) -> None:
    from matplotlib.patches import Patch

    split = {schedule.split for schedule in schedules}
    backward = " or ".join(["backward"] * (False in split) + ["gradient of the input"] * (True in split))
    told = []
    for kind, meaning in (("F", "forward"), ("B", backward), ("W", "gradient of the weights")):
        virtual = max((schedule.virtual for schedule in schedules if kind in schedule.units), default=0)
        for chunk in range(virtual):
            suffix = f", chunk {chunk}" if virtual > 1 else ""
            told.append(Patch(color=shade(kind, chunk, virtual), label=f"{kind} {meaning}{suffix}"))
    told.append(Patch(color=IDLE, label="waits"))
    figure.legend(handles=told, loc="outside upper right", ncols=min(len(told), 6), fontsize=8, frameon=False)
