"""What all pictures have: the colours, an empty figure, and how it is written. matplotlib is imported to draw one.

Colour-blind readers can distinguish the colours too (Okabe & Ito 2008; Tol 2021).
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from jaxdist.files import replacing
from jaxdist.mesh import DATA, FAST, PIPELINE

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe & Ito
BLUE = "#0072B2"
RED = "#D55E00"
GREEN = "#009E73"
ORANGE = "#E69F00"
SKY = "#56B4E9"
YELLOW = "#F0E442"
PINK = "#CC79A7"
BLACK = "#000000"
GREY = "#999999"

# Tol, "muted"
WINE = "#882255"
TEAL = "#44AA99"
INDIGO = "#332288"
OLIVE = "#999933"
SAND = "#DDCC77"
ROSE = "#CC6677"
FOREST = "#117733"
PALE = "#DDDDDD"
PURPLE = "#AA4499"

# Tol, "bright"
CYAN = "#66CCEE"
GOLD = "#B8860B"

TIME = {
    "arithmetic": BLUE,
    "waiting": GREY,
    **dict(zip(FAST, (PURPLE, CYAN, ORANGE), strict=True)),
    PIPELINE: GREEN,
    DATA: RED,
    "optimizer": WINE,
    "other": GOLD,
}
"""Parts of the time of a step."""

MEMORY = {
    "parameters": SKY,
    "optimizer": WINE,
    "their bfloat16 copy": INDIGO,
    "batch": PALE,
    "batch statistics": OLIVE,
    "in flight": BLACK,
    "errors of compression": ROSE,
    "at the last outer step": FOREST,
    "gradients": YELLOW,
    "weights in use": PINK,
    "activations": TEAL,
    "the update": SAND,
    "arguments": SKY,
    "temporaries": TEAL,
}
"""Parts of the memory of a device. It is drawn beside `TIME`, so only the optimizer has the same colour in both."""


def blank(width: float, height: float) -> Figure:
    """Return an empty figure of this size in inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def literal(name: str) -> str:
    """Return a name such that matplotlib draws it as it is, and not what is between two dollars as a formula."""
    return name.replace("$", r"\$")


def write_picture(path: Path | str, figure: Figure, dpi: int) -> None:
    """Replace the file at `path` atomically by a PNG of the figure. Raises `OSError`."""
    with replacing(Path(path)) as temporary, warnings.catch_warnings():
        # A name in a script that the font lacks is drawn as boxes.
        warnings.filterwarnings("ignore", "Glyph .* missing from font")
        figure.savefig(temporary, dpi=dpi, format="png")
