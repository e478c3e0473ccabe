"""Kills of small runs of every kind, as many as there is time for: each must go on to the same bits.

    python -m benchmarks.kills MINUTES [SEED] [KILLS OF A ROW]

from the root of the repository. A kill is made of two halves. A run is stopped by SIGSTOP, all its threads at once, at
a moment that is drawn: after a step, while it saves, between a checkpoint and its checksums, or any number of
milliseconds after its start. Its folder is copied then, and has just what SIGKILL leaves there at that moment. Then
the run goes on, and from the copy a run starts that must end as the one that nobody stopped: the arrays of the last
checkpoint, and the metrics of each step, to the bit. It too is stopped, and so on.

These runs follow one another in one process, which keeps what it has compiled and the data that it has read: that takes
a second where a process of its own takes ten. The first run of each row, whose end all others of the row must have, is
in another process. `tests/training/test_kills.py` and `test_drawn_kills.py` have kills of processes of their own.
"""

from __future__ import annotations

import json
import os
import platform
import random
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxdist.training.checkpoint.step_dir import StepDir
from jaxdist.training.checkpoint.stored_arrays import open_arrays, whole
from tests.training.conftest import SMALL, over
from tests.training.curves import without_times
from tests.training.test_drawn_kills import BASE, COMMON, EVERY, STEPS

DEVICES = 4
LLAMA = ["--model.family=llama", "--model.kv-heads=1", "--model.mlp=32"]
MOE = ["--model.family=moe", "--model.experts=4", "--model.expert-mlp=16", "--model.balance-loss=0.01"]
LORA = ["--model.lora-rank=2", f"--init-from={BASE}"]
HALVES = ["--train.accumulation=2", "--model.dropout=0.1"]
DIGITS = ["--train.global-batch-size=8", "--data.validation-fraction=0.2"]

ROWS = {
    "gpt, float32, SGD": ["--mesh=1x1x1", "--optimizer.name=sgd", *HALVES],
    "gpt, bfloat16": ["--mesh=2x1x1", "--precision=bfloat16", "--parallel.zero=2", *HALVES],
    "gpt, float16": ["--mesh=2x1x1", "--precision=float16", "--parallel.zero=1"],
    "llama, fp8": ["--mesh=1x1x1", "--precision=fp8", *LLAMA],
    "gpt, Muon": ["--mesh=4x1x1", "--optimizer.name=muon", "--parallel.zero=1"],
    "gpt, int8 over replicas": ["--mesh=replica=2", "--parallel.gradient-compression=int8", "--model.embed=64"],
    "LoRA": ["--mesh=2x1x1", "--precision=float32", *LORA],
    "experts": ["--mesh=expert=2", "--parallel.zero=1", *MOE],
    "gpt, mixed": ["--mesh=2x1x1", "--precision=mixed", "--parallel.zero=3", "--train.accumulation=2"],
    "llama, tensor parallel": ["--mesh=1x2x1", "--parallel.zero=1", *LLAMA],
    "gpt, local steps": ["--mesh=replica=2", f"--train.local-steps={EVERY}", "--optimizer.outer-momentum=0.5"],
    "gpt, delayed gradients": ["--mesh=replica=2", "--parallel.delayed-gradients=true"],
    "gpt, pipeline 1f1b": ["--mesh=1x1x2", "--pipeline.microbatches=4"],
    "gpt, PipeDream": ["--mesh=1x1x2", "--pipeline.schedule=pipedream", "--optimizer.clip=0"],
    "LoRA on nf4": ["--mesh=1x1x1", "--model.lora-base=nf4", "--precision=bfloat16", *LORA],
    "experts, fp8": ["--mesh=expert=2", "--precision=fp8", *MOE],
    "gpt, ring attention": ["--mesh=context=2", "--parallel.context=ring"],
    "llama, Muon, bfloat16, ZeRO 3": ["--mesh=2x1x1", "--optimizer.name=muon", "--precision=bfloat16",
                                      "--parallel.zero=3", *LLAMA],
    "gpt, top-k over replicas": ["--mesh=replica=2", "--parallel.gradient-compression=topk-int8",
                                 "--parallel.compression-density=0.1", "--model.embed=64"],
    "gpt, PowerSGD over replicas": ["--mesh=replica=2", "--parallel.gradient-compression=powersgd",
                                    "--model.embed=64"],
    "cnn": ["--mesh=2x1x1", "--model.family=cnn", *DIGITS],
    "gpt, moments in bfloat16": ["--mesh=2x1x1", "--optimizer.moments=bfloat16", "--parallel.zero=1"],
    "gpt, Lion, spikes": ["--mesh=2x1x1", "--optimizer.name=lion", "--train.spike=6", "--log.norms=true"],
    "gemma, bfloat16": ["--mesh=2x1x1", "--model.family=gemma", "--precision=bfloat16", "--model.mlp=32"],
    "experts, data and ZeRO 3": ["--mesh=data=2,expert=2", "--parallel.zero=3", "--precision=bfloat16", *MOE],
    "gpt, bfloat16 over replicas": ["--mesh=replica=2", "--parallel.gradient-compression=bfloat16"],
    "llama, float16, sequence parallel": ["--mesh=2x2x1", "--precision=float16", "--parallel.sequence=true",
                                          "--parallel.zero=3", *LLAMA],
    "gpt, interleaved pipeline": ["--mesh=1x1x2", "--pipeline.schedule=interleaved", "--model.layers=4",
                                  "--pipeline.microbatches=4"],
    "gpt, Ulysses": ["--mesh=context=2", "--parallel.context=ulysses", "--parallel.zero=2"],
    "LoRA over replicas in int8": ["--mesh=replica=2", "--precision=float32",
                                   "--parallel.gradient-compression=int8", *LORA],
}  # fmt: skip
"""Of each kind of run, what it has beside `SMALL` and `COMMON`."""


