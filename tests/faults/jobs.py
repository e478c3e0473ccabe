"""Real processes that train together, and what befalls them."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from jaxdist.training.checkpoint.step_dir import StepDir
from tests.processes import Process, free_port, started
from tests.training.conftest import SMALL, over
from tests.training.curves import lines

TINY = over(SMALL, "--model.layers=1", "--checkpoint.every=5", "--validation.every=0", "--fault.heartbeat-seconds=10")

PATCHED = """
import os, pathlib, sys, time
from jaxdist.cluster.rendezvous import join  # jax, in the environment of this process
from jaxdist.training.meter import Meter
from jaxdist.training.run import Run
from jaxdist.training.forward.step import Step
from jaxdist.training.task import Task
from jaxdist.training.trainer import Trainer
me = next(int(word.split("=")[1]) for word in [*sys.argv, "--cluster.process-id=0"] if "process-id" in word)
{patch}
from jaxdist.train import main
from jaxdist.request import run
sys.exit(main(sys.argv[1:]))
"""


def argv(folder: Path, text: Path, *options: str) -> list[str]:
    return over(TINY, f"--data.path={text}", f"--run-dir={folder}", *options)


def train(words: list[str], processes: int = 1, patch: str = "") -> list[list[str]]:
    """The command of each process; `patch` is run in each before it trains, and sees its number as `me`."""
    program = ["-c", PATCHED.format(patch=patch)] if patch else ["-m", "jaxdist.train"]
    return meeting([sys.executable, *program, *words], processes)


def meeting(command: list[str], processes: int) -> list[list[str]]:
    """`command` for each process of a job."""
    if processes == 1:
        return [command]
    meet = [f"--cluster.coordinator=127.0.0.1:{free_port()}", f"--cluster.processes={processes}"]
    return [[*command, *meet, f"--cluster.process-id={i}"] for i in range(processes)]


@contextmanager
def job(commands: list[list[str]], **options) -> Iterator[list[Process]]:
    with started(commands, **options) as running:
        yield running


def until(true: Callable[[], object], running: list[Process], seconds: float = 300) -> None:
    """Wait for it. AssertionError with what all said when a process ends before, or after `seconds`."""
    end = time.monotonic() + seconds
    while not true():
        ended = [process.poll() for process in running]
        if any(code is not None for code in ended) or time.monotonic() > end:
            settle(running)
            raise AssertionError(f"exit codes {ended}\n" + told(running))
        time.sleep(0.05)


def settle(running: list[Process], seconds: float = 20) -> None:
    """Wait a while for all: the one that ends first may not be the one that says why."""
    end = time.monotonic() + seconds
    while any(process.poll() is None for process in running) and time.monotonic() < end:
        time.sleep(0.05)


def told(running: list[Process]) -> str:
    return "".join(f"--- process {i}\n{process.said()}\n" for i, process in enumerate(running))


def ends(running: list[Process], seconds: float) -> list[int]:
    """The exit codes. AssertionError when one has not ended after `seconds`."""
    end = time.monotonic() + seconds
    while any(process.poll() is None for process in running):
        assert time.monotonic() < end, told(running)
        time.sleep(0.05)
    return [process.returncode for process in running]


def metrics(folder: Path) -> list[dict]:
    """Its lines, while it may not have begun."""
    return lines(folder) if (folder / "metrics.jsonl").exists() else []


def step_of(folder: Path) -> int:
    lines = metrics(folder)
    return lines[-1]["step"] if lines else 0


def saved(folder: Path) -> int:
    """The newest step that is whole on disk, 0 without one."""
    return max(StepDir(folder / "checkpoints").sealed(), default=0)
