"""Route a few tokens to experts on four devices, by the router and the queues that train, and draw where they go."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from jaxdist.config import ModelConfig
from jaxdist.lab.pictures import DPI
from jaxdist.models.experts import Router, route
from jaxdist.output.pictures import BLUE, GREEN, GREY, ORANGE, PINK, RED, blank, write_picture
from jaxdist.parallel.experts import queues

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DEVICES = 4
TOKENS = 6
"""Of each device."""

CONFIG = ModelConfig(family="moe", embed=16, experts=8, experts_per_token=2)
COLOURS = (BLUE, ORANGE, GREEN, PINK)
"""A device has one colour: its tokens, its experts, and the rows that it sends."""


class Routing(NamedTuple):
    """Where the tokens of all devices go."""

    choice: Int[np.ndarray, "n T k"]
    """The experts of each device's tokens."""
    length: Int[np.ndarray, "n E"]
    """The queue of each device before each expert."""

    @property
    def rows(self) -> Int[np.ndarray, "n n"]:
        """How many rows each device (first dim) sends to the experts of each device."""
        own = self.length.shape[1] // len(self.length)
        return self.length.reshape(len(self.length), -1, own).sum(axis=2)


def choose() -> Routing:
    """Route random tokens by a random router."""
    rule = Router.of(CONFIG)
    keys = jax.random.split(jax.random.key(0))
    x = jax.random.normal(keys[0], (DEVICES, TOKENS, CONFIG.embed))
    router = jax.random.normal(keys[1], (CONFIG.embed, rule.experts))
    choice = route(rule, (), x, router, jnp.zeros(rule.experts)).choice
    length = [queues(own, rule.experts).length for own in choice]
    return Routing(np.asarray(choice), np.asarray(length))


def picture(path: Path) -> None:
    """Draw the experts of each token and their loads, and the two all-to-alls that bring the tokens there and back."""
    chosen = choose()
    figure = blank(12, 5.6)
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.2))
    _choices(left, chosen)
    _exchanges(right, chosen.rows)
    write_picture(path, figure, dpi=DPI)


def _choices(axes: Axes, chosen: Routing) -> None:
    """Draw a row for each token and a column for each expert, with the number of its tokens below."""
    experts = CONFIG.experts
    loads = chosen.length.sum(axis=0)
    for device, choices in enumerate(chosen.choice):
        for token, own in enumerate(choices):
            row = device * TOKENS + token
            axes.scatter(own, [row] * len(own), marker="s", s=90, color=COLOURS[device])
    rows = DEVICES * TOKENS
    for expert, load in enumerate(loads):
        axes.text(expert, rows + 0.3, str(load), ha="center", va="center")
    axes.text(-0.8, rows + 0.3, "load", ha="right", va="center")
    for device in range(DEVICES):
        axes.text(-0.8, (device + 0.5) * TOKENS - 0.5, f"tokens of\ndevice {device}", ha="right", va="center")
        if device:
            axes.axhline(device * TOKENS - 0.5, color=GREY, linewidth=0.8)
            axes.axvline(device * experts / DEVICES - 0.5, color=GREY, linewidth=0.8)
    axes.set(xlim=(-0.6, experts - 0.4), ylim=(rows + 0.8, -0.6), yticks=[])
    axes.set_xticks(range(experts), [f"expert {expert}" for expert in range(experts)], rotation=60, ha="left")
    axes.xaxis.tick_top()
    fullest = loads.max() / loads.mean()
    axes.set_title(
        f"each token goes through {CONFIG.experts_per_token} experts, however many there are;\n"
        f"the fullest has {fullest:.2f} x the mean"
    )


def _exchanges(axes: Axes, rows: Int[np.ndarray, "n n"]) -> None:
    """Draw the devices three times, with the rows that each sends to each between them."""
    places = (0.0, 2.0, 4.0)
    titles = ("tokens", "their experts", "tokens")
    for place, title in zip(places, titles, strict=True):
        axes.text(place, -0.75, title, ha="center", va="center")
        for device in range(DEVICES):
            axes.text(
                place,
                device,
                f"device {device}",
                ha="center",
                va="center",
                bbox={"boxstyle": "round,pad=0.5", "facecolor": "white", "edgecolor": COLOURS[device], "linewidth": 2},
            )
    for source in range(DEVICES):
        for target in range(DEVICES):
            line = {"linewidth": 0.7 * rows[source, target], "color": COLOURS[source], "alpha": 0.7}
            axes.plot((places[0] + 0.4, places[1] - 0.4), (source, target), **line)
            axes.plot((places[1] + 0.4, places[2] - 0.4), (target, source), **line)
    for place, word in ((1.0, "all-to-all: dispatch"), (3.0, "all-to-all: combine")):
        axes.text(place, DEVICES - 0.35, word, ha="center", va="center", color=RED)
    axes.set(xlim=(-0.5, 4.5), ylim=(DEVICES - 0.1, -1))
    axes.set_axis_off()
    away = rows.sum() - np.trace(rows)
    axes.set_title(f"{DEVICES * TOKENS} tokens, {rows.sum()} rows: {away} go to another device, and come back")
