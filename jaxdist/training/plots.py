"""Pictures of a run."""

from __future__ import annotations

from pathlib import Path

from jaxdist.output.pictures import BLUE, GREY, RED, blank, literal, write_picture
from jaxdist.training import history
from jaxdist.training.validation import OF_SOURCE, losses_of_sources

DRAWN = 8
"""Sources of which the validation loss is drawn at most."""

FEW = 20
"""Up to this number of points each is drawn as a dot."""


def plot_loss(metrics: Path, picture: Path, nats: float, name: str, unit: str) -> None:
    """Draw training and validation loss over steps from metrics.jsonl.

    A horizontal line shows the baseline: `nats` per `unit`, called `name`, such as the unigram entropy.
    """
    from matplotlib.ticker import MaxNLocator

    lines = history.read(metrics)
    figure = blank(7, 4.5)
    axes = figure.add_subplot(xlabel="step", ylabel=f"loss (nats per {unit})", title=literal(metrics.parent.name))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    for kind, colour in (("loss", BLUE), (history.VALIDATED, RED)):
        points = [(line["step"], line[kind]) for line in lines if line.get(kind) is not None]
        if not points:
            continue
        style = "-"
        if kind == history.VALIDATED or len(points) < FEW:
            # A line of one point would show nothing.
            style = "o-"
        axes.plot(*zip(*points, strict=True), style, color=colour, markersize=4, label=kind.replace("_", " "))
    sources = dict.fromkeys(source for line in lines for source in losses_of_sources(line, "validation_"))
    for source in list(sources)[:DRAWN]:
        key = f"validation_{OF_SOURCE}{source}"
        points = [(line["step"], line[key]) for line in lines if line.get(key) is not None]
        if points:
            label = literal(f"validation loss of {source}")
            axes.plot(*zip(*points, strict=True), "o:", linewidth=1, markersize=2, label=label)
    axes.axhline(nats, color=GREY, linestyle="--", linewidth=1, label=f"{name} of the held-out part")
    axes.grid(alpha=0.3)
    axes.legend()
    write_picture(picture, figure, dpi=120)
