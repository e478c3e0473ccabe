"""Draw what slow networks do: gradients of which a part waits, timelines of workers, and losses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from jaxdist.lab.pictures import DPI
from jaxdist.lab.slow_networks import byte_model, top_k
from jaxdist.lab.slow_networks.timeline import Timeline, simulate
from jaxdist.output.pictures import BLACK, BLUE, GREEN, GREY, ORANGE, PINK, RED, SKY, blank, write_picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from jaxdist.lab.slow_networks.replicas import Trained

SMOOTHED = 15
"""Steps over which a loss is averaged for a curve."""

CROSSING = Fraction(1)
"""Time of a crossing in the timelines, in steps of a fast worker."""


def feedback(gradients: np.ndarray, density: float, path: Path) -> None:
    """Draw error feedback on one tensor of `gradients` [steps, R, n]: one element, the sum, and the last step."""
    kept = top_k.cross(gradients, density, bits=32)
    forgotten = top_k.cross(gradients, density, bits=32, feedback=False)
    exact = np.cumsum(gradients.mean(axis=1), axis=0)
    with_feedback = np.cumsum(kept.arrived, axis=0)
    without = np.cumsum(forgotten.arrived, axis=0)
    steps = np.arange(1, len(exact) + 1)
    figure = blank(13, 4)
    one, sums, last = figure.subplots(1, 3)

    element = _crossing_sometimes(kept.arrived)
    one.plot(steps, exact[:, element], color=BLACK, label="sum of its gradients")
    one.step(steps, with_feedback[:, element], where="post", color=BLUE, label="arrived, error feedback")
    one.step(steps, without[:, element], where="post", color=RED, label="arrived, the rest forgotten")
    one.set(xlabel="step", ylabel="sum so far", title="one element: it waits, then crosses")
    one.legend(fontsize=8)

    size = np.linalg.norm(exact, axis=1)
    sums.plot(steps, np.linalg.norm(exact - with_feedback, axis=1) / size, color=BLUE, label="error feedback: waits")
    sums.plot(steps, np.linalg.norm(exact - without, axis=1) / size, color=RED, label="forgotten: lost")
    sums.set(xlabel="step", ylabel="part of its norm", ylim=(0, None), title="the tensor: what has not arrived")
    sums.legend(fontsize=8)

    # What replica 0 could have sent in the last step, with what still waits after it.
    waited = np.abs(kept.waiting[-2, 0] + gradients[-1, 0])
    sent = kept.waiting[-1, 0] == 0
    edges = np.geomspace(waited[waited > 0].min(), waited.max(), 60)
    last.hist([waited[sent], waited[~sent]], edges, stacked=True, color=[BLUE, GREY], label=["sent", "waits"])
    last.set(
        xscale="log",
        yscale="log",
        xlabel="size of an element",
        ylabel="elements",
        title=f"the last step: {density:.0%} is sent",
    )
    last.legend(fontsize=8)
    write_picture(path, figure, dpi=DPI)


def _crossing_sometimes(arrived: np.ndarray) -> int:
    """Return an element that arrived in about every eighth step, and of these the one of which most has arrived."""
    times = np.count_nonzero(arrived, axis=0)
    distance = np.abs(times - len(arrived) / 8)
    candidates = np.flatnonzero(distance == distance.min())
    return candidates[np.argmax(np.abs(arrived[:, candidates].sum(axis=0)))]


def timelines(path: Path) -> None:
    """Draw one of four workers at half speed: synchronous, with local steps, with late gradients on a slow network."""
    durations = [Fraction(1)] * 3 + [Fraction(2)]
    ones = [1] * 4
    drawn = {
        "synchronous: every step waits for the slow worker": simulate(durations, ones, 8),
        "local: 4 steps between averages, 2 of the slow worker": simulate(durations, [4, 4, 4, 2], 2),
        "a network as slow as a step: a gradient crosses during the next step": simulate(
            durations, ones, 8, CROSSING, delay=1
        ),
    }
    longest = max(one.time for one in drawn.values())
    figure = blank(11, 7)
    for axes, (title, one) in zip(figure.subplots(3, 1, sharex=True), drawn.items(), strict=True):
        _timeline(axes, one)
        most = max(len(worker) for worker in one.steps)
        axes.set_title(
            f"{title}; {float(one.time / most):.1f} x the time of {most} steps of a fast worker; "
            f"on average a worker waits {float(one.idle):.0%} of the time",
            fontsize=9,
        )
        axes.set_xlim(0, float(longest))
    axes.set_xlabel("time, in steps of a fast worker; colours change with the round")
    write_picture(path, figure, dpi=DPI)


def _timeline(axes: Axes, of: Timeline) -> None:
    """Draw a row for each worker, and the crossings below them if they take time."""
    rows = list(of.steps)
    names = [f"worker {number}" for number in range(len(rows))]
    if any(bar.end > bar.start for bar in of.crossings):
        rows.append(of.crossings)
        names.append("network")
    for row, bars in enumerate(rows):
        colours = (BLUE, SKY) if row < len(of.steps) else (ORANGE, RED)
        for bar in bars:
            axes.barh(
                row,
                float(bar.end - bar.start),
                left=float(bar.start),
                color=colours[bar.round % 2],
                edgecolor="white",
                height=0.8,
            )
    axes.set_yticks(range(len(rows)), names)
    axes.invert_yaxis()


def averaging(synchronous: Trained, trained: Mapping[int, Trained], path: Path) -> None:
    """Draw the losses with some numbers of local steps between averages, and what each of them sends."""
    figure = blank(11, 4)
    curves, cost = figure.subplots(1, 2)
    every = {"synchronous": synchronous, **{f"H = {H}": one for H, one in trained.items()}}
    for (name, one), colour in zip(every.items(), (BLACK, BLUE, GREEN, ORANGE, RED, PINK, SKY), strict=False):
        steps = len(one.losses)
        curves.plot(*_smooth(one.losses), color=colour, label=name)
        cost.plot(one.bytes / steps, byte_model.validation_loss(one.mean), "o", color=colour, label=name)
    curves.set(xlabel="step", ylabel="nats per byte", title="loss of the replicas on their own rows")
    cost.set(
        xscale="log",
        xlabel="bytes sent per replica and step",
        ylabel="nats per byte",
        title="held-out loss of the mean of the weights",
    )
    cost.ticklabel_format(axis="y", useOffset=False)
    cost.legend(fontsize=8)
    write_picture(path, figure, dpi=DPI)


def late(trained: Mapping[str, Sequence[Trained]], rates: Sequence[float], path: Path) -> None:
    """Draw the losses of rules, `trained` at each of the rates."""
    figure = blank(11, 4)
    for at, (axes, rate) in enumerate(zip(figure.subplots(1, len(rates), sharey=True), rates, strict=True)):
        for (name, of), colour in zip(trained.items(), (BLACK, BLUE, RED), strict=False):
            axes.plot(*_smooth(of[at].losses), color=colour, label=name)
        axes.set(
            xlabel="step", ylabel="nats per byte", title=f"SGD at {rate:g}: loss of the replicas on their own rows"
        )
        axes.legend(fontsize=8)
    write_picture(path, figure, dpi=DPI)


def bytes_and_loss(trained: Mapping[str, Trained], path: Path) -> None:
    """Draw the losses with gradients that are summed by some rules, and what each of them sends."""
    figure = blank(11, 4)
    curves, cost = figure.subplots(1, 2)
    elements = byte_model.start().size
    for (name, one), colour in zip(trained.items(), (BLACK, BLUE, GREEN, ORANGE, RED, PINK, SKY), strict=False):
        curves.plot(*_smooth(one.losses), color=colour, label=name)
        sent = one.bytes / len(one.losses) / elements
        cost.plot(sent, byte_model.validation_loss(one.mean), "o", color=colour, label=name)
    curves.set(xlabel="step", ylabel="nats per byte", title="loss of the replicas on their own rows")
    cost.set(xscale="log", xlabel="bytes sent per element and step", ylabel="nats per byte", title="held-out loss")
    # The curves of rules that lose little lie on each other; the points do not.
    cost.ticklabel_format(axis="y", useOffset=False)
    cost.set_xticks([0.5, 1, 2, 4], ["0.5", "1", "2", "4"])
    cost.minorticks_off()
    cost.legend(fontsize=8)
    write_picture(path, figure, dpi=DPI)


def _smooth(losses: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return steps, and the mean loss of the replicas over the `SMOOTHED` steps before each."""
    window = np.ones(SMOOTHED) / SMOOTHED
    smooth = np.convolve(losses.mean(axis=1), window, mode="valid")
    return np.arange(SMOOTHED, SMOOTHED + len(smooth)), smooth