class Moment(NamedTuple):
    """When a run is stopped: `seconds` after it begins, or after it comes to what `tests.training.killing` calls so."""

    name: str
    step: int
    seconds: float


def moments_of_first(rng: random.Random) -> list[Moment]:
    """The moments of the run that all others are compared with, which also compiles."""
    return [_moment(rng, step) for step in range(1, STEPS) if step % EVERY == 0] + [_moment(rng, STEPS - 1)]


def moments_of(rng: random.Random, first: int, took: float, most: int) -> list[Moment]:
    """At most so many moments of a run that goes on after step `first`, and takes about `took` seconds."""
    steps = rng.sample(range(first + 1, STEPS + 1), min(1, STEPS - first))
    found = [_moment(rng, step) for step in steps] + [Moment("begin", 0, rng.uniform(0, took))]
    return rng.sample(found, min(most, len(found)))


def _moment(rng: random.Random, step: int) -> Moment:
    kind = rng.choice(["save", "seal", "step", "step"])
    if kind == "step":
        return Moment(kind, step, rng.uniform(0, 0.03))
    saved = min(step - step % -EVERY, STEPS) if step % EVERY else step
    return Moment(kind, saved, 0.0 if kind == "seal" else rng.uniform(0, 0.1))


class Worker:
    """A process that trains as it is asked, and is stopped for a copy of its folder."""

    def __init__(self, said: Path):
        self.said = said
        read, write = os.pipe()
        command = [sys.executable, "-m", "benchmarks.kills", "--worker", str(write)]
        with said.open("ab") as file:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=file, stderr=file, pass_fds=[write], text=True
            )
        os.close(write)
        self._answers = os.fdopen(read)

    def train(self, words: list[str], moments: list[Moment], stopped: Callable[[], None], limit: float) -> float:
        """Train, call `stopped` at each of the moments while the process stands; return the seconds that it took."""
        self._process.stdin.write(json.dumps([words, moments]) + "\n")
        self._process.stdin.flush()
        end = time.monotonic() + limit
        while not select.select([self._answers], [], [], 0.005)[0]:
            assert time.monotonic() < end, f"it has not ended after {limit} s"
            if os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WNOHANG):
                stopped()
                os.kill(self._process.pid, signal.SIGCONT)
        answer = self._answers.readline()
        assert answer, f"it has died with exit code {self._process.wait()}"
        code, seconds = json.loads(answer)
        assert code == 0, f"exit code {code}"
        return seconds

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._process.stdin.close()
        self._answers.close()


