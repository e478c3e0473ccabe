"""A run of two processes under faults that are drawn from a seed, round after round: nothing may be lost.

    python -m benchmarks.soak MINUTES [SEED]

from the root of the repository, as root where full disks are to be among the faults. Each round is a small run that is
interrupted `FAULTS` times, by one of

    early    one process gets SIGKILL while both start, perhaps before they meet, and the other must end by itself
    kill     the same, when they train
    stop     SIGSTOP of one process, likewise
    damage   SIGKILL of both, and one bit flipped in a file of the newest checkpoint, of those that are not empty, where
             it has its checksums (without them the bit cannot be seen)
    full     the file system has no room until the run ends by itself; then it has room again

and started again. Then it must have each step once, with the figures of a run that nothing has befallen, to the bit,
the same parameters, and checkpoints that are whole; a damaged one must have been named. The total time of the goodput
must agree to 1 % with the time from when process 0 first begins to train, its imports done, to the end of the last
process, and its time of kept steps, to 1 % of all, with the steps of metrics.jsonl: the sum of their `step_seconds`
without `data_seconds`.

Two things are quicker than in a real run, so that minutes suffice: heartbeats come every 0.5 s and not every 5 s,
because what a killed process has done since its last one is not known, and processes count as lost after 60 s,
so that a busy machine loses none.

Of a round that fails the folder is kept, and a process that does not end says first where its threads are.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import numpy as np

from jaxdist.cluster import heartbeat
from jaxdist.training.checkpoint.step_dir import StepDir
from jaxdist.training.goodput import goodput, starts_of
from jaxdist.training.run_dir import RunFolder
from tests.faults.jobs import ends, job, metrics, saved, told, train, until
from tests.processes import Process
from tests.training.conftest import SMALL, over
from tests.training.curves import parameters, without_times

STEPS = 72
FAULTS = 4
PROCESSES = 2
ROOM = 64 << 20
"""Bytes of the file system on which a run stands that is to be full."""

OPTIONS = over(
    SMALL,
    f"--train.steps={STEPS}", "--checkpoint.every=8", "--validation.every=40", "--model.layers=1", "--mesh=2x1x1",
    "--parallel.zero=1", "--fault.heartbeat-seconds=60", "--fault.start-seconds=40",
)  # fmt: skip

STARTING = 8.0
"""Seconds within which both processes have met, unless the machine is busy."""

PATCH = """
import faulthandler, signal
faulthandler.register(signal.SIGUSR2)
from jaxdist.cluster import heartbeat
heartbeat.LEAST_INTERVAL = 0.5
from jaxdist.training.step_runner import StepRunner
take = StepRunner.take
def slowly(self, *arguments):
    time.sleep(0.1)
    return take(self, *arguments)
StepRunner.take = slowly
began = pathlib.Path(os.environ["SOAK_BEGAN"])
if me == 0 and not began.exists():
    began.write_text(str(time.time()))
