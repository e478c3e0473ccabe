"""A scaling study as a picture for a report: speed-up beside the ideal, and efficiency."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxdist.bench.laws import amdahl, gustafson
from jaxdist.bench.scaling_text import setting
from jaxdist.colours import BLUE, GREEN, PINK, RED
from jaxdist.files import write_picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = (BLUE, RED, GREEN, PINK)
"""Of ZeRO 0 to 3, told apart by colour-blind eyes too (Okabe & Ito 2008); so are their markers, on paper."""

MARKERS = "osD^"
CURVE = 50
"""Points of a law's curve."""


def draw(told: Mapping[str, Any], path: Path) -> None:
    """Two panels over the number of devices, which is logarithmic: a PNG at `path`. Bars are quartiles."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.5, 4.8), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    counts = sorted({one["devices"] for one in told["measurements"]})
    _ideal(left, right, counts)
    for stage in dict.fromkeys(one["zero"] for one in told["measurements"]):
        _stage(left, right, told, stage)
    what = "speed-up" if told["mode"] == "strong" else "scaled speed-up"
    base = "1 device" if counts[0] == 1 else f"{counts[0]} devices"
    left.set(ylabel=f"{what} against {base}", yscale="log", title=f"{told['mode']} scaling")
    right.set(ylabel="efficiency", title="efficiency")
    right.set_ylim(bottom=0)
    slowest = min(one["speed_up_quartiles"][0] for one in told["measurements"])
    ticks = [0.5**i for i in range(1, 10) if 0.5**i > slowest] + [count / counts[0] for count in counts]
    left.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    for axes in (left, right):
        axes.set(xlabel="devices", xscale="log")
        axes.set_xticks(counts, [str(count) for count in counts])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    left.legend(fontsize="small")
    model, batch, devices, versions = setting(told)
    bars = f"median and quartiles of {told['repeats']} steps"
    figure.supxlabel(f"{model}, {batch}\n{devices}; {bars}; {versions}", fontsize=8, color="0.3")
    write_picture(path, figure, dpi=160)


def _ideal(left: Axes, right: Axes, counts: list[int]) -> None:
    left.plot(counts, [count / counts[0] for count in counts], "--", color="grey", linewidth=1, label="ideal")
    right.axhline(1, linestyle="--", color="grey", linewidth=1)


def _stage(left: Axes, right: Axes, told: Mapping[str, Any], stage: int) -> None:
    """The points of one ZeRO stage with their quartiles, and its law's curve where the law describes them."""
    own = [one for one in told["measurements"] if one["zero"] == stage]
    counts, ideal = [one["devices"] for one in own], [one["ideal"] for one in own]
    style = dict(color=COLOURS[stage], marker=MARKERS[stage], markersize=5, capsize=3, linewidth=1.4)
    speed = [one["speed_up"] for one in own]
    low = [one["speed_up"] - one["speed_up_quartiles"][0] for one in own]
    high = [one["speed_up_quartiles"][1] - one["speed_up"] for one in own]
    share = lambda values: [value / n for value, n in zip(values, ideal, strict=True)]
    fit = next((fit for fit in told["fits"] if fit["zero"] == stage and not fit["at_bound"]), None)
    law = f" ({fit['law']}: s = {fit['serial_fraction']:.3f})" if fit else ""
    left.errorbar(counts, speed, [low, high], label=f"ZeRO {stage}{law}", **style)
    right.errorbar(counts, share(speed), [share(low), share(high)], **style)
    if fit:
        curve = {"Amdahl": amdahl, "Gustafson": gustafson}[fit["law"]]
        finer = [(counts[-1] / counts[0]) ** (i / CURVE) for i in range(CURVE + 1)]
        points = [curve(fit["serial_fraction"], n) for n in finer]
        left.plot([n * counts[0] for n in finer], points, ":", color=COLOURS[stage], linewidth=1)
