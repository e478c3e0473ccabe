"""A compiled train step and its times: what the measurements share. No data is read, nothing is saved."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxdist.cluster import kv_store
from jaxdist.cluster.heartbeat import IDLE, STARTING, STEPPING
from jaxdist.config import Config
from jaxdist.data.batches import Batch, train_batch
from jaxdist.data.image_batches import image_batch
from jaxdist.data.images import Part
from jaxdist.data.tokens import Tokens, TokenWriter
from jaxdist.training.forward.step import TrainState
from jaxdist.training.run import Run


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
        tokens = replace(Tokens.open(path, "uint32"), end=0 if config.model.documents == "apart" else None)
        return train_batch(tokens, rows, sequence, run.task.micro_batches, run.mesh, run.layout)


def _noise(config: Config, rows: int) -> Part:
    """That many images of normal noise with labels."""
    sizes, rng = config.model, np.random.default_rng(0)
    labels = rng.integers(0, sizes.classes, rows, dtype=np.int32)
    images = rng.normal(size=(rows, sizes.image, sizes.image, sizes.channels)).astype(np.float32)
    channels = np.ones(sizes.channels, np.float32)
    return Part(images, np.arange(rows), labels, 0 * channels, channels)


Note = Callable[[str], None]
"""Gets what is being done: `Job.note`."""


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
    _turns: int = 0
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
    def processes(self) -> list[int]:
        """Those that have devices of the mesh, and alone compile the step and make it."""
        return processes_of(self.run.mesh)

    @property
    def units(self) -> int:
        """Tokens, or images, of a step."""
        return self.run.config.train.global_batch_size * self.run.task.units

    @property
    def quartiles(self) -> tuple[float, float, float]:
        """Lower quartile, median and upper quartile of a step's seconds."""
        low, median, high = np.percentile(self.seconds, [25, 50, 75])
        return float(low), float(median), float(high)

    def place(self, note: Note) -> None:
        self._wait_for_the_others(note)  # gloo and NCCL give up on who compiles for longer than they wait
        note(STARTING)
        with jax.set_mesh(self.run.mesh):
            self._state, self._batch = self.run.init(), random_work(self.run)
        jax.block_until_ready((self._state, self._batch))

    def drop(self) -> None:
        self._state = self._batch = None

    def advance(self, note: Note) -> float:
        """One step, waited for; its seconds. Its processes begin it together."""
        self._wait_for_the_others(note)
        note(STEPPING)
        with jax.set_mesh(self.run.mesh):
            if len(self.processes) > 1:  # a sum over the devices: they go on closer together than messages bring them
                jax.block_until_ready(_sum(self._batch["rows"]))
            started = time.perf_counter()
            self._state, metrics = self.program(self._state, self._batch)
            jax.block_until_ready(self._state)
            seconds = time.perf_counter() - started
        self.loss = float(metrics.loss) if np.isfinite(metrics.loss) else None
        return seconds

    def _wait_for_the_others(self, note: Note) -> None:
        """Who measures more than another process comes later; meanwhile that one's devices are not kept busy."""
        if len(self.processes) > 1:
            self._turns += 1
            name = f"zero {self.run.config.parallel.zero} on {self.run.mesh.size} devices, turn {self._turns}"
            note(IDLE)
            kv_store.barrier(name, self.processes)


_sum = jax.jit(jnp.sum)


def processes_of(mesh: jax.sharding.Mesh) -> list[int]:
    """Those whose devices are in the mesh. The others cannot compute on it, nor hold its arrays."""
    return sorted({device.process_index for device in mesh.devices.flat})


def measure_together(timed: Sequence[Timed], warmup: int, repeats: int, note: Note = lambda doing: None) -> None:
    """Fill in `seconds` and `loss`: `warmup` + `repeats` rounds, in each of which every program makes a step.

    What else a shared machine does, and how it drifts, then hits all of them alike; and as every round goes the other
    way round, none always finds the caches as the same other has left them. Their states lie on the devices at the same
    time, and are gone afterwards. Each process gives those of `timed` that it has devices of, in the order that all of
    them have.
    """
    for one in timed:
        one.place(note)
    there, back = list(timed), list(reversed(timed))
    rounds = [[one.advance(note) for one in (there, back)[turn % 2]] for turn in range(warmup + repeats)]
    for place, one in enumerate(timed):
        one.seconds = [seconds[place if turn % 2 == 0 else -1 - place] for turn, seconds in enumerate(rounds)][warmup:]
        one.drop()
