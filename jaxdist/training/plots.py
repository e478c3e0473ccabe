"""Pictures of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from jaxdist.output.pictures import BLUE, GREY, ORANGE, RED, SKY, blank, literal, write_picture
from jaxdist.training import history
from jaxdist.training.validation import OF_SOURCE, losses_of_sources

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DRAWN = 8
"""Sources of which the validation loss is drawn at most."""

FEW = 20
"""Up to this number of points each is drawn as a dot."""


MARGIN, ACCURACY = "reward_margin", "accuracy"
"""What is drawn of pairs of answers below their loss (`forward.preferences`)."""


class Baseline(TypedDict):
    """The loss to compare a run with, such as the unigram entropy."""

    nats: float
    name: str
    unit: str


def plot_loss(metrics: Path, picture: Path, baseline: Baseline | None) -> None:
    """Draw training and validation loss over steps from metrics.jsonl.

    A horizontal line shows the baseline, if there is one.
    """
    from matplotlib.ticker import MaxNLocator

    lines = history.read(metrics)
    of_pairs = any(line.get(MARGIN) is not None for line in lines)
    figure = blank(7, 7 if of_pairs else 4.5)
    label = f"loss (nats per {baseline['unit']})" if baseline else "loss"
    rows = 2 if of_pairs else 1
    axes = figure.add_subplot(rows, 1, 1, xlabel="step", ylabel=label, title=literal(metrics.parent.name))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    _draw(axes, lines, {"loss": BLUE, history.VALIDATED: RED})
    sources = dict.fromkeys(source for line in lines for source in losses_of_sources(line, "validation_"))
    for source in list(sources)[:DRAWN]:
        key = f"validation_{OF_SOURCE}{source}"
        points = [(line["step"], line[key]) for line in lines if line.get(key) is not None]
        if points:
            label = literal(f"validation loss of {source}")
            axes.plot(*zip(*points, strict=True), "o:", linewidth=1, markersize=2, label=label)
    if baseline:
        label = f"{baseline['name']} of the held-out part"
        axes.axhline(baseline["nats"], color=GREY, linestyle="--", linewidth=1, label=label)
    axes.grid(alpha=0.3)
    axes.legend()
    if of_pairs:
        rewards = figure.add_subplot(rows, 1, 2, xlabel="step", ylabel="reward margin (nats), accuracy")
        rewards.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        _draw(
            rewards, lines, {MARGIN: BLUE, f"validation_{MARGIN}": RED, ACCURACY: SKY, f"validation_{ACCURACY}": ORANGE}
        )
        rewards.grid(alpha=0.3)
        rewards.legend()
    write_picture(picture, figure, dpi=120)


def _draw(axes: Axes, lines: Sequence[Mapping[str, Any]], colours: Mapping[str, str]) -> None:
    """Draw each figure of the lines that has a colour."""
    for kind, colour in colours.items():
        points = [(line["step"], line[kind]) for line in lines if line.get(kind) is not None]
        if not points:
            continue
        style = "-"
        if kind.startswith("validation_") or len(points) < FEW:
            # A line of one point would show nothing.
            style = "o-"
        axes.plot(*zip(*points, strict=True), style, color=colour, markersize=4, label=kind.replace("_", " "))
