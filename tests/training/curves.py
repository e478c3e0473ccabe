"""What a run has left, beside what another has: the figures of its steps, and its parameters."""

import json
from pathlib import Path

import numpy as np
import pytest

from jaxdist.training.checkpoint.stored_arrays import open_arrays, whole
from jaxdist.training.history import PER_SECOND

FIGURES = ("loss", "grad_norm", "validation_loss")

SPEEDS = {f"{unit}{PER_SECOND}" for unit in ("token", "image", "row")}

TIMES = {"time", "step_seconds", "data_seconds", "mfu", "memory_bytes", "goodput"} | SPEEDS
"""The figures of a line that are measured: two runs that compute the same do not share them."""


def lines(folder: Path) -> list[dict]:
    """The whole lines of its metrics: of a run that goes on, the last may be half written."""
    whole = (folder / "metrics.jsonl").read_text().rpartition("\n")[0]
    return [json.loads(line) for line in whole.splitlines()]


def without_times(folder: Path) -> list[dict]:
    """The whole lines of its metrics, without what is measured."""
    return [{name: value for name, value in line.items() if name not in TIMES} for line in lines(folder)]


def close(one: list[dict], other: list[dict], norms: float = 1e-5) -> None:
    """The same steps, with the same figures to 1e-5. `norms` of gradients may drift in long runs."""
    assert [line["step"] for line in one] == [line["step"] for line in other]
    for mine, its in zip(one, other, strict=True):
        for name in set(FIGURES) & {*mine, *its}:
            rel = norms if name == "grad_norm" else 1e-5
            assert mine[name] == pytest.approx(its[name], rel=rel), f"{name} of step {its['step']}"


def alike(one: Path, other: Path, steps: int) -> None:
    """Two runs of so many steps, equal to 1e-5 in each, and in their parameters at the end, by norm."""
    close(lines(one), lines(other))
    assert [line["step"] for line in lines(one) if "loss" in line] == list(range(1, steps + 1))
    mine, its = parameters(one, steps), parameters(other, steps)
    assert np.linalg.norm(mine - its) <= 1e-5 * np.linalg.norm(its)


def parameters(folder: Path, step: int) -> np.ndarray:
    """All those of a checkpoint, in one row."""
    arrays = open_arrays((folder / "checkpoints" / str(step) / "params").resolve())
    return np.concatenate([np.ravel(array.read(whole(len(array.shape)))) for _, array in sorted(arrays.items())])