def work(answers: int) -> None:
    """The program of a worker."""
    from jaxdist import train
    from tests.training.killing import at_moments

    waiting: list[Moment] = []
    timers: list[threading.Timer] = []

    def then(name: str, step: int) -> None:
        for moment in [one for one in waiting if (one.name, one.step) == (name, step)]:
            waiting.remove(moment)
            if name == "seal":
                os.kill(os.getpid(), signal.SIGSTOP)
            else:
                timers.append(threading.Timer(moment.seconds, os.kill, (os.getpid(), signal.SIGSTOP)))
                timers[-1].start()

    forget = keep_what_is_made()
    at_moments(then)
    words = None
    for line in sys.stdin:
        before = words
        words, moments = json.loads(line)
        if words != before:
            forget()
        waiting[:] = [Moment(*one) for one in moments]
        began = time.perf_counter()
        then("begin", 0)
        code = train.main(words)
        took = time.perf_counter() - began
        # Of those that it has not come to, nothing is left for the next run.
        for timer in timers:
            timer.cancel()
            timer.join()
        timers.clear()
        os.write(answers, (json.dumps([code, took]) + "\n").encode())


def keep_what_is_made() -> Callable[[], None]:
    """Let runs of the same request share what they have compiled and read. Returns what forgets it."""
    from jaxdist.training import rounds, run, train_run, trainer
    from jaxdist.training.engine import Engine

    kept: list[dict[Any, Any]] = []

    def once(owner: Any, name: str, key: Callable[..., Any]) -> None:
        old = getattr(owner, name)
        made: dict[Any, Any] = {}
        kept.append(made)

        def new(*arguments: Any, **options: Any) -> Any:
            if options:
                # The key does not have them. `Run.as_read` has options, and is quick to make.
                return old(*arguments, **options)
            one = key(*arguments)
            if one not in made:
                # With the arguments, whose ids the key may have.
                made[one] = arguments, old(*arguments)
            return made[one][1]

        setattr(owner, name, new)

    once(run, "Run", lambda config: config.model_copy(update={"resume": ""}).model_dump_json())
    once(Engine, "abstract_logical", id)
    once(Engine, "lower", lambda engine, batch: id(engine))
    once(Engine, "compile", lambda engine, lowered: (id(engine), id(lowered)))
    once(rounds, "run_of", lambda run, mesh: (id(run), mesh))
    once(rounds, "lower_take", id)
    once(rounds, "lower_outer", lambda run, take: id(run))
    for module in (trainer, train_run):
        module.plot_loss = lambda *_: None

    def forget() -> None:
        for made in kept:
            made.clear()

    return forget