"""


@contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """A file system of `ROOM` bytes at `folder`."""
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={ROOM}", "soak", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def ended(running: list[Process], seconds: float) -> list[int]:
    """The exit codes. AssertionError with what all said and where their threads are, where one does not end."""
    try:
        return ends(running, seconds)
    except AssertionError:
        for process in running:
            process.send_signal(signal.SIGUSR2)
        time.sleep(2)
        raise AssertionError(told(running)) from None


@contextmanager
def kept_if_it_fails(folder: Path) -> Iterator[None]:
    """Copy the folder out of the way of what clears it, where the block raises."""
    try:
        yield
    except BaseException:
        copy = tempfile.mkdtemp(prefix="soak-failed-")
        shutil.copytree(folder, copy, dirs_exist_ok=True)
        print(f"what is left of the round is in {copy}", flush=True)
        raise


class Round:
    """One run, and what befalls it."""

    def __init__(self, words: list[str], folder: Path, rng: random.Random, kinds: list[str]):
        self.words = [*words, f"--run-dir={folder}"]
        self.folder = folder
        self.rng = rng
        self.kinds = kinds
        self.happened: Counter[str] = Counter()
        self.damaged: list[Path] = []
        """Files in which a bit was flipped."""
        self.said = ""
        self.seconds = 0.0
        """From when process 0 first began to train, to the end of the last process."""

    def run(self) -> None:
        """Let it be interrupted, and come to its end."""
        began = self.folder.with_name("began")
        os.environ["SOAK_BEGAN"] = str(began)
        for number in range(FAULTS):
            # The clock of `seconds` and that of the run begin with a start that trains.
            kind = self.rng.choice(self.kinds if number == 0 else [*self.kinds, "early"])
            with job(train(self.words, PROCESSES, PATCH)) as running:
                # Each start comes further than the last one, and saves.
                target = (number + 1) * STEPS // (FAULTS + 2) + self.rng.randrange(STEPS // (FAULTS + 2))
                # Without another checkpoint the run would end, rightly, and begin no more.
                needed = 2 if kind == "damage" else 1
                if kind == "early":
                    time.sleep(STARTING * self.rng.random())
                else:
                    until(lambda: self._step(running) >= target and self._checkpoints() >= needed, running, 900)  # noqa: B023
                    time.sleep(self.rng.random())
                self.happened[kind] += 1
                getattr(self, f"_{kind}")(running)
                self.said += told(running)
        with job(train(self.words, PROCESSES, PATCH)) as running:
            codes = ended(running, 900)
            self.said += told(running)
            assert codes == [0] * PROCESSES, self.said
        self.seconds = time.time() - float(began.read_text())

    def _step(self, running: list[Process]) -> int:
        """The step that process 0 of this start has reached; metrics.jsonl may have further ones of the last start."""
        beats = heartbeat.read(self.folder / "heartbeats", [0])
        return max((beat.step for beat in beats if beat.pid == running[0].pid), default=0)

    def _checkpoints(self) -> int:
        """How many steps are whole on disk, as their checksums say."""
        step = StepDir(self.folder / "checkpoints")
        return sum(step.damage(number) is None for number in step.sealed())

    def _kill(self, running: list[Process]) -> None:
        self._lose(running, signal.SIGKILL)

    _early = _kill

    def _stop(self, running: list[Process]) -> None:
        self._lose(running, signal.SIGSTOP)

    def _lose(self, running: list[Process], how: int) -> None:
        lost = self.rng.choice(running)
        lost.send_signal(how)
        others = [process for process in running if process is not lost]
        codes = ended(others, 180)
        assert 0 not in codes, told(running)
        assert all(one.said() for one in others), codes
        lost.kill()
        lost.wait()

    def _damage(self, running: list[Process]) -> None:
        for process in running:
            process.kill()
        ends(running, 60)
        checkpoints = StepDir(self.folder / "checkpoints")
        if max(checkpoints.steps()) != saved(self.folder):
            self.happened["damage without checksums"] += 1
            return
        step = checkpoints.path(saved(self.folder))
        files = sorted(path for path in step.rglob("*") if path.is_file() and path.stat().st_size)
        file = self.rng.choice(files)
        content = bytearray(file.read_bytes())
        content[self.rng.randrange(len(content))] ^= 1 << self.rng.randrange(8)
        file.write_bytes(content)
        self.damaged.append(file)

    def _full(self, running: list[Process]) -> None:
        """No room: the run cannot save, and ends with the reason."""
        ballast = self.folder.parent / "ballast"
        file = os.open(ballast, os.O_WRONLY | os.O_CREAT)
        with suppress(OSError):
            while True:
                os.write(file, bytes(1 << 12))
        os.close(file)
        codes = ended(running, 120)
        assert 0 not in codes, told(running)
        ballast.unlink()
        said = told(running)
        assert "o space left" in said, said

    def check(self, straight: Path) -> tuple[float, float]:
        """Return by which part of the time the goodput's total, and its kept steps, are off.

        AssertionError where something is lost.
        """
        assert without_times(self.folder) == without_times(straight), self.said
        steps = [line["step"] for line in metrics(self.folder) if "loss" in line]
        assert steps == list(range(1, STEPS + 1)), steps
        assert np.array_equal(parameters(self.folder, STEPS), parameters(straight, STEPS))
        step_dir = StepDir(self.folder / "checkpoints")
        assert step_dir.steps()
        assert [step_dir.damage(step) for step in step_dir.steps()] == [None] * len(step_dir.steps())
        for file in self.damaged:
            step = file.relative_to(step_dir.folder).parts[0]
            assert f"checkpoints/{step} is damaged and skipped: " in self.said, (str(file), self.said)
        starts = starts_of(RunFolder(self.folder))
        found = goodput(starts)
        told = [line["step_seconds"] - line["data_seconds"] for line in metrics(self.folder) if "loss" in line]
        # A start that ends before it knows its folder is none.
        assert FAULTS + 1 - self.happened["early"] <= found.starts <= FAULTS + 1, (found, self.said)
        self.goodput = str(found)
        return abs(found.total - self.seconds) / self.seconds, abs(found.kept - sum(told)) / self.seconds


def main(words: list[str]) -> int:
    minutes = float(words[0])
    seed = int(words[1]) if len(words) > 1 else 0
    kinds = ["kill", "stop", "damage"]
    if os.geteuid() == 0:
        kinds.append("full")
    else:
        print("full disks are left out: they need root")
    with ExitStack() as stack:
        base = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="soak-"))).resolve()
        # No cache of programs: process 1 does not find what process 0 has written, and gloo waits 30 s for it.
        os.environ.pop("JAX_COMPILATION_CACHE_DIR", None)
        # Most of a round is compiling: this takes two thirds of the processor's time of XLA's defaults.
        os.environ["XLA_FLAGS"] = "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"
        text = base / "text.txt"
        text.write_text("".join(path.read_text() for path in sorted(Path("jaxdist/cluster").glob("*.py"))))
        options = [*OPTIONS, f"--data.path={text}"]
        os.environ["SOAK_BEGAN"] = str(base / "began")
        with job(train([*options, f"--run-dir={base / 'straight'}"], PROCESSES, PATCH)) as running:
            assert ends(running, 900) == [0] * PROCESSES, told(running)
        disk = stack.enter_context(small_disk(base / "disk")) if "full" in kinds else base
        end = time.monotonic() + 60 * minutes
        number, happened, worst = 0, Counter(), (0.0, 0.0)
        while time.monotonic() < end:
            rng = random.Random(f"{seed} {number}")
            with tempfile.TemporaryDirectory(dir=disk) as folder:
                one = Round(options, Path(folder) / "run", rng, kinds)
                with kept_if_it_fails(Path(folder)):
                    one.run()
                    off = one.check(base / "straight")
            happened += one.happened
            worst = max(worst[0], off[0]), max(worst[1], off[1])
            drawn = ", ".join(f"{count} {kind}" for kind, count in sorted(one.happened.items()))
            print(f"round {number}: {drawn}; goodput off by {off[0]:.2%} and {off[1]:.2%}: {one.goodput}", flush=True)
            number += 1
    result = {"seed": seed, "rounds": number, "faults": dict(happened), "total off by": worst[0], "kept": worst[1]}
    print(json.dumps(result))
    return int(max(worst) > 0.01)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
