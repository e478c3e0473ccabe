"""Draw the pictures of the documentation, each of one idea, from what jaxdist computes or measures.

    python scripts/pictures.py            # all, into docs/pictures
    python scripts/pictures.py zero ring  # some

Nothing in a picture is typed in: devices lie as `jaxdist.mesh` lays them, bytes and seconds are the planner's,
schedules and blocks of the ring are those that run, and the profile is a trace of this machine.
"""

from __future__ import annotations

import argparse
import tempfile
import textwrap
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from light_dark import FAINT, INK, PAPER, SMALLEST, blank, save

from jaxdist.mesh import AXES, DATA, MODEL, PIPELINE, parse_mesh
from jaxdist.output.pictures import BLUE, GREEN, ORANGE, RED, SKY, TEAL, TIME, WINE, YELLOW

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "pictures"
ON_COLOUR = "#ffffff"
"""Text on a strong colour."""

ON_PALE = "#111111"
"""Text on a pale colour."""

CROSSES = {MODEL: RED, DATA: ORANGE, PIPELINE: GREEN}
"""Axis -> colour of what crosses it."""


def mesh() -> Figure:
    """Draw where the eight devices of 2x2x2 lie: neighbours along `model`, then `data`, then `pipeline`."""
    figure = blank(2.6)
    axes = _board(figure, 13.6, 5.8)
    for device, place in _devices("2x2x2"):
        x, y = _corner(place)
        _box(axes, x, y, 2.2, 1.3, BLUE)
        axes.text(x + 1.1, y + 0.65, f"device {device}", ha="center", va="center", color=ON_COLOUR)
    for stage in range(2):
        x = 0.6 + 7.2 * stage
        axes.text(x + 2.6, 5.3, f"{PIPELINE} {stage}", ha="center")
        _between(axes, (x + 2.2, 3.75), (x + 3.0, 3.75), CROSSES[MODEL])
        _between(axes, (x + 1.1, 2.5), (x + 1.1, 3.1), CROSSES[DATA])
    _between(axes, (5.8, 3.75), (7.8, 3.75), CROSSES[PIPELINE])
    words = {MODEL: "in every layer", DATA: "once a step", PIPELINE: "for each micro-batch"}
    _legend(figure, {f"{axis}: {words[axis]}": colour for axis, colour in CROSSES.items()})
    return figure


def three_d() -> Figure:
    """Draw which part of the model, and which rows, each of the eight devices of 2x2x2 has: 3D parallelism."""
    figure = blank(3.7)
    axes = _board(figure, 13, 7)
    axes.set_title("4 layers, each split into 4 columns of its weights: what a device holds, and its rows of the batch")
    layers, columns, rows = 4, 4, 8
    for device, place in _devices("2x2x2"):
        x = 0.5 + 3.3 * (2 * place[PIPELINE] + place[MODEL])
        y = 3.9 - 3.4 * place[DATA]
        for layer in range(layers):
            for column in range(columns):
                held = layer // 2 == place[PIPELINE] and column // 2 == place[MODEL]
                colour = (BLUE, GREEN)[place[PIPELINE]] if held else FAINT
                _box(axes, x + 0.62 * column, y + 1.65 - 0.5 * layer, 0.62, 0.5, colour)
        first = rows // 2 * place[DATA]
        axes.text(x, y + 2.35, f"device {device}", fontsize=9.5)
        axes.text(x, y - 0.2, f"rows {first} to {first + rows // 2 - 1}", va="center", fontsize=SMALLEST)
    return figure


