"""Draw all-reduces: who sends which part to whom in each round, and what each algorithm costs over K."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from jaxdist.lab.reductions.algorithms import ALGORITHMS, Algorithm, pipelined_tree
from jaxdist.lab.reductions.execute import Run, apart, cpus, lay, line_of, lowered
from jaxdist.lab.reductions.messages import Message, Traffic, messages
from jaxdist.lab.reductions.orders import Fit
from jaxdist.output.pictures import BLUE, GREEN, PINK, RED, blank, write_picture
from jaxdist.planning.clusters import cluster

if TYPE_CHECKING:
    import jax
    from matplotlib.axes import Axes

NODES = 4
"""Nodes of the steps that are drawn."""

WHOLE = "#555555"
COLOURS = (BLUE, RED, GREEN, PINK)
"""Colours of the parts, which colour-blind readers can distinguish (Okabe & Ito 2008)."""

LINK = cluster("h100-ndr").across
ALPHA = LINK.latency
"""Seconds of a hop between hosts of H100s."""

BETA = 1 / LINK.bandwidth
"""Seconds of a byte over an H100's share of its host's network cards."""

CURVES = ("ring", "tree", "halving", "parameter-server")
STEPS_LEGEND = (
    "steps on 4 nodes, as they ran: a b c d are the parts of the array, grey is all of it; thick: the sum of all nodes"
)
COSTS_LEGEND = (
    f"costs: latency {1e6 * ALPHA:g} us, {1e-9 / BETA:g} GB/s each way; lines: formulas, points: messages as counted"
)

COUNTS = {
    "rounds": "messages one after the other",
    "peak": "most messages into one node in a round",
    "total": "arrays sent in all",
}
"""What the lecture compares algorithms by."""

ARRAYS = {"64 KiB": 2**16, "97.5 MiB": 97.5 * 2**20}


class Step(NamedTuple):
    """A message, and what it carries."""

    round: int
    source: int
    target: int
    parts: tuple[int, ...]
    """The parts of the array, of K."""
    summands: tuple[int, ...]
    """The nodes whose arrays are added up in it."""


def steps(names: Sequence[str], K: int = NODES) -> dict[str, list[Step]]:
    """Return the messages of each algorithm on K nodes, as they were when it ran."""
    found = _all_steps(K)
    return {name: found[name] for name in names}


@cache
def _all_steps(K: int) -> dict[str, list[Step]]:
    """Return the messages of every algorithm that runs on K nodes: a process for all of them costs little more."""
    return apart(_steps, tuple(name for name, one in ALGORITHMS.items() if not one.refusal(K)), K)


def _steps(names: Sequence[str], K: int) -> dict[str, list[Step]]:
    # One more for a server.
    devices = cpus(K + 1)
    return {name: seen(ALGORITHMS[name], K, devices) for name in names}


def seen(algorithm: Algorithm, K: int, devices: Sequence[jax.Device]) -> list[Step]:
    """Run an algorithm on K nodes, and return its messages with what they carry."""
    # Part j of node k is the number 2^k + j 2^(K+1): a sum of such numbers shows its summands and its part.
    base = 2 << K
    mesh = line_of(devices[: algorithm.nodes(K)])
    x = np.zeros((mesh.size, K), np.float32)
    x[:K] = 2 ** np.arange(K)[:, None] + base * np.arange(K)
    program = lowered(algorithm, mesh, K, return_sent=True).compile()
    _, sent = program(lay(x, mesh))
    steps = []
    for message in messages(program.as_text(), mesh).messages:
        payload = np.asarray(sent[message.send])[message.source].astype(int)
        steps.append(_read(message, payload, base))
    return steps


def _read(message: Message, payload: np.ndarray, base: int) -> Step:
    """Return parts and summands of a message from the numbers in it."""
    summands = tuple(k for k in range(base.bit_length()) if payload[0] % base >> k & 1)
    parts = tuple(int(number) // base // len(summands) for number in payload)
    return Step(message.round, message.source, message.target, parts, summands)


def draw(names: Sequence[str], runs: dict[str, Sequence[Run]], path: Path | str) -> None:
    """Draw the steps of these algorithms, and the cost over K, into a PNG: formulas as lines, `runs` as points."""
    _figure(steps(names), runs, path)


def draw_growth(name: str, found: dict[str, Fit], path: Path | str) -> None:
    """Draw the steps of an algorithm into a PNG, and below them how its counts, by name, grow with K."""
    figure = blank(7.2, 8.2)
    above, below = figure.subplots(2, 1)
    _draw_steps(above, name, steps([name])[name])
    _draw_growth(below, found)
    figure.supxlabel(textwrap.fill(f"{STEPS_LEGEND}; below, points: as counted", 100), fontsize=8, color="0.3")
    write_picture(path, figure, dpi=130)


def _figure(found: dict[str, list[Step]], runs: dict[str, Sequence[Run]], path: Path | str) -> None:
    """Draw a panel of steps for each algorithm, and below them the costs if there are `runs`."""
    columns = min(4, max(len(found), 2 if runs else 1))
    rows = -(-len(found) // columns)
    height = 4.4 * rows
    grid_rows = rows
    legend = [STEPS_LEGEND]
    # A row below the steps, for the costs.
    if runs:
        height += 4.2
        grid_rows += 1
        legend.append(COSTS_LEGEND)
    figure = blank(3.6 * columns, height)
    grid = figure.add_gridspec(grid_rows, 2 * columns)
    for place, (name, sent) in enumerate(found.items()):
        left = 2 * (place % columns)
        # One alone has the whole width.
        across = slice(left, left + 2) if len(found) > 1 else slice(None)
        _draw_steps(figure.add_subplot(grid[place // columns, across]), name, sent)
    if runs:
        for place, array in enumerate(ARRAYS):
            _draw_costs(figure.add_subplot(grid[rows, place * columns : (place + 1) * columns]), array, runs)
    text = "\n".join(textwrap.fill(line, 50 * columns) for line in legend)
    figure.supxlabel(text, fontsize=8, color="0.3")
    write_picture(path, figure, dpi=130)


def _draw_steps(axes: Axes, name: str, sent: Sequence[Step]) -> None:
    """Draw nodes side by side, rounds from top to bottom, and an arrow for each message with its parts as letters."""
    algorithm = ALGORITHMS[name]
    nodes = algorithm.nodes(NODES)
    rounds = max(step.round for step in sent)
    for node in range(nodes):
        axes.plot([node, node], [0, rounds], color="0.85", linewidth=1, zorder=0)
    for step in sent:
        # A message with the whole array needs no letters.
        if len(step.parts) == NODES:
            colour = WHOLE
            text = ""
        else:
            colour = COLOURS[step.parts[0]]
            text = "".join("abcd"[part] for part in step.parts)
        start = (step.source, step.round - 0.9)
        end = (step.target, step.round - 0.1)
        width = 2 if len(step.summands) == NODES else 0.8
        arrow = dict(arrowstyle="->", color=colour, shrinkA=0, shrinkB=0, linewidth=width)
        axes.annotate("", end, start, arrowprops=arrow)
        # Near the source, where arrows do not cross yet.
        where = [a + 0.15 * (b - a) for a, b in zip(start, end, strict=True)]
        axes.text(*where, text, color=colour, fontsize=8, ha="center", va="center", bbox=dict(pad=0.5, fc="w", ec="w"))
    node_names = [str(node) for node in range(NODES)]
    if algorithm.server:
        node_names.append("server")
    axes.set(xlim=(-0.4, nodes - 0.6), ylim=(rounds, 0), yticks=[one + 0.5 for one in range(rounds)])
    axes.set_yticklabels([str(one + 1) for one in range(rounds)])
    axes.set_xticks(range(nodes), node_names)
    axes.xaxis.tick_top()
    axes.spines[["top", "right", "left", "bottom"]].set_visible(False)
    axes.set(xlabel="node", ylabel="round")
    axes.xaxis.set_label_position("top")
    axes.set_title(f"{name}: {algorithm.about}", fontsize=9)


def _draw_growth(axes: Axes, found: dict[str, Fit]) -> None:
    """Draw counts over K, each with the order that fits it best."""
    # Two of them may be equal: the first lie below, and are larger.
    for (what, own), colour, size in zip(found.items(), COLOURS, (11, 8, 5), strict=False):
        label = f"{what}: {COUNTS[what]}, {own.order}"
        axes.plot(own.sizes, own.counts, "o-", color=colour, markersize=size, linewidth=size / 4, label=label)
    axes.set(xscale="log", yscale="log", xlabel="nodes, K", ylabel="count", title="how the counts grow with the nodes")
    sizes = [2**i for i in range(1, 7)]
    axes.set_xticks(sizes, map(str, sizes))
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")


def _draw_costs(axes: Axes, array: str, runs: dict[str, Sequence[Run]]) -> None:
    """Draw the milliseconds of an all-reduce over K, by formula and by the messages that were counted."""
    size = ARRAYS[array]
    curve = 2 ** np.linspace(1, 6, 60)
    for name, colour in zip(CURVES, COLOURS, strict=True):
        cost = [1e3 * ALGORITHMS[name].seconds(K, size, ALPHA, BETA) for K in curve]
        axes.plot(curve, cost, color=colour, linewidth=1, label=name)
        done = runs.get(name, ())
        counted = [1e3 * scaled(one.traffic, one.array_bytes, size) for one in done]
        axes.plot([one.K for one in done], counted, "o", color=colour, markersize=4)
    # In the colour of the tree: the same tree, but the array moves in pieces.
    pieces = [1e3 * pipelined_tree(K, size, ALPHA, BETA) for K in curve]
    axes.plot(curve, pieces, "--", color=COLOURS[CURVES.index("tree")], linewidth=1, label="tree, in small pieces")
    axes.set(
        xscale="log", yscale="log", xlabel="nodes, K", ylabel="time, ms", title=f"all-reduce of an array of {array}"
    )
    axes.set_xticks([2**i for i in range(1, 7)], [str(2**i) for i in range(1, 7)])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")


def scaled(traffic: Traffic, array_bytes: int, size: float) -> float:
    """Return the seconds that the messages would take if the array had `size` bytes."""
    return traffic.seconds(ALPHA, BETA * size / array_bytes)
