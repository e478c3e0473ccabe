"""Pictures of a run."""

from __future__ import annotations

import json
from pathlib import Path


def plot_loss(metrics: Path, picture: Path, unigram: float) -> None:
    """Draw training and validation loss over steps from metrics.jsonl, with the unigram entropy as a line."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    lines = [json.loads(line) for line in metrics.read_text("utf-8").splitlines()]
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot(xlabel="step", ylabel="loss (nats per token)", title=metrics.parent.name)
    for name, style in (("loss", "-"), ("validation_loss", "o-")):
        points = [(line["step"], line[name]) for line in lines if line.get(name) is not None]
        if points:
            axes.plot(*zip(*points, strict=True), style, markersize=4, label=name.replace("_", " "))
    axes.axhline(unigram, color="grey", linestyle="--", linewidth=1, label="unigram entropy of the held-out part")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(picture, dpi=120)