def zero() -> Figure:
    """Draw the bytes of model states on a device, stage by stage (Rajbhandari et al. 2020, figure 1)."""
    from jaxdist.lab.checks.memory import GB, states

    devices = 64
    figure = blank(2.7)
    axes = figure.add_subplot(xlabel="GB on each device")
    kinds = (("weights", SKY, INK), ("gradients", YELLOW, INK), ("master weights and moments", WINE, ON_COLOUR))
    for stage in range(4):
        held = states(stage, devices)
        left = 0.0
        for (name, colour, _), count in zip(kinds, (held.weights, held.gradients, held.optimizer), strict=True):
            axes.barh(stage, count / GB, left=left, color=colour, height=0.7, label=name if stage == 0 else None)
            left += count / GB
        axes.text(left + 1, stage, f"{left:.1f} GB", va="center")
    axes.set_yticks(range(4), ["ZeRO 0", "ZeRO 1: optimizer", "ZeRO 2: + gradients", "ZeRO 3: + weights"])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.12 * held.parameters * 16 / GB)
    axes.set_title(f"a model of {held.parameters / 1e9:.2f} billion parameters on {devices} devices, mixed precision")
    figure.legend(loc="outside lower center", ncols=3)
    return figure


def fsdp() -> Figure:
    """Draw the bytes that a device holds after each phase of one fully sharded step, as the lab measures them."""
    from jaxdist.lab import fsdp_walkthrough

    phases = fsdp_walkthrough.measure().phases
    kinds = {
        "shards of the weights": (SKY, ("w1", "w2")),
        "a whole layer": (BLUE, ("W1", "W2")),
        "its whole gradient": (ORANGE, ("G1", "G2")),
        "shards of the gradients": (YELLOW, ("g1", "g2")),
        "rows and activations": (TEAL, ("x", "t", "h", "y", "dy", "dh", "dx")),
    }
    figure = blank(4.4)
    axes = figure.add_subplot(xlabel="bytes of a device's arrays after the phase")
    for row, phase in enumerate(phases):
        left = 0.0
        for name, (colour, arrays) in kinds.items():
            size = sum(4 * int(np.prod(phase.alive[array][0])) for array in arrays if array in phase.alive)
            axes.barh(row, size, left=left, color=colour, height=0.75, label=name if row == 0 else None)
            left += size
    axes.set_yticks(range(len(phases)), [phase.name for phase in phases])
    for label, phase in zip(axes.get_yticklabels(), phases, strict=True):
        if any(move.array_elements for move in phase.moves):
            label.set_color(RED)
            label.set_fontweight("bold")
    axes.invert_yaxis()
    axes.set_title("one step over four devices; red: an all-gather or a reduce-scatter")
    figure.legend(loc="outside lower center", ncols=3)
    return figure


def schedules() -> Figure:
    """Draw four schedules on the same four stages and eight micro-batches: what is not coloured is the bubble."""
    from jaxdist.parallel.pipeline.schedules import make
    from jaxdist.parallel.pipeline.simulate import bubble
    from jaxdist.parallel.pipeline.timeline import COLOURS, bars, shade

    made = [make("gpipe", 4, 8), make("1f1b", 4, 8), make("interleaved", 4, 8, 2), make("zb-h1", 4, 8)]
    longest = max(bubble(schedule).lockstep for schedule in made)
    figure = blank(5.6)
    panels = figure.subplots(len(made), sharex=True)
    for schedule, axes in zip(made, panels, strict=True):
        cost = bubble(schedule)
        axes.barh(range(4), [cost.lockstep] * 4, height=0.9, color=FAINT)
        for bar in bars(schedule):
            colour = shade(bar.kind, bar.chunk, schedule.virtual)
            axes.barh(bar.rank, bar.length, left=bar.start, height=0.9, color=colour, edgecolor=PAPER, linewidth=0.7)
            if bar.length >= 1:
                middle = bar.start + bar.length / 2
                ink = ON_PALE if sum(colour) > 1.8 else ON_COLOUR
                axes.text(middle, bar.rank, str(bar.micro), ha="center", va="center", fontsize=SMALLEST, color=ink)
        axes.set(ylim=(3.5, -0.5), xlim=(0, longest), yticks=range(4), ylabel="stage")
        axes.spines[:].set_visible(False)
        axes.tick_params(length=0, labelbottom=False)
        axes.set_title(f"{schedule.name}: bubble {cost.share:.0%} of the time")
    meanings = {"F": "forward", "B": "backward, or only to the input", "W": "gradient of the weights"}
    _legend(figure, {**{meanings[kind]: colour for kind, colour in COLOURS.items()}, "waiting": FAINT})
    return figure


