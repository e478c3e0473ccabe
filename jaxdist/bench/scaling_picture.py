"""Draw a scaling study for a report: speed-up beside the ideal, and efficiency."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxdist.bench.laws import amdahl, gustafson
from jaxdist.bench.scaling_text import setting
from jaxdist.output.pictures import BLUE, GREEN, PINK, RED, blank, write_picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = (BLUE, RED, GREEN, PINK)
"""Colours of ZeRO 0 to 3, which colour-blind readers can distinguish (Okabe & Ito 2008)."""

MARKERS = "osD^"
"""Markers of ZeRO 0 to 3, for print in black and white."""

CURVE = 50
"""Points of a law's curve."""


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Draw two panels over the number of devices, on a logarithmic axis, to a PNG; error bars are quartiles."""
    figure = blank(9.5, 4.8)
    left, right = figure.subplots(1, 2)
    measurements = result["measurements"]
    counts = sorted({one["devices"] for one in measurements})
    speed_ups = [count / counts[0] for count in counts]
    left.plot(counts, speed_ups, "--", color="grey", linewidth=1, label="ideal")
    right.axhline(1, linestyle="--", color="grey", linewidth=1)
    for stage in dict.fromkeys(one["zero"] for one in measurements):
        _draw_stage(left, right, result, stage)
    what = "speed-up" if result["mode"] == "strong" else "scaled speed-up"
    base = "1 device" if counts[0] == 1 else f"{counts[0]} devices"
    left.set(ylabel=f"{what} against {base}", yscale="log", title=f"{result['mode']} scaling")
    right.set(ylabel="efficiency", title="efficiency")
    right.set_ylim(bottom=0)
    slowest = min(one["speed_up_quartiles"][0] for one in measurements)
    # More devices can be slower than the base.
    below_one = [0.5**i for i in range(1, 10) if 0.5**i > slowest]
    ticks = below_one + speed_ups
    left.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    for axes in (left, right):
        axes.set(xlabel="devices", xscale="log")
        axes.set_xticks(counts, [str(count) for count in counts])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    left.legend(fontsize="small")
    model, batch, devices, versions = setting(result)
    bars = f"median and quartiles of {result['repeats']} steps"
    figure.supxlabel(f"{model}, {batch}\n{devices}; {bars}; {versions}", fontsize=8, color="0.3")
    write_picture(path, figure, dpi=160)


def _draw_stage(left: Axes, right: Axes, result: Mapping[str, Any], stage: int) -> None:
    """Draw the points of one ZeRO stage with their quartiles, and the curve of its law where the law describes them."""
    own = [one for one in result["measurements"] if one["zero"] == stage]
    counts = [one["devices"] for one in own]
    ideal = [one["ideal"] for one in own]
    style = dict(color=COLOURS[stage], marker=MARKERS[stage], markersize=5, capsize=3, linewidth=1.4)
    speed = [one["speed_up"] for one in own]
    low = [one["speed_up"] - one["speed_up_quartiles"][0] for one in own]
    high = [one["speed_up_quartiles"][1] - one["speed_up"] for one in own]

    def share(values: list[float]) -> list[float]:
        return [value / n for value, n in zip(values, ideal, strict=True)]

    fit = next((fit for fit in result["fits"] if fit["zero"] == stage and not fit["at_bound"]), None)
    label = f"ZeRO {stage}"
    if fit is not None:
        label += f" ({fit['law']}: s = {fit['serial_fraction']:.3f})"
    left.errorbar(counts, speed, [low, high], label=label, **style)
    right.errorbar(counts, share(speed), [share(low), share(high)], **style)
    if fit is not None:
        law = {"Amdahl": amdahl, "Gustafson": gustafson}[fit["law"]]
        # Geometric steps lie evenly on the logarithmic axis.
        finer = [(counts[-1] / counts[0]) ** (i / CURVE) for i in range(CURVE + 1)]
        points = [law(fit["serial_fraction"], n) for n in finer]
        left.plot([n * counts[0] for n in finer], points, ":", color=COLOURS[stage], linewidth=1)
