"""A compiled train step and its times: what the measurements share. No data is read, nothing is saved."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import jax
import numpy as np

from jaxdist.config import Config
from jaxdist.data.batches import Batch, train_batch
from jaxdist.data.image_batches import image_batch
from jaxdist.data.images import Part
from jaxdist.data.tokens import Tokens, TokenWriter
from jaxdist.training.run import Run
from jaxdist.training.step import TrainState


def random_work(run: Run) -> Batch:
    """A global batch of random tokens or images, by the way that real ones take; a smaller batch is the beginning of a
    larger."""
    config, sequence = run.config, run.config.model.sequence
    rows = np.arange(config.train.global_batch_size)
    if config.model.images:
        return image_batch(_noise(config, rows.size), rows, run.task.micro_batches, run.mesh, run.layout)
    ids = np.random.default_rng(0).integers(0, config.model.vocab, rows.size * sequence + 1)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tokens.bin"
        with TokenWriter(path, "uint32") as writer:
            writer.write(ids)
        tokens = Tokens.open(path, "uint32")
        return train_batch(tokens, rows, sequence, run.task.micro_batches, run.mesh, run.layout)


def _noise(config: Config, rows: int) -> Part:
    """That many images of normal noise with labels."""
    sizes, rng = config.model, np.random.default_rng(0)
    labels = rng.integers(0, sizes.classes, rows, dtype=np.int32)
    images = rng.normal(size=(rows, sizes.image, sizes.image, sizes.channels)).astype(np.float32)
    channels = np.ones(sizes.channels, np.float32)
    return Part(images, np.arange(rows), labels, 0 * channels, channels)


@dataclass
class Timed:
    """The compiled step of a run, and the seconds of the steps that were measured."""

    run: Run
    program: jax.stages.Compiled
    compile_seconds: float
    """Tracing and lowering included."""
    seconds: list[float] = field(default_factory=list)
    loss: float | None = None
    """Of the last step; None where it is not finite, which JSON cannot say."""
    _state: TrainState | None = None
    _batch: Batch | None = None

    @classmethod
    def compile(cls, run: Run) -> Timed:
        """Nothing is placed on the devices yet."""
        run.steps = max(run.config.train.steps, 1)  # of the schedule alone: no data tells how many rows an epoch has
        started = time.perf_counter()
        with jax.set_mesh(run.mesh):
            program = run.compile()
        return cls(run, program, time.perf_counter() - started)

    @property
    def units(self) -> int:
        """Tokens, or images, of a step."""
        return self.run.config.train.global_batch_size * self.run.task.units

    @property
    def quartiles(self) -> tuple[float, float, float]:
        """Lower quartile, median and upper quartile of a step's seconds."""
        low, median, high = np.percentile(self.seconds, [25, 50, 75])
        return float(low), float(median), float(high)

    def place(self) -> None:
        with jax.set_mesh(self.run.mesh):
            self._state, self._batch = self.run.init(), random_work(self.run)
        jax.block_until_ready((self._state, self._batch))

    def drop(self) -> None:
        self._state = self._batch = None

    def advance(self) -> float:
        """One step, waited for; its seconds."""
        with jax.set_mesh(self.run.mesh):
            started = time.perf_counter()
            self._state, metrics = self.program(self._state, self._batch)
            jax.block_until_ready(self._state)
            seconds = time.perf_counter() - started
        self.loss = float(metrics.loss) if np.isfinite(metrics.loss) else None
        return seconds


def measure_together(timed: Sequence[Timed], warmup: int, repeats: int) -> None:
    """Fill in `seconds` and `loss`: `warmup` + `repeats` rounds, in each of which every program makes a step.

    What else a shared machine does, and how it drifts, then hits all of them alike. Their states lie on the devices at
    the same time, and are gone afterwards.
    """
    for one in timed:
        one.place()
    rounds = [[one.advance() for one in timed] for _ in range(warmup + repeats)]
    for one, seconds in zip(timed, zip(*rounds, strict=True), strict=True):
        one.seconds = list(seconds[warmup:])
        one.drop()
