"""Compile a train step and time it on random batches; all measurements share this. Nothing is read or saved."""

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
from jaxdist.data.batches import Batch, token_batch
from jaxdist.data.images import Part
from jaxdist.data.images.batches import image_batch
from jaxdist.data.rows import CutRows
from jaxdist.data.tokens import Tokens, TokenWriter
from jaxdist.training.forward.step import TrainState
from jaxdist.training.run import Run

Note = Callable[[str], None]
"""Takes the phase that a process enters, for the watchdog: `Job.note`."""


def ignore(phase: str) -> None:
    """Take a note and do nothing, where no watchdog runs."""


def random_work(run: Run) -> Batch:
    """Return a global batch of random tokens or images, made by the data loader as a real one is.

    A smaller batch is the beginning of a larger one.
    """
    config = run.config
    rows = np.arange(config.train.global_batch_size)
    if config.model.images:
        return image_batch(_noise(config, rows.size), rows, run.task.batch_layout)
    sequence = config.model.sequence
    ids = np.random.default_rng(0).integers(0, config.model.vocab, rows.size * sequence + 1)
    # Random tokens have no documents; where the model keeps these apart, token 0 ends one.
    end = 0 if config.model.documents_apart else None
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tokens.bin"
        with TokenWriter(path, "uint32") as writer:
            writer.write(ids)
        tokens = replace(Tokens.open(path, "uint32"), end=end)
        batch = token_batch(CutRows(tokens, sequence), rows, run.task.batch_layout)
    return batch | {name: _zeros(a) for name, a in run.batch().items() if name not in batch}


def _zeros(like: jax.ShapeDtypeStruct) -> jax.Array:
    """Return zeros on the mesh, for what a batch has beside its tokens."""
    zeros = np.zeros(like.shape, like.dtype)
    return jax.make_array_from_callback(like.shape, like.sharding, lambda index: zeros[index])


def _noise(config: Config, rows: int) -> Part:
    """Return `rows` images of normal noise, with labels."""
    sizes = config.model
    rng = np.random.default_rng(0)
    labels = rng.integers(0, sizes.classes, rows, dtype=np.int32)
    images = rng.normal(size=(rows, sizes.image, sizes.image, sizes.channels)).astype(np.float32)
    # Mean 0 and deviation 1: the noise is normalised already.
    channels = np.ones(sizes.channels, np.float32)
    return Part(images, np.arange(rows), labels, 0 * channels, channels)


@dataclass
class Timed:
    """The compiled step of a run, and the seconds of the steps that were measured."""

    run: Run
    program: jax.stages.Compiled
    compile_seconds: float
    """Seconds to trace, lower and compile."""
    seconds: list[float] = field(default_factory=list)
    loss: float | None = None
    """Loss of the last step; None if it is not finite, which JSON cannot express."""
    _turns: int = 0
    _state: TrainState | None = None
    _batch: Batch | None = None

    @classmethod
    def compile(cls, run: Run) -> Timed:
        """Compile the step of `run`; nothing is placed on the devices yet."""
        # The steps shape only the learning-rate schedule: without data, the rows of an epoch are not known.
        run.steps = max(run.config.train.steps, 1)
        started = time.perf_counter()
        with jax.set_mesh(run.mesh):
            program = run.compile()
        return cls(run, program, time.perf_counter() - started)

    @property
    def processes(self) -> list[int]:
        """The processes that have devices of the mesh; only they compile and run the step."""
        return processes_of(self.run.mesh)

    @property
    def units(self) -> int:
        """Tokens, or images, of a step."""
        return self.run.task.units_per_step

    @property
    def quartiles(self) -> tuple[float, float, float]:
        """Lower quartile, median and upper quartile of a step's seconds."""
        low, median, high = np.percentile(self.seconds, [25, 50, 75])
        return float(low), float(median), float(high)

    def place(self, note: Note) -> None:
        """Initialise the state and a batch on the devices."""
        # gloo and NCCL time out while they wait for a process that still compiles, so wait for it here.
        self._wait_for_the_others(note)
        note(STARTING)
        with jax.set_mesh(self.run.mesh):
            self._state = self.run.engine.init()
            self._batch = random_work(self.run)
        jax.block_until_ready((self._state, self._batch))

    def drop(self) -> None:
        """Free the state and the batch."""
        self._state = None
        self._batch = None

    def advance(self, note: Note) -> float:
        """Run one step to its end, and return its seconds; the processes of the mesh start it together."""
        self._wait_for_the_others(note)
        note(STEPPING)
        with jax.set_mesh(self.run.mesh):
            if len(self.processes) > 1:
                # After a sum over the devices, processes continue closer together than after a barrier of messages.
                jax.block_until_ready(_sum(self._batch["rows"]))
            started = time.perf_counter()
            self._state, metrics = self.program(self._state, self._batch)
            jax.block_until_ready(self._state)
            seconds = time.perf_counter() - started
        self.loss = None
        if np.isfinite(metrics.loss):
            self.loss = float(metrics.loss)
        return seconds

    def _wait_for_the_others(self, note: Note) -> None:
        """Wait in a barrier, idle: a process with more measurements than another one arrives later."""
        if len(self.processes) > 1:
            self._turns += 1
            name = f"zero {self.run.config.parallel.zero} on {self.run.mesh.size} devices, turn {self._turns}"
            note(IDLE)
            kv_store.barrier(name, self.processes)


_sum = jax.jit(jnp.sum)


def processes_of(mesh: jax.sharding.Mesh) -> list[int]:
    """Return the processes that have devices of the mesh; only they can compute on it and hold its arrays."""
    return sorted({device.process_index for device in mesh.devices.flat})


def measure_together(timed: Sequence[Timed], warmup: int, repeats: int, note: Note = ignore) -> None:
    """Fill in `seconds` and `loss`: run `warmup` + `repeats` rounds, in each of which every program makes a step.

    The states of all programs lie on the devices at the same time, and are freed at the end. Each process passes the
    programs that it has devices of, in the order that all processes have.
    """
    for one in timed:
        one.place(note)
    # Rounds make other load and the drift of a shared machine hit all programs alike. Every other round runs backwards,
    # so that no program always finds the caches as the same other program left them.
    forwards = list(timed)
    backwards = list(reversed(timed))
    rounds = []
    for turn in range(warmup + repeats):
        order = forwards if turn % 2 == 0 else backwards
        rounds.append([one.advance(note) for one in order])
    for place, one in enumerate(timed):
        own = []
        for turn, seconds in enumerate(rounds):
            own.append(seconds[place if turn % 2 == 0 else -1 - place])
        one.seconds = own[warmup:]
        one.drop()
