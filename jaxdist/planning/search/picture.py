"""A plan as a picture: where the time and the memory of the best go, how it goes on with more devices, and when a
pipeline computes what."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from jaxdist.colours import BLACK, GREY, MEMORY, TIME
from jaxdist.files import write_picture
from jaxdist.mesh import PIPELINE
from jaxdist.planning.pipelines import pipeline_of
from jaxdist.planning.search.estimate import Estimate, layout_of
from jaxdist.planning.search.plan import Plan

if TYPE_CHECKING:
    from matplotlib.axes import Axes

GIB = 2**30
ROWS = 6
"""Of the ranked ones."""

LANES = 16
"""Micro-batches of a timeline at most: of more, the middle is like what is drawn."""


def draw(plan: Plan, more: Sequence[tuple[int, Estimate | str]], path: Path) -> None:
    """A PNG at `path`; `more` are the first of the plans for other numbers of devices, a panel where there are any."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = 3 if more else 2
    figure = Figure(figsize=(4.4 * panels, 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    time, held, *scaled = figure.subplots(1, panels)
    best = plan.ranked[:ROWS]
    names = [f"{one.config.mesh}\nZeRO {one.config.parallel.zero}" for one in best]
    _stack(time, names, [one.parts for one in best], 1.0, TIME)
    time.set(ylabel="seconds of a step", title="predicted time")
    _stack(held, names, [one.memory.persistent | one.memory.transient for one in best], GIB, MEMORY)
    held.axhline(plan.cluster.memory / GIB, color=GREY, linestyle="--", linewidth=1, label="usable")
    held.set(ylabel="GiB per device, the same in all stages", title="predicted memory")
    for axes in (time, held):
        axes.tick_params(axis="x", labelrotation=30, labelsize="small")
        axes.set_ylim(top=1.35 * axes.get_ylim()[1])
        axes.legend(fontsize="x-small", ncols=2, loc="upper left")
    for axes in scaled:
        _scaling(axes, more)
    figure.suptitle(f"{plan.devices} x {plan.cluster.name}: predicted, not measured", fontsize="medium")
    write_picture(path, figure, dpi=130)


def _stack(
    axes: Axes, names: Sequence[str], bars: Sequence[Mapping[str, float]], unit: float, colours: Mapping[str, str]
) -> None:
    """A bar of parts for each name, in `unit`; parts too small to be seen are left out."""
    bottom = [0.0] * len(names)
    seen = 0.005 * max(sum(bar.values()) for bar in bars) / unit
    for part in bars[0]:
        heights = [bar[part] / unit for bar in bars]
        if max(heights) > seen:
            axes.bar(range(len(names)), heights, bottom=bottom, label=part, color=colours[part])
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    axes.set_xticks(range(len(names)), names, ha="right", rotation_mode="anchor")


def _scaling(axes: Axes, more: Sequence[tuple[int, Estimate | str]]) -> None:
    """Throughput over the number of devices at the same batch, beside what the smallest would make of more."""
    found = [(count, one.tokens_per_second) for count, one in more if isinstance(one, Estimate)]
    axes.set(xlabel="devices", ylabel="tokens per second", xscale="log", yscale="log", title="more devices, same batch")
    if not found:
        return
    counts, rates = zip(*found, strict=True)
    ideal = [rates[0] * count / counts[0] for count in counts]
    axes.plot(counts, ideal, "--", color=GREY, linewidth=1, label="ideal")
    axes.plot(counts, rates, "o-", color=BLACK, label="the best plan")
    for count, rate, most in zip(counts, rates, ideal, strict=True):
        axes.annotate(
            f"{rate / most:.0%}", (count, rate), textcoords="offset points", xytext=(4, -12), fontsize="small"
        )
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.minorticks_off()
    axes.legend(fontsize="small")


def draw_timeline(one: Estimate, path: Path) -> None:
    """When each stage computes what, as a PNG; none where there are no stages."""
    from jaxdist.parallel.pipeline import timeline
    from jaxdist.parallel.pipeline.schedules import make

    if one.shape[PIPELINE] == 1:
        return
    pipe = pipeline_of(one.config, layout_of(one.config, one.shape, one.cluster))
    schedule = pipe.schedule
    shown = make(schedule.name, schedule.stages, min(schedule.micro_batches, LANES), schedule.virtual)
    timeline.picture(shown, path, pipe.times)
