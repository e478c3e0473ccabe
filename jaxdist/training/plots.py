"""Pictures of a run."""

from __future__ import annotations

import json
from pathlib import Path

from jaxdist.files import write_picture


def plot_loss(metrics: Path, picture: Path, nats: float, name: str, unit: str) -> None:
    """Draw training and validation loss over steps from metrics.jsonl, and as a line `nats`, the loss of one who has
    not looked."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    lines = [json.loads(line) for line in metrics.read_text("utf-8").splitlines()]
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot(xlabel="step", ylabel=f"loss (nats per {unit})", title=metrics.parent.name)
    for kind, style in (("loss", "-"), ("validation_loss", "o-")):
        points = [(line["step"], line[kind]) for line in lines if line.get(kind) is not None]
        if points:
            axes.plot(*zip(*points, strict=True), style, markersize=4, label=kind.replace("_", " "))
    axes.axhline(nats, color="grey", linestyle="--", linewidth=1, label=f"{name} of the held-out part")
    axes.grid(alpha=0.3)
    axes.legend()
    write_picture(picture, figure, dpi=120)