class Row:
    """A kind of run, and its kills."""

    def __init__(self, name: str, base: Path, text: Path, seed: int):
        self.name = name
        base.mkdir()
        self.folder = base / "run"
        self.base = base
        small = [one for one in SMALL if "LoRA" not in name or not one.startswith("--model.")]
        if "LoRA" in name:
            small.append("--model.sequence=16")
        more = ROWS[name]
        if "cnn" in name:
            small = [one for one in small if not one.startswith("--model.")]
        else:
            more = [*more, f"--data.path={text}"]
        self.words = over(small, *COMMON, *more, f"--run-dir={self.folder}")
        self.rng = random.Random(f"{name} {seed}")
        self.made = 0
        self.images: deque[Path] = deque()
        self.kills = 0
        """From which it went on to the same bits."""
        self.in_a_save = 0
        """Of these, those at which a checkpoint was begun and not whole."""

    def kill(self, kills: int, until: float, first: Worker, others: Worker) -> None:
        """Kill it so often, or as often as it can be before `until`. AssertionError where bits differ."""
        first.train(self.words, moments_of_first(self.rng), self._copy, 900)
        wanted = self._end()
        took = 1.0
        while self.images and self.kills < kills and time.monotonic() < until:
            image = self.images.popleft()
            shutil.rmtree(self.folder)
            image.rename(self.folder)
            step_dir = StepDir(self.folder / "checkpoints")
            half = set(step_dir.steps()) - set(step_dir.sealed()) or [*step_dir.folder.glob("*tmp*")]
            more = kills - self.kills - len(self.images) - 1
            moments = moments_of(self.rng, max(step_dir.sealed(), default=0), took, min(2, max(more, 0)))
            took = others.train(self.words, moments, self._copy, 900)
            self._compare(wanted)
            self.kills += 1
            self.in_a_save += bool(half)

    def _copy(self) -> None:
        image = self.base / f"image{self.made}"
        self.made += 1
        with suppress(FileNotFoundError):
            # A run that has not made its folder has left nothing.
            shutil.copytree(self.folder, image, symlinks=True)
            self.images.append(image)

    def _end(self) -> tuple[dict[str, np.ndarray], list[dict]]:
        """What the run has left in its folder."""
        step = StepDir(self.folder / "checkpoints")
        assert step.damage(STEPS) is None, step.damage(STEPS)
        arrays = {
            f"{item}/{name}": array.read(whole(len(array.shape)))
            for item in ("params", "training")
            for name, array in open_arrays((step.path(STEPS) / item).resolve()).items()
        }
        assert arrays
        return arrays, without_times(self.folder)

    def _compare(self, wanted: tuple[dict[str, np.ndarray], list[dict]]) -> None:
        arrays, figures = self._end()
        its, its_figures = wanted
        assert arrays.keys() == its.keys(), arrays.keys() ^ its.keys()
        wrong = [name for name in arrays if arrays[name].tobytes() != its[name].tobytes()]
        assert not wrong, f"arrays that differ: {wrong}"
        assert figures == its_figures, [pair for pair in zip(figures, its_figures, strict=False) if pair[0] != pair[1]]


def write_text(path: Path) -> None:
    """A text with something to learn in it."""
    rng = random.Random(0)
    words = ["mesh", "axis", "device", "shard", "gather", "reduce", "layer", "token", "batch", "step"]
    path.write_text("\n".join(" ".join(rng.choice(words) for _ in range(12)) for _ in range(600)))


def main(words: list[str]) -> int:
    if words[0] == "--worker":
        work(int(words[1]))
        return 0
    until = time.monotonic() + 60 * float(words[0])
    seed = int(words[1]) if len(words) > 1 else 0
    kills = int(words[2]) if len(words) > 2 else 34
    chosen = words[3:] or list(ROWS)
    os.environ["JAX_NUM_CPU_DEVICES"] = str(DEVICES)
    # In programs that XLA:CPU has read, devices may wait for each other for ever (docs/how-to/processes.md).
    os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"
    os.environ["XLA_FLAGS"] = "--xla_backend_optimization_level=0"
    print(f"python {platform.python_version()}, jax {version('jax')}, orbax-checkpoint {version('orbax-checkpoint')}")
    total, in_a_save, failed = 0, 0, []
    with tempfile.TemporaryDirectory(prefix="kills-") as folder:
        base = Path(folder).resolve()
        write_text(base / "text.txt")
        workers: list[Worker] = []
        for number, name in enumerate(chosen):
            if time.monotonic() > until:
                break
            began = time.monotonic()
            workers = workers or [Worker(base / "said") for _ in range(2)]
            row = Row(name, base / str(number), base / "text.txt", seed)
            try:
                row.kill(kills, until, *workers)
            except AssertionError as error:
                failed.append(name)
                print(f"{name}: FAILED after {row.kills} kills: {error}\n{tail(base / 'said')}", flush=True)
                shutil.copytree(row.base, f"{tempfile.gettempdir()}/failed-kills-{number}", symlinks=True)
                while workers:
                    workers.pop().close()
            total += row.kills
            in_a_save += row.in_a_save
            seconds = time.monotonic() - began
            print(f"{name:<36}{row.kills:4} kills, {row.in_a_save:3} in a save  {seconds:4.0f} s", flush=True)
            shutil.rmtree(row.base)
        while workers:
            workers.pop().close()
    print(json.dumps({"seed": seed, "kills": total, "in a save": in_a_save, "failed": failed}))
    return int(bool(failed))


def tail(said: Path) -> str:
    """The end of what the workers have said."""
    return said.read_text(errors="replace")[-3000:]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
