"""The parts of `bench gpu` that run jaxdist's commands as a user does: a run that is killed and resumed, and others.

Each yields a dict, whose `told` is a sentence. It runs within the part's process and imports no jax, so that the
commands have the GPU.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from jaxdist.bench.gpu_process import MEASURING, kill, last_words, started

Note = Callable[[str], None]
"""Takes the phase that a part enters."""

WHOLE = "whole"
KILLED = "killed"
"""Folders of the run that is not disturbed, and of the one that is."""

POLL_SECONDS = 0.05


def train(phase: Note, folder: str, steps: int, options: Sequence[str] = ()) -> Iterator[dict[str, Any]]:
    """Train twice, once killed in the middle and resumed, and compare the two, loss by loss."""
    where = Path(folder)
    common = [f"--train.steps={steps}", "--log.every=1", f"--checkpoint.every={max(1, steps // 4)}", *options]
    phase("training")
    began = time.perf_counter()
    _command(where, WHOLE, "train", f"--run-dir={where / WHOLE}", *common)
    found: dict[str, Any] = {"seconds": time.perf_counter() - began}
    whole = _lines(where / WHOLE)
    losses = [line["loss"] for line in whole if "loss" in line]
    speeds = [line["step_seconds"] for line in whole if "step_seconds" in line]
    found |= {
        "steps": len(losses),
        "first_loss": losses[0],
        "last_loss": losses[-1],
        "step_seconds": sorted(speeds)[len(speeds) // 2],
        "validation_loss": next((line["validation_loss"] for line in reversed(whole) if "validation_loss" in line), 0),
    }
    found["told"] = f"{len(losses)} steps in {found['seconds']:.1f} s, loss {losses[0]:.4f} to {losses[-1]:.4f}"
    yield found
    phase("training, to be killed")
    words = ["train", f"--run-dir={where / KILLED}", *common]
    killed_after = _killed(where, words, steps // 2)
    phase("resuming")
    _command(where, f"{KILLED}.resumed", *words)
    phase("comparing")
    again = [line["loss"] for line in _lines(where / KILLED) if "loss" in line]
    apart = [abs(a - b) for a, b in zip(losses, again, strict=True)]
    first = next((step for step, difference in enumerate(apart, 1) if difference), None)
    found |= {"killed_after": killed_after, "largest_difference": max(apart), "differs_from_step": first}
    same = "all losses equal to the bit"
    if first is not None:
        same = f"losses differ from step {first} on, by {max(apart):.1e} at most"
    found["told"] += f"; killed after step {killed_after} and resumed: {same}"
    yield found


def _killed(where: Path, words: Sequence[str], step: int) -> int:
    """Kill a run once it has a checkpoint and has logged `step`; return the last step that it logged.

    Raises `RuntimeError` with its last words if it has ended without any.
    """
    # The run keeps its checkpoints beside its metrics.
    folder = where / KILLED
    printed = where / f"{KILLED}.log"
    with printed.open("wb") as log:
        process = started(_words(*words), log, os.environ)
        try:
            while process.poll() is None:
                lines = _lines(folder)
                if lines and lines[-1]["step"] >= step and any((folder / "checkpoints").glob("[0-9]*")):
                    break
                time.sleep(POLL_SECONDS)
        finally:
            kill(process)
    logged = _lines(folder)
    if not logged:
        raise RuntimeError(f"the run ended before a step: {last_words(printed.read_text(errors='replace'))}")
    return logged[-1]["step"]


def evaluate(phase: Note, folder: str) -> Iterator[dict[str, Any]]:
    """Evaluate the run of `train`."""
    phase("evaluating")
    began = time.perf_counter()
    figures = json.loads(_command(Path(folder), "evaluate", "evaluate", str(Path(folder) / WHOLE), "--json"))
    seconds = time.perf_counter() - began
    yield {"figures": figures, "seconds": seconds, "told": f"in {seconds:.1f} s: {_flat(figures)}"}


def generate(phase: Note, folder: str, tokens: int) -> Iterator[dict[str, Any]]:
    """Let the run of `train` write."""
    phase("generating")
    began = time.perf_counter()
    run = str(Path(folder) / WHOLE)
    text = _command(Path(folder), "generate", "generate", run, f"--tokens={tokens}", "--temperature=0")
    seconds = time.perf_counter() - began
    yield {"text": text, "seconds": seconds, "told": f"in {seconds:.1f} s: {text.strip()[:80]!r}"}


def profile(phase: Note, folder: str, config: str, options: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Profile some steps of a run, and keep the table that it prints, with the kernels by name."""
    phase(MEASURING)
    where = Path(folder)
    words = [config] if config else []
    words += [f"--run-dir={where / 'profiled'}", "--train.steps=8", "--profile.steps=5-7", *options]
    printed = _command(where, "profile", "train", *words)
    lines = [line for line in printed.splitlines() if line.startswith(("profile", " " * 12))]
    yield {"lines": lines, "told": lines[0] if lines else "the run printed no table"}


def doctor(phase: Note, folder: str) -> Iterator[dict[str, Any]]:
    """Let the doctor examine this machine."""
    phase("examining")
    result = json.loads(_command(Path(folder), "doctor", "doctor", "--json", fails=True))
    findings = result["findings"]
    states = [finding["state"] for finding in findings]
    counted = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
    yield {"findings": findings, "told": counted}


def _flat(figures: Any) -> str:
    """Return the numbers at the top of a JSON object as text."""
    return ", ".join(f"{name} {value:.4g}" for name, value in figures.items() if isinstance(value, int | float))


def _words(*words: str) -> list[str]:
    command, *others = words
    return [sys.executable, "-P", "-m", f"jaxdist.{command}", *others]


def _command(where: Path, name: str, *words: str, fails: bool = False) -> str:
    """Run one of jaxdist's commands, and return its standard output; its log is NAME.log in `where`.

    Raises `RuntimeError` with its last words if it fails, unless it may.
    """
    where.mkdir(parents=True, exist_ok=True)
    log = where / f"{name}.log"
    out = where / f"{name}.out"
    with log.open("wb") as errors, out.open("wb") as output:
        process = started(_words(*words), errors, os.environ, output)
        try:
            code = process.wait()
        finally:
            kill(process)
    if code and not fails:
        raise RuntimeError(f"{words[0]} ended with {code}: {last_words(log.read_text(errors='replace'))}")
    return out.read_text(errors="replace")


def _lines(folder: Path) -> list[dict[str, Any]]:
    """Return the whole lines of the metrics of a run."""
    path = folder / "metrics.jsonl"
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


PARTS: dict[str, Callable[..., Iterator[dict[str, Any]]]] = {
    "train": train,
    "evaluate": evaluate,
    "generate": generate,
    "profile": profile,
    "doctor": doctor,
}
