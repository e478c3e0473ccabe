"""Train one model on five meshes, and draw the five loss curves on top of each other: the picture of the README.

    python scripts/loss_curves.py docs/pictures/one_loss.svg

Each run is a `python -m jaxdist.train` of its own, on the default configuration: a small GPT on the source text of
Python's standard library. The lower panel shows what the eye cannot see in the upper one, the difference from the loss
of one device.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from light_dark import INK, blank, save

from jaxdist.output.pictures import BLUE, GREEN, ORANGE, RED
from jaxdist.training import history

MESHES = {
    "1x1x1": ("one device", []),
    "4x1x1": ("4x1x1, ZeRO 3 (FSDP)", ["--parallel.zero", "3"]),
    "1x4x1": ("1x4x1, tensor + sequence parallelism", ["--parallel.sequence", "true"]),
    "1x1x4": ("1x1x4, pipeline 1F1B", []),
    "2x2x2": ("2x2x2, all of them, ZeRO 1", ["--parallel.zero", "1"]),
}
"""Mesh: its name in the picture, and the options of its run."""

SAME = ["--optimizer.schedule", "constant", "--validation.every", "0", "--checkpoint.every", "0", "--resume", "never"]
"""Options of every run. Nothing is saved or validated in between, since only the losses are drawn."""


def losses(mesh: str, steps: int, every: int, folder: Path) -> dict[int, float]:
    """Train on `mesh` and return the losses by step. A run that fails ends the program with its output."""
    options = [*MESHES[mesh][1], *SAME, "--train.steps", str(steps), "--log.every", str(every)]
    command = [sys.executable, "-m", "jaxdist.train", "--mesh", mesh, "--run-dir", str(folder / mesh), *options]
    run = subprocess.run(command, capture_output=True, text=True)
    if run.returncode != 0:
        sys.exit(f"{' '.join(command)} ended with {run.returncode}:\n{run.stdout}{run.stderr}")
    lines = history.read(folder / mesh / "metrics.jsonl")
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


def draw(curves: dict[str, dict[int, float]], picture: Path) -> None:
    """Draw one device as a line, the other meshes as marks on it that take turns, and their differences below."""
    figure = blank(4.6)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    one = curves["1x1x1"]
    steps = sorted(one)
    above.plot(steps, [one[step] for step in steps], color=INK, linewidth=1, label=MESHES["1x1x1"][0])
    others = [mesh for mesh in curves if mesh != "1x1x1"]
    for turn, (mesh, colour, mark) in enumerate(zip(others, (ORANGE, GREEN, BLUE, RED), "osD^", strict=True)):
        taken = steps[turn :: len(others)]
        values = [curves[mesh][step] for step in taken]
        above.plot(taken, values, mark, color=colour, markersize=5, label=MESHES[mesh][0])
        differences = [abs(curves[mesh][step] - one[step]) / one[step] for step in steps]
        below.plot(steps, differences, color=colour, linewidth=1.2)
    above.set_ylabel("training loss\n(nats per token)")
    above.legend(title="five runs of one model", alignment="left")
    below.set(xlabel="step", ylabel="relative difference\nfrom one device", yscale="log")
    for axes in (above, below):
        axes.grid()
    save(figure, picture)


def main() -> None:
    """Train, draw, and print the largest difference of each mesh."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("picture", type=Path, help="SVG file to write")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--every", type=int, default=2, help="steps between two points")
    request = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        curves = {mesh: losses(mesh, request.steps, request.every, Path(folder)) for mesh in MESHES}
    one = curves["1x1x1"]
    for mesh, curve in curves.items():
        largest = max(abs(curve[step] - one[step]) / one[step] for step in one)
        last = max(one)
        print(f"{mesh}  loss of step {last} {curve[last]:.6f}  largest relative difference {largest:.1e}")
    draw(curves, request.picture)


if __name__ == "__main__":
    main()
