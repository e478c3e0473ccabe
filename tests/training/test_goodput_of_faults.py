"""Goodput of runs whose faults are known: the real loop, meter and clock of phases, in a time that the test keeps."""

import json
import os
import random
from collections import Counter
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from jaxdist.cluster import phase_clock, watchdog
from jaxdist.cluster.heartbeat import READING, STARTING
from jaxdist.cluster.process_env import ProcessEnv
from jaxdist.cluster.watchdog import Watchdog
from jaxdist.process.exit_codes import DONE, FAILED
from jaxdist.training import meter, trainer
from jaxdist.training.forward.step import Metrics
from jaxdist.training.goodput import goodput, keep_start, starts_of
from jaxdist.training.meter import Meter, Reporting
from jaxdist.training.run_dir import RunFolder
from jaxdist.training.trainer import Trainer, Validation
from tests.tiers import exhaustive

STEPS = 2000
EVERY = 100
"""Steps between saves; half as many between validations, and a tenth as many between lines."""
BEAT = 5.0
WRITING = 0.1
FAULTS = ("kill", "kill", "stop", "hang")


class Ended(BaseException):
    """The process is gone."""


class World:
    """A time in which runs take place, and what it was spent on: the truth."""

    def __init__(self, folder: RunFolder, rng: random.Random):
        self.folder = folder
        self.rng = rng
        self.now = 1e6
        self.ends_at = np.inf
        """When the process that runs is killed."""
        self.beat = lambda: None
        self.next_beat = np.inf
        self.spent: Counter[str] = Counter()
        """Seconds by what they were spent on; of the steps, all of them."""
        self.step_seconds: dict[int, float] = {}
        """Of each step, when it was last taken."""
        self.lines: list[dict] = []
        self.saved = {0: self.now}
        """When each step is whole on disk."""

    def spend(self, what: str, seconds: float) -> None:
        end = min(self.now + seconds, self.ends_at)
        began = self.now
        while self.next_beat <= end:
            self.now = self.next_beat
            self.beat()
            self.next_beat += BEAT
        self.now = end
        self.spent[what] += end - began
        if end == self.ends_at:
            raise Ended

    def take(self, step: int) -> None:
        """A step; some take longer than others."""
        seconds = self.rng.uniform(0.5, 3.0)
        self.spend("steps", seconds)
        self.step_seconds[step] = seconds

    @contextmanager
    def batches(self, *_, **__):
        """What hands out batches, and is slow now and then."""

        def made():
            while True:
                self.spend("reading data", self.rng.choice([0.0, 0.0, 0.0, 1.0]))
                yield None

        yield made()

    def validate(self, state, enough):
        for _ in range(4):
            if enough():
                return None
            self.spend("validating", 2.0)
        return {"loss": 1.0}

    def save(self, step: int, state) -> None:
        self.spend("saving", 3.0)
        # The rest is written in the background.
        self.saved[step] = self.now + 4.0

    def run(self, ends_at: float, fault: str) -> int | None:
        """A start, which ends so many seconds later by `fault`. Returns the exit code; None where it was killed."""
        dog = Watchdog(ProcessEnv(), 0)
        ends_at += self.now
        if fault == "kill":
            self.ends_at = ends_at
        first = max(step for step, when in self.saved.items() if when <= self.now)
        self.saved = {step: when for step, when in self.saved.items() if step <= first}
        self.lines = [line for line in self.lines if line["step"] <= first]

        def beat(ended: int | None = None) -> None:
            written = self.folder.heartbeats / "0.json"
            written.parent.mkdir(parents=True, exist_ok=True)
            written.write_text(json.dumps(asdict(dog._make_heartbeat()) | {"ended": ended}))
            os.utime(written, (self.now, self.now))

        def begin() -> int:
            dog.note(READING)
            self.spend("starting", 6.0)
            return first

        def take(step: int, state: int, batch) -> int:
            self.take(step)
            if fault == "hang" and self.now >= ends_at:
                # Another process is gone, and this one waits until it counts as lost.
                self.spend("steps", 60.0)
                beat(FAILED)
                raise Ended
            zero = np.int32(0)
            measured.step(step, Metrics(np.float32(1), np.float32(1), np.int32(8), zero, zero, {}))
            return step

        try:
            self.spend("starting", 8.0)
            dog.note(STARTING)
            keep_start(self.folder)
            self.beat, self.next_beat = beat, self.now
            log = SimpleNamespace(say=lambda line: None, progress=lambda *_: None, metrics=self.line)
            mesh = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])
            self.meter = measured = Meter(Reporting(mesh, STEPS, EVERY // 10, 10, "token", 8), log, first)
            runner = SimpleNamespace(
                program=None, unfinished="", compile=lambda _: self.spend("compiling", 40.0), take=take,
                drain=lambda step, state: state,
            )  # fmt: skip
            saving = SimpleNamespace(
                due=lambda steps: steps[-1] % EVERY == 0, save=self.save, save_if_best=lambda *_: None, baseline=None,
                checkpoints=SimpleNamespace(check=lambda: None, wait=lambda: self.spend("saving", 1.0)),
                outcome=lambda: "",
            )  # fmt: skip
            stop = SimpleNamespace(
                here=lambda: fault == "stop" and self.now >= ends_at, name="SIGTERM", due=lambda: False
            )
            code = Trainer(
                first=first, steps=STEPS, every=1, start=begin, batch_after=lambda step: None, prefetch=1,
                runner=runner, meter=measured, log=log, profile=NoProfile(), save_policy=saving,
                validation=Validation(EVERY // 2, self.validate), check_lock=lambda: None, folder=self.folder,
                job=SimpleNamespace(watchdog=dog, note=dog.note, stop=stop),
            ).train()  # fmt: skip
            beat(code)
            return code
        except Ended:
            return None
        finally:
            self.ends_at = self.next_beat = np.inf

    def line(self, values: dict) -> None:
        """Write a line, which takes a while; that of a step is time of the step."""
        if "loss" in values:
            self.spend("steps", WRITING)
            self.step_seconds[values["step"]] += WRITING
            # A start that goes on between two lines has a line of fewer steps.
            values = values | {"steps": self.meter.count}
        self.lines.append(values)


class NoProfile(nullcontext):
    before = after = lambda *_: None


@pytest.mark.parametrize("seed", [*range(2), *exhaustive([(seed,) for seed in range(2, 200)])])
def test_a_run_of_an_hour_and_a_half_under_faults_that_are_drawn(seed, monkeypatch, tmp_path):
    rng = random.Random(seed)
    world = World(RunFolder(tmp_path / "run"), rng)
    now = lambda: world.now
    for module in (meter, phase_clock, watchdog, trainer):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=now, monotonic=now, time=now))
    monkeypatch.setattr(trainer, "Prefetch", world.batches)
    monkeypatch.setattr(trainer, "plot_loss", lambda *_: None)
    began, starts = world.now, 1
    while world.run(rng.uniform(300, 1200), rng.choice(FAULTS)) != DONE:
        starts += 1
        world.spend("between", rng.uniform(0, 200))

    steps = sum(world.step_seconds.values())
    truth = {
        "kept": steps,
        "lost": world.spent["steps"] - steps,
        "compiling": world.spent["compiling"],
        "reading_data": world.spent["reading data"],
        "saving": world.spent["saving"],
        "validating": world.spent["validating"],
        "starting": 8.0 + 6.0,
        "restarting": world.spent["starting"] - 14.0 + world.spent["between"],
        "other": 0.0,
    }
    found = goodput(starts_of(world.folder))
    assert found.starts == starts > 1
    assert found.total == pytest.approx(world.now - began, abs=0.1)
    # What a process has done since its last heartbeat is not known: that alone is missing, and counts as the restart.
    off = {name: found.seconds[name] - seconds for name, seconds in truth.items()}
    assert max(map(abs, off.values())) <= min(0.01 * found.total, BEAT * starts), off
    assert truth["lost"] > 0, "something was lost"
    # The lines of metrics.jsonl say the same of the steps that the run has kept.
    lines = [line for line in world.lines if "loss" in line]
    assert [line["step"] for line in lines] == list(range(EVERY // 10, STEPS + 1, EVERY // 10))
    told = sum(line["steps"] * (line["step_seconds"] - line["data_seconds"]) for line in lines)
    inside = sum(world.step_seconds[line["step"] - before] for line in lines for before in range(line["steps"]))
    assert told == pytest.approx(inside, rel=1e-3)
