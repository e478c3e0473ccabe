"""Plot a plan: time and memory of the best candidates, scaling to more devices, and the timeline of a pipeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from jaxdist.output.pictures import BLACK, GREY, MEMORY, TIME, blank, write_picture
from jaxdist.planning.pipelines import pipeline_of
from jaxdist.planning.search.estimate import Estimate
from jaxdist.planning.search.plan import Plan

if TYPE_CHECKING:
    from matplotlib.axes import Axes

GIB = 2**30

MOST_BARS = 6
"""Ranked candidates that are drawn."""

MOST_MICRO_BATCHES = 16
"""Micro-batches of a timeline at most: with more, the middle looks like what is drawn."""


def draw(plan: Plan, more: Sequence[tuple[int, Estimate | str]], path: Path) -> None:
    """Write a PNG to `path`.

    `more` holds the best plans for other numbers of devices; they get a panel of their own where there are any.
    """
    panels = 3 if more else 2
    figure = blank(4.4 * panels, 4.6)
    time, held, *scaled = figure.subplots(1, panels)
    best = plan.ranked[:MOST_BARS]
    names = [_name(candidate) for candidate in best]

    _stack(time, names, [candidate.parts for candidate in best], 1.0, TIME)
    time.set(ylabel="seconds of a step", title="predicted time")

    memories = [candidate.memory.persistent | candidate.memory.transient for candidate in best]
    _stack(held, names, memories, GIB, MEMORY)
    held.axhline(plan.cluster.memory / GIB, color=GREY, linestyle="--", linewidth=1, label="usable")
    held.set(ylabel="GiB per device, the same in all stages", title="predicted memory")

    for axes in (time, held):
        axes.tick_params(axis="x", labelrotation=30, labelsize="small")
        # Room for the legend above the bars.
        axes.set_ylim(top=1.35 * axes.get_ylim()[1])
        axes.legend(fontsize="x-small", ncols=2, loc="upper left")
    for axes in scaled:
        _draw_scaling(axes, more)
    figure.suptitle(f"{plan.devices} x {plan.cluster.name}: predicted, not measured", fontsize="medium")
    write_picture(path, figure, dpi=130)


def _name(candidate: Estimate) -> str:
    """Return what stands below the bar of a candidate: where it changes the loss, that too."""
    lines = [candidate.config.mesh, f"ZeRO {candidate.config.parallel.zero}"]
    if candidate.in_force:
        lines.append(candidate.in_force)
    return "\n".join(lines)


def _stack(
    axes: Axes, names: Sequence[str], bars: Sequence[Mapping[str, float]], unit: float, colours: Mapping[str, str]
) -> None:
    """Draw a bar of stacked parts for each name, in `unit`; parts too small to be seen are left out."""
    bottom = [0.0] * len(names)
    visible = 0.005 * max(sum(bar.values()) for bar in bars) / unit
    for part in bars[0]:
        heights = [bar[part] / unit for bar in bars]
        if max(heights) > visible:
            axes.bar(range(len(names)), heights, bottom=bottom, label=part, color=colours[part])
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    axes.set_xticks(range(len(names)), names, ha="right", rotation_mode="anchor")


def _draw_scaling(axes: Axes, more: Sequence[tuple[int, Estimate | str]]) -> None:
    """Plot the throughput over the number of devices at the same batch, beside linear scaling of the smallest."""
    found = [(count, best.tokens_per_second) for count, best in more if isinstance(best, Estimate)]
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


def draw_timeline(candidate: Estimate, path: Path) -> None:
    """Write a PNG of when each stage computes what; without a pipeline, write nothing."""
    from jaxdist.parallel.pipeline import timeline
    from jaxdist.parallel.pipeline.schedules import make

    if not candidate.split.pipelined:
        return
    pipe = pipeline_of(candidate.split)
    assert pipe is not None
    schedule = pipe.schedule
    micro = min(schedule.micro_batches, MOST_MICRO_BATCHES)
    shown = make(schedule.name, schedule.stages, micro, schedule.virtual)
    timeline.picture(shown, path, pipe.times)
