"""SIGKILL at any moment, again and again: the run ends as the one that was left alone, to the bit, and has read each
row as often."""

import os
import random
import signal
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from tests import forks
from tests.training.conftest import SMALL, over
from tests.training.curves import lines, without_times
from tests.training.test_resume import saved

KILLS = 5
STEPS = 20


@pytest.fixture(scope="module")
def options(tmp_path_factory, caches) -> list[str]:
    """A small run that passes through its data in 15 to 20 steps, with all that could hide a state."""
    text = tmp_path_factory.mktemp("short") / "words.txt"
    rng = random.Random(0)
    text.write_text("\n".join(" ".join(rng.choice(["mesh", "axis", "shard"]) for _ in range(12)) for _ in range(190)))
    more = ["--checkpoint.every=3", "--model.dropout=0.1", "--train.accumulation=2", "--data.prefetch=3"]
    return over(SMALL, f"--data.path={text}", "--checkpoint.keep=2", *more)


def start(log: Path, moment: tuple[str, int, float], argv: list[str]) -> int:
    """The exit code of `tests.training.killing`; compiled programs are shared with the starts before."""
    cache = {
        "JAX_COMPILATION_CACHE_DIR": jax.config.jax_compilation_cache_dir,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    command = [sys.executable, "-m", "tests.training.killing", log, *moment, *argv]
    done = forks.run(command, env=os.environ | cache)
    assert done.returncode in (0, -signal.SIGKILL), done.stderr
    return done.returncode


def rows_by_step(log: Path) -> dict[int, list[int]]:
    """What was read for each step by the start that got furthest with it; every start goes on without a gap."""
    found, last = {}, None
    for line in log.read_text().splitlines():
        if line == "start":
            last = None
            continue
        step, *rows = map(int, line.split())
        assert last is None or step == last + 1
        assert step <= max(found, default=0) + 1, "a step was skipped"
        found[step], last = rows, step
    return found


@pytest.fixture(scope="module")
def straight(options, tmp_path_factory):
    """`straight(mesh)`: the folder and log of a run that nobody kills."""
    made = {}

    def make(mesh: str) -> tuple[Path, Path]:
        if mesh not in made:
            folder = tmp_path_factory.mktemp("straight")
            made[mesh] = folder / "run", folder / "log"
            argv = [*options, f"--run-dir={folder / 'run'}", f"--mesh={mesh}"]
            assert start(folder / "log", ("never", 0, 0), argv) == 0
        return made[mesh]

    return make


def moments(seed: int) -> list[tuple[str, int, float]]:
    """When to kill each of the starts: all kinds of moments, ever later in the run."""
    rng = random.Random(seed)
    kinds = rng.sample(["compile", "save", "seal", "step", "step"], KILLS)
    step = lambda number: rng.randint(3 * number + 1, 3 * number + 3)
    saved = lambda number: 3 * number + 3
    return [
        {
            "compile": ("compile", 0, rng.uniform(0, 1)),
            "save": ("save", saved(number), rng.uniform(0, 0.15)),
            "seal": ("seal", saved(number), 0.0),
            "step": ("step", step(number), rng.uniform(0, 3 * 0.02)),
        }[kind]
        for number, kind in enumerate(kinds)
    ]


def survives(seed: int, mesh: str, options: list[str], straight, folder: Path) -> None:
    argv, log = [*options, f"--run-dir={folder / 'run'}", f"--mesh={mesh}"], folder / "log"
    killed = [start(log, moment, argv) for moment in moments(seed)]
    assert killed == [-signal.SIGKILL] * KILLS
    assert start(log, ("never", 0, 0), argv) == 0
    wanted, wanted_log = straight(mesh)
    jax.tree.map(np.testing.assert_array_equal, saved(folder / "run", STEPS), saved(wanted, STEPS))
    assert without_times(folder / "run") == without_times(wanted)
    assert [line["step"] for line in lines(folder / "run") if "loss" in line] == list(range(1, STEPS + 1))
    assert rows_by_step(log) == rows_by_step(wanted_log)


@pytest.mark.slow
def test_a_run_that_is_killed_five_times_ends_as_if_it_were_not(options, straight, tmp_path):
    survives(7, "1x1x1", options, straight, tmp_path)


@pytest.mark.slow
def test_no_row_is_read_twice_in_an_epoch(options, straight):
    _, log = straight("1x1x1")
    read = [row for _, rows in sorted(rows_by_step(log).items()) for row in rows]
    count = max(read) + 1
    assert 15 * 8 < count < 20 * 8 == len(read), "the epoch ends within the run"
    assert sorted(read[:count]) == list(range(count))
    assert len(set(read[count:])) == len(read) - count


@pytest.mark.exhaustive
@pytest.mark.parametrize("mesh", ["1x1x1", "2x1x1"])
@pytest.mark.parametrize("seed", range(5))
def test_fifty_kills(seed, mesh, options, straight, tmp_path):
    survives(seed, mesh, options, straight, tmp_path)