def ring() -> Figure:
    """Draw which scores each device of a ring computes in each step, as its kernels are called."""
    from jaxdist.lab.ring import CHUNK, COLOURS, run

    ranks = 4
    done = run(ranks)
    figure = blank(6.4)
    panels = figure.subplots(ranks, ranks)
    for device in range(ranks):
        for step in range(ranks):
            axes = panels[device, step]
            source = (device - step) % ranks
            axes.fill((0, 0, 2 * ranks), (0, 2 * ranks, 2 * ranks), color=FAINT)
            for block in done.at(device, step):
                for query in np.unique(block.queries // CHUNK):
                    for key in np.unique(block.keys // CHUNK):
                        _scores(axes, int(query), int(key), COLOURS[source])
            axes.set(xlim=(0, 2 * ranks), ylim=(2 * ranks, 0), aspect="equal", xticks=[], yticks=[])
            axes.spines[:].set_visible(False)
            axes.set_xlabel(f"keys of device {source}", fontsize=SMALLEST)
            if device == 0:
                axes.set_title(f"step {step}", loc="center")
        panels[device, 0].set_ylabel(f"queries of device {device}", fontsize=SMALLEST)
    return figure


def plan() -> Figure:
    """Draw the parts of the time that the planner predicts for its best meshes."""
    from jaxdist.planning.clusters import cluster
    from jaxdist.planning.search.plan import search
    from jaxdist.request import load

    found = search(load("llama_70b", {}), 128, cluster("h100-ndr"))
    best = found.ranked[:6]
    figure = blank(3.3)
    axes = figure.add_subplot(xlabel="seconds of a step, predicted")
    shown = {}
    for row, candidate in enumerate(best):
        left = 0.0
        for part, seconds in candidate.parts.items():
            if seconds > 0.005 * candidate.seconds:
                axes.barh(row, seconds, left=left, color=TIME[part], height=0.7)
                shown[part] = TIME[part]
            left += seconds
    names = []
    for candidate in best:
        whole = f"{candidate.config.mesh.replace(',', ', ')}, ZeRO {candidate.config.parallel.zero}"
        names.append(textwrap.fill(whole, 30))
    axes.set_yticks(range(len(best)), names)
    axes.invert_yaxis()
    figure.suptitle("Llama 70B on 128 x H100: the meshes predicted to be fastest", x=0.01, ha="left", fontsize=9.5)
    _legend(figure, shown)
    return figure


def profile() -> Figure:
    """Draw what two devices do in one step, from a trace of this machine."""
    import jax

    from jaxdist.bench.measuring import Timed, ignore, measure_together
    from jaxdist.config import Config
    from jaxdist.programs.compiled import text_of
    from jaxdist.programs.trace import COLLECTIVE, Program, kernels, read
    from jaxdist.training.profile import begin_trace, newest_trace
    from jaxdist.training.run import Run

    timed = Timed.compile(Run(Config(mesh="2x1x1")))
    measure_together([timed], 2, 1, ignore)
    with tempfile.TemporaryDirectory() as folder:
        begin_trace(Path(folder))
        measure_together([timed], 0, 1, ignore)
        jax.profiler.stop_trace()
        ran = list(kernels(read(newest_trace(Path(folder))), Program.of(text_of(timed.program))))
    start = min(kernel.start for kernel in ran)
    devices = sorted({kernel.device for kernel in ran})
    figure = blank(2.1)
    axes = figure.add_subplot(xlabel="milliseconds")
    spans = defaultdict(list)
    for kernel in ran:
        use = "waits and sends" if kernel.use == COLLECTIVE else "computes"
        piece = (kernel.start - start) / 1e3, (kernel.end - kernel.start) / 1e3
        spans[devices.index(kernel.device), use].append(piece)
    colours = {"computes": BLUE, "waits and sends": RED}
    for (row, use), pieces in spans.items():
        axes.broken_barh(_joined(pieces), (row - 0.35, 0.7), color=colours[use], linewidth=0)
    axes.set_yticks(range(len(devices)), [f"device {device}" for device in devices])
    axes.set_title("one step of the first run's model with --mesh 2x1x1, traced")
    axes.invert_yaxis()
    _legend(figure, colours)
    return figure


def _joined(pieces: list[tuple[float, float]], gap: float = 0.1) -> list[tuple[float, float]]:
    """Join pieces, each a start and a length in milliseconds, with less than `gap` between them: nobody sees it."""
    joined: list[tuple[float, float]] = []
    for start, length in sorted(pieces):
        if joined and start - sum(joined[-1]) < gap:
            first = joined[-1][0]
            joined[-1] = (first, max(sum(joined[-1]), start + length) - first)
        else:
            joined.append((start, length))
    return joined


def _devices(text: str) -> Iterable[tuple[int, dict[str, int]]]:
    """Yield each device of a mesh with its place on every axis: devices are counted in the order of `AXES`."""
    shape = parse_mesh(text)
    for device, place in enumerate(np.ndindex(*(shape[axis] for axis in AXES))):
        yield device, dict(zip(AXES, place, strict=True))


def _corner(place: dict[str, int]) -> tuple[float, float]:
    """Return the lower left corner of a device of 2x2x2 on the board."""
    return 0.6 + 7.2 * place[PIPELINE] + 3.0 * place[MODEL], 3.1 - 1.9 * place[DATA]


def _board(figure: Figure, width: float, height: float) -> Axes:
    axes = figure.add_subplot(xlim=(0, width), ylim=(0, height))
    axes.set_axis_off()
    return axes


def _box(axes: Axes, x: float, y: float, width: float, height: float, colour: str) -> None:
    from matplotlib.patches import Rectangle

    axes.add_patch(Rectangle((x, y), width, height, facecolor=colour, edgecolor=PAPER, linewidth=1.2))


def _between(axes: Axes, start: tuple[float, float], end: tuple[float, float], colour: str) -> None:
    arrow = {"arrowstyle": "<->", "color": colour, "linewidth": 2, "shrinkA": 1, "shrinkB": 1}
    axes.annotate("", end, start, arrowprops=arrow)


def _scores(axes: Axes, query: int, key: int, colour: str) -> None:
    """Fill the scores of a chunk of queries with a chunk of keys that are not later."""
    if key < query:
        axes.fill((key, key + 1, key + 1, key), (query, query, query + 1, query + 1), color=colour)
    if key == query:
        axes.fill((key, key, key + 1), (query, query + 1, query + 1), color=colour)


def _legend(figure: Figure, colours: dict[str, str]) -> None:
    from matplotlib.patches import Patch

    patches = [Patch(color=colour, label=name) for name, colour in colours.items()]
    figure.legend(handles=patches, loc="outside lower center", ncols=4)


PICTURES: dict[str, Callable[[], Figure]] = {
    "mesh": mesh,
    "3d": three_d,
    "zero": zero,
    "fsdp": fsdp,
    "schedules": schedules,
    "ring": ring,
    "plan": plan,
    "profile": profile,
}
"""Name of the file below docs/pictures -> who draws it."""


def main(argv: Sequence[str] | None = None) -> None:
    """Draw the named pictures, or all of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[*PICTURES, []], metavar="NAME", help=", ".join(PICTURES))
    for name in parser.parse_args(argv).names or PICTURES:
        path = FOLDER / f"{name}.svg"
        save(PICTURES[name](), path)
        print(path)


if __name__ == "__main__":
    main()
