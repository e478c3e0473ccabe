"""SIGKILL at drawn moments of drawn runs: adapters, experts, rows that devices share, and gradients that cross slowly.

Each run is killed four times and then goes on twice: on its own mesh, where it ends as one that nobody killed, to the
bit, and from a copy on another mesh, where it ends the same to 1e-5 (with compressed gradients, which round by mesh,
the losses are close).
"""

import random
import shutil
import signal
from functools import cache
from pathlib import Path

import jax
import numpy as np
import pytest

from tests.training.conftest import SMALL, over
from tests.training.curves import close, lines, parameters, without_times
from tests.training.test_kills import start
from tests.training.test_resume import saved

STEPS = 15
KILLS = 4
EVERY = 3
"""Steps between checkpoints; with local steps a round has as many."""

BASE = Path(__file__).parent.parent / "huggingface" / "golden" / "llama31"

COMMON = [f"--train.steps={STEPS}", f"--checkpoint.every={EVERY}", "--validation.every=5", "--data.prefetch=3"]

KINDS = {
    "lora": (
        ["--model.lora-rank=2", f"--init-from={BASE}", "--model.sequence=16", "--precision=float32"],
        [("2x2x1", "1x1x1"), ("data=2", "1x2x1"), ("context=2", "data=2")],
    ),
    "experts": (
        ["--model.family=moe", "--model.experts=4", "--model.expert-mlp=16", "--model.balance-loss=0.01"],
        [("expert=2", "data=2"), ("data=2,expert=2", "1x1x1"), ("expert=4", "expert=2,model=2")],
    ),
    "context": (
        [],
        [("context=2", "1x1x1"), ("context=4", "data=2"), ("data=2,context=2", "context=2")],
    ),
    "compressed": (
        ["--parallel.gradient-compression=int8", "--model.embed=64", "--optimizer.learning-rate=1e-3"],
        [("replica=2", "replica=4"), ("replica=2,data=2", "1x1x1")],
    ),
    "delayed": (
        ["--parallel.delayed-gradients=true"],
        [("replica=2", "replica=4"), ("replica=2,data=2", "replica=2")],
    ),
    "local": (
        [f"--train.local-steps={EVERY}", "--optimizer.outer-momentum=0.5"],
        [("replica=2", "replica=2,data=2"), ("replica=2,data=2", "replica=2,model=2")],
    ),
}
"""Of each kind of run: its options, and pairs of a mesh and of another one on which it goes on."""


class Drawn:
    """A run and the moments at which it is killed, all from one seed."""

    def __init__(self, kind: str, seed: int):
        rng = random.Random(f"{kind} {seed}")
        options, meshes = KINDS[kind]
        self.kind = kind
        self.mesh, self.other = meshes[seed % len(meshes)]
        self.options = [*options, f"--parallel.zero={rng.randint(0, 3)}"]
        self.options.append(f"--train.accumulation={rng.choice([1, 2])}")
        # SGD: Adam makes an update of the rounding of a gradient that is exactly zero.
        self.options.append(f"--optimizer.name={rng.choice(['sgd', 'adamw'])}")
        if kind not in ("lora", "experts"):
            self.options.append(f"--model.dropout={rng.choice([0, 0.1])}")
        self.moments = [_moment(rng, number, rounds=kind == "local") for number in range(KILLS)]

    def __str__(self) -> str:
        kills = ", ".join(f"{name} {step} + {delay:.2f} s" for name, step, delay in self.moments)
        return f"{self.kind} {self.mesh} then {self.other}, {' '.join(self.options)}; killed at {kills}"


def _moment(rng: random.Random, number: int, rounds: bool) -> tuple[str, int, float]:
    """When to kill the start with that number: ever later in the run, so that each start comes so far.

    Of `rounds` of local steps only the last step is reported: what comes some time after it is a step of the next.
    """
    kind = rng.choice(["compile", "save", "seal", "step", "step"])
    if kind == "compile":
        return kind, 0, rng.uniform(0, 1)
    if kind == "step":
        step = EVERY if rounds else rng.randint(1, EVERY)
        return kind, EVERY * number + step, rng.uniform(0, 0.06)
    return kind, EVERY * (number + 1), 0.0 if kind == "seal" else rng.uniform(0, 0.15)


@pytest.fixture(scope="module")
def argv(text, caches):
    def of(drawn: Drawn, folder: Path, mesh: str) -> list[str]:
        # The base of adapters says how large the model is.
        small = [option for option in SMALL if drawn.kind != "lora" or not option.startswith("--model.")]
        return over(small, *COMMON, *drawn.options, f"--data.path={text}", f"--run-dir={folder}", f"--mesh={mesh}")

    return of


def unharmed(argv: list[str], log: Path) -> None:
    assert start(log, ("never", 0, 0), argv) == 0


@pytest.fixture
def straight(argv, tmp_path):
    """`straight(drawn)`: the folder of that run, which nobody killed."""

    @cache
    def make(drawn: Drawn) -> Path:
        unharmed(argv(drawn, tmp_path / "straight", drawn.mesh), tmp_path / "straight.log")
        return tmp_path / "straight"

    return make


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(2))
def test_a_drawn_run_survives_four_kills_and_a_move(seed, kind, argv, straight, tmp_path, capsys):
    drawn = Drawn(kind, seed)
    with capsys.disabled():
        print(f"\n{drawn}")
    folder, moved, log = tmp_path / "run", tmp_path / "moved", tmp_path / "log"
    own = argv(drawn, folder, drawn.mesh)
    assert [start(log, moment, own) for moment in drawn.moments] == [-signal.SIGKILL] * KILLS
    shutil.copytree(folder, moved)

    whole = straight(drawn)
    unharmed(own, log)
    jax.tree.map(np.testing.assert_array_equal, saved(folder, STEPS), saved(whole, STEPS))
    assert without_times(folder) == without_times(whole)

    unharmed(argv(drawn, moved, drawn.other), log)
    if kind == "compressed":
        mine, its = ([line["loss"] for line in lines(one) if "loss" in line] for one in (moved, whole))
        np.testing.assert_allclose(mine, its, rtol=5e-3)
        return
    close(lines(moved), lines(whole))
    if "--optimizer.name=sgd" in drawn.options:
        mine, its = parameters(moved, STEPS), parameters(whole, STEPS)
        assert np.linalg.norm(mine - its) <= 1e-5 * np.linalg.norm(its)
