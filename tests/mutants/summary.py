"""What a run of all mutants came to, as text: for each folder how many were seen, and a line for each mutant."""

from __future__ import annotations

import platform
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

from tests.mutants.runner import ROOT
from tests.mutants.table import Mutant

MUTANT, SECONDS = "mutant", "seconds"
"""The properties that the test of a mutant records."""

COMMAND = "python -m pytest -n 0 --exhaustive tests/mutants"


def results_file() -> Path:
    return ROOT / "benchmarks" / "results" / f"{time.strftime('%Y-%m-%d')}-mutants.txt"


def lines(mutants: Sequence[Mutant], seconds: Mapping[str, float | None]) -> list[str]:
    """`seconds` of the test that failed, by the id of its mutant; None where it passed, and no entry where none ran."""
    versions = ", ".join(f"{name} {version(name)}" for name in ("jax", "flax", "numpy", "pytest"))
    told = [
        f"Mutants: small mistakes, and whether a test notices them, {time.strftime('%Y-%m-%d')}",
        "",
        f"Command     {COMMAND}",
        f"Versions    Python {platform.python_version()}, {versions}",
        "Seconds     of the test with the mistake, in a process of its own, imports included",
        "",
        f"{'table':<10} {'mutants':>7} {'seen':>5} {'unseen':>6} {'not run':>7} {'seconds':>8}",
    ]
    tables = list(dict.fromkeys(mutant.table for mutant in mutants))
    for table in tables:
        told.append(_row(table, [mutant for mutant in mutants if mutant.table == table], seconds))
    told.append(_row("all", mutants, seconds))
    for table in tables:
        told += ["", table]
        for mutant in mutants:
            if mutant.table == table:
                told += _mutant(mutant, seconds)
    return told


def _row(name: str, mutants: Sequence[Mutant], seconds: Mapping[str, float | None]) -> str:
    states = [_state(mutant, seconds) for mutant in mutants]
    seen, unseen, not_run = (states.count(state) for state in ("seen", "unseen", "not run"))
    took = sum(seconds[mutant.id] or 0.0 for mutant in mutants if mutant.id in seconds)
    return f"{name:<10} {len(mutants):>7} {seen:>5} {unseen:>6} {not_run:>7} {took:>8.1f}"


def _state(mutant: Mutant, seconds: Mapping[str, float | None]) -> str:
    if not mutant.test:
        return "unseen"
    if mutant.id not in seconds:
        return "not run"
    return "unseen" if seconds[mutant.id] is None else "seen"


def _mutant(mutant: Mutant, seconds: Mapping[str, float | None]) -> list[str]:
    state = _state(mutant, seconds)
    told = f"{seconds[mutant.id]:.1f} s" if state == "seen" else state
    test = mutant.test or f"no test can see it: {mutant.unseen}"
    return [f"{told:>9}  {mutant.name.removeprefix('jaxdist.')}: {mutant.why}", f"{'':11}{test}"]
