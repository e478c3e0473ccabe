"""A run small enough to be made many times."""

import random
import shutil
from functools import cache
from pathlib import Path

import pytest

from jaxdist import train
from tests.training.kills import kill_after

SMALL = [
    "--model.layers=2", "--model.embed=16", "--model.heads=2", "--model.vocab=300", "--model.sequence=16",
    "--train.global-batch-size=8", "--train.steps=20", "--optimizer.warmup=2", "--log.every=1",
    "--checkpoint.every=5", "--validation.every=10", "--validation.batches=2", "--log.tensorboard=false",
]  # fmt: skip


BASELINE = {"nats": 1.0, "name": "unigrams", "unit": "token"}


def facts(step: int) -> dict:
    """What a checkpoint of that step holds beside its arrays."""
    return {"step": step, "steps": 20, "data": "0", "best": None, "baseline": BASELINE}


@pytest.fixture(scope="session")
def text(tmp_path_factory) -> Path:
    """A text with something to learn in it."""
    rng = random.Random(0)
    words = ["mesh", "axis", "device", "shard", "gather", "reduce", "layer", "token", "batch", "step"]
    path = tmp_path_factory.mktemp("text") / "words.txt"
    path.write_text("\n".join(" ".join(rng.choice(words) for _ in range(12)) for _ in range(600)))
    return path


@pytest.fixture
def request_of(text, tmp_path):
    """argv of a small run in a folder of this test: `request_of("name", "--mesh=2x1x1")`."""
    return lambda name, *more: small(text, tmp_path / name, *more)


def small(text: Path, folder: Path, *more: str) -> list[str]:
    """argv of a small run in `folder`."""
    return over(SMALL, f"--data.path={text}", f"--run-dir={folder}", *more)


def over(options: list[str], *more: str) -> list[str]:
    """`options` with `more` in their place where both name the same knob."""
    return list({option.partition("=")[0]: option for option in (*options, *more)}.values())


@pytest.fixture
def run(request_of, tmp_path):
    """Train in this process and return the run's folder; `code` is the expected exit code."""

    def call(name: str, *more: str, code: int = 0) -> Path:
        assert train.main(request_of(name, *more)) == code
        return tmp_path / name

    return call


@pytest.fixture(scope="module")
def straight(text, tmp_path_factory):
    """Train to the end once for all tests of a file, and return the run's folder, which no test may change."""

    @cache
    def call(*more: str) -> Path:
        folder = tmp_path_factory.mktemp("straight") / "run"
        assert train.main(small(text, folder, *more)) == 0
        return folder

    return call


@pytest.fixture(scope="module")
def killed_once(text, tmp_path_factory):
    """Train until `kill_after` kills the run, once for all tests of a file, and return its folder."""

    @cache
    def call(step: int, saved: int | None, *more: str) -> Path:
        folder = tmp_path_factory.mktemp("killed") / "run"
        kill_after(step, saved, small(text, folder, *more))
        return folder

    return call


@pytest.fixture
def killed(killed_once, tmp_path):
    """Copy a run that was killed to a folder of this test, and return that: `killed("name", 7, 5, "--mesh=2x1x1")`."""

    def call(name: str, step: int, saved: int | None, *more: str) -> Path:
        return Path(shutil.copytree(killed_once(step, saved, *more), tmp_path / name, symlinks=True))

    return call
