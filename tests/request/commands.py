"""Every command with its options, and what it does with a command line: refuse it, or take it and begin its work."""

from __future__ import annotations

import importlib.util
import os
import signal
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from jaxdist.__main__ import MODULES
from jaxdist.config import RequestError
from jaxdist.request import Extra
from jaxdist.request.commandline import RUN_KNOBS
from jaxdist.request.knobs import KNOBS, option, within

PATIENCE = 20
"""Seconds for one command line, which takes milliseconds: more is a hang."""

WORK = (
    "jaxdist.cluster.job.Job.__enter__",
    "jaxdist.planning.search.plan.search",
    "jaxdist.programs.cross_compile.compile_apart",
    "jaxdist.training.export.write_safetensors",
    "jaxdist.training.export.write_folder",
    "jaxdist.data.survey.look.look",
    "jaxdist.doctor.__main__.Doctor.examine",
    "jaxdist.doctor.watching.watch",
    "jaxdist.training.comparison.compare",
    "jaxdist.cluster.local.Supervisor.run",
    "jaxdist.cluster.slurm.make_logs",
    "jaxdist.cluster.kubernetes.Manifest.text",
    "jaxdist.bench.gpu.Bench.measure",
    "jaxdist.lab.__main__.measure",
    "jaxdist.lab.all_reduce.study",
    "jaxdist.lab.schedules.ScheduleReport.at",
    "jaxdist.lab.fsdp_walkthrough.measure",
    "jaxdist.lab.model_parallel.measure",
)
"""Where a command begins to compile, to measure, to start processes or to write: here it ends, its request accepted."""


class Accepted(Exception):
    """The request was taken, and the work would begin."""


@dataclass(frozen=True)
class Command:
    """A command as it is typed behind `python -m jaxdist.`"""

    name: str
    """Its module, and the words that choose what it does."""
    words: tuple[str, ...] = ()
    """What it cannot do without."""
    argument: str = ""
    """CONFIG, RUN or PATH, or none of them."""

    def main(self, argv: Sequence[str]) -> int:
        module, *first = self.name.split()
        return importlib.import_module(MODULES.get(module, f"jaxdist.{module}")).main([*first, *argv])


COMMANDS = [
    Command("train", argument="CONFIG"),
    Command("evaluate", argument="RUN"),
    Command("generate", argument="RUN"),
    Command("checkpoints", argument="RUN"),
    Command("compare", argument="RUN"),
    Command("data", argument="PATH"),
    Command("explain", argument="CONFIG"),
    Command("plan", argument="CONFIG"),
    Command("launch local", ("--processes=2",), "CONFIG"),
    Command("launch slurm", ("--time=9",), "CONFIG"),
    Command("doctor", argument="CONFIG"),
    Command("doctor", argument="RUN"),
    Command("bench step", argument="CONFIG"),
    Command("bench scaling", argument="CONFIG"),
    Command("bench collectives"),
    Command("bench gpu"),
    Command("lab schedules"),
    Command("lab all-reduce"),
    Command("lab fsdp-walkthrough"),
    Command("lab model-parallel"),
    Command("lab zero-states-4x"),
    Command("lab --all"),
    Command("launch kubernetes", ("--image=i", "--claim=c"), "CONFIG"),
]


ASKING = ("train", "evaluate", "generate", "checkpoints", "explain", "plan", "launch", "doctor.__main__")
ASKING += ("compare", "data.__main__")
ASKING += ("bench.step", "bench.scaling", "bench.collectives", "bench.gpu", "lab.__main__")
"""The modules that read command lines."""


@dataclass
class Options:
    """What a command gives to `arguments`."""

    extras: list[Extra] = field(default_factory=list)
    knobs: list[str] = field(default_factory=list)

    @property
    def names(self) -> list[str]:
        return [*(extra.name for extra in self.extras), *self.knobs]


def options_of(command: Command) -> Options:
    """The options that a command takes, asked from itself."""
    found = Options()

    def record(argv, name, about, *, positional="CONFIG", extras=(), knobs: Collection[str] | None = None, **_):
        knobs = RUN_KNOBS if knobs is None and positional == "RUN" else knobs
        found.extras = list(extras)
        found.knobs = [knob for knob in KNOBS if knobs is None or within(knob, knobs)]
        raise Accepted

    with pytest.MonkeyPatch.context() as patch:
        for module in ASKING:
            patch.setattr(f"jaxdist.{module}.arguments", record)
        with pytest.raises(Accepted):
            command.main(["run"] if command.argument == "RUN" else [])
    return found


@contextmanager
def without_work() -> Iterator[None]:
    """Let no command begin its work."""

    def accept(*_: object, **__: object) -> None:
        raise Accepted

    find = importlib.util.find_spec
    with pytest.MonkeyPatch.context() as patch:
        for name in WORK:
            patch.setattr(name, accept)
        patch.setattr("importlib.util.find_spec", lambda name, *more: None if name == "wandb" else find(name, *more))
        patch.setattr("jaxdist.lab.__main__._split_cpu", lambda: None)
        patch.setattr("jaxdist.cluster.slurm.check_partition", lambda *_: None)  # asks Slurm, where there is one
        patch.setattr("jaxdist.bench.gpu._driver", lambda: "")
        yield


def asked(command: Command, *words: str) -> list[str] | None:
    """The sentences with which a command refuses its words; None where it takes them.

    Call it within `without_work`. Any other exception passes, and `TimeoutError` is raised after `PATIENCE`.
    """

    def too_long(*_: object) -> None:
        raise TimeoutError(f"more than {PATIENCE} s")

    old = signal.signal(signal.SIGALRM, too_long)
    signal.alarm(PATIENCE)
    try:
        command.main(words)
    except RequestError as error:
        return error.problems
    except Accepted:
        return None
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, old)
    return None


def spelt(name: str, value: str) -> str:
    return f"{option(name)}={value}"


def make_values(folder: Path) -> dict[str, str]:
    """A value of each class; the files lie in `folder`, and are named as from there. A run is made there too."""
    os.mkfifo(folder / "fifo")
    (folder / "folder").mkdir()
    (folder / "binary").write_bytes(bytes(range(256)) * 4)
    (folder / "run").mkdir()
    (folder / "run" / "config.toml").write_text("")
    return {
        "word": "manny",
        "negative": "-3",
        "zero": "0",
        "huge": "2147483647",
        "long": "9" * 5000,
        "nan": "nan",
        "unicode": "²",
        "empty": "",
        "nul": "a\0b",
        "bytes": "a\udcffb",
        "fifo": "fifo",
        "folder": "folder",
        "binary": "binary",
    }
