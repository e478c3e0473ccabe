"""Save a picture for the documentation: one SVG file that is right on a light page and on a dark one.

Ink and paper have two colours each. matplotlib writes the light ones, and a rule of CSS in the file replaces them where
the page around the picture is dark (`prefers-color-scheme`). All other colours are readable on both.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDTH = 7.0
"""Inches of every picture; pages show it at about 700 pixels."""

SMALLEST = 8.5
"""Points of the smallest text: 12 pixels where a picture is 700 pixels wide."""

INK = "#24292f"
"""Text, axes and arrows."""

PAPER = "#fffffe"
"""Gaps between shapes."""

FAINT = "#e3e5e8"
"""Areas behind shapes, and lines of a grid."""

DARK = {INK: "#d5d9de", PAPER: "#1e2129", FAINT: "#3a3f48"}
"""Light colour -> dark colour."""


def blank(height: float) -> Figure:
    """Return an empty figure of `height` inches whose text and lines are of ink."""
    import matplotlib

    matplotlib.use("agg")
    matplotlib.rcParams.update(
        {
            # Neither dates nor random ids: the same numbers give the same file. Text stays text, which is smaller.
            "svg.hashsalt": "jaxdist",
            "svg.fonttype": "none",
            "font.size": 9.5,
            "font.sans-serif": ["DejaVu Sans", "Verdana", "Arial"],
            "axes.titlesize": 9.5,
            "axes.titlelocation": "left",
            "axes.labelsize": 9.5,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "xtick.labelsize": SMALLEST,
            "ytick.labelsize": SMALLEST,
            "legend.fontsize": SMALLEST,
            "legend.frameon": False,
            "figure.facecolor": "none",
            "axes.facecolor": "none",
            "grid.color": FAINT,
            **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), INK),
        }
    )
    from matplotlib import pyplot

    return pyplot.figure(figsize=(WIDTH, height), layout="constrained")


def save(figure: Figure, path: Path) -> None:
    """Write the SVG with its rule for dark pages."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="svg", metadata={"Date": None})
    text = path.read_text()
    rules = []
    for light, dark in DARK.items():
        for what in ("fill", "stroke"):
            rules.append(f'[style*="{what}: {light}"] {{ {what}: {dark} !important }}')
    style = "<style>@media (prefers-color-scheme: dark) {\n" + "\n".join(rules) + "\n}</style>\n"
    # Lines without trailing spaces, which git and editors mark.
    text = re.sub(r"[ \t]+$", "", text.replace(" <defs>\n", f" {style} <defs>\n", 1), flags=re.MULTILINE)
    path.write_text(text)
