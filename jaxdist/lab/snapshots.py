"""End and resume a training: the documents' multi-GPU script, and a run of jaxdist, each beside one that goes through.

The script saves the weights and the number of the epoch that has ended, and begins again with that epoch. A run saves
the whole state of the optimizer and the number of batches, and goes on with the batch after them.
"""

from __future__ import annotations

import io
import tempfile
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass, field
from pathlib import Path

import jax
import numpy as np
import optax
from flax import nnx
from jaxtyping import Float

import jaxdist
from jaxdist.lab.phases import cpu_mesh
from jaxdist.training import history

ROWS, BATCH = 96, 16
STEPS = ROWS // BATCH
"""Steps of an epoch."""

RATE, MOMENTUM = 0.02, 0.9
WANTED = np.linspace(-1, 1, 20)
"""The weights that both trainings look for."""


class ProcessEnds(Exception):
    """The process has ended in the middle of its work."""


@dataclass
class Script:
    """The loop of the documents' script, on a linear layer of 20 numbers and SGD with momentum."""

    saves_next: bool = False
    """Whether it saves the number of the epoch that comes next, and not that of the one that has ended."""
    snapshot: dict[str, object] = field(default_factory=dict)
    """What lies on the disk; it outlives a process."""
    trained: list[int] = field(default_factory=list)
    """Every epoch that was trained, by all processes together."""

    def process(self, epochs: int, killed_after: int | None = None) -> Float[np.ndarray, " 20"]:
        """Start a process, which loads the snapshot and trains; it may end after the snapshot of an epoch."""
        weights = np.array(self.snapshot.get("MODEL_STATE", np.zeros(20)))
        momentum = np.zeros(20)
        for epoch in range(self.snapshot.get("EPOCHS_RUN", 0), epochs):
            random = np.random.default_rng(epoch)
            x = random.normal(size=(32, 20))
            momentum = MOMENTUM * momentum + x.T @ (x @ (weights - WANTED)) / 32
            weights = weights - RATE * momentum
            self.trained.append(epoch)
            self.snapshot = {"MODEL_STATE": weights, "EPOCHS_RUN": epoch + self.saves_next}
            if epoch == killed_after:
                raise ProcessEnds
        return weights

    def restarted(self, epochs: int, killed_after: int) -> Float[np.ndarray, " 20"]:
        """Train in two processes, of which the first is killed; returns the weights at the end."""
        try:
            self.process(epochs, killed_after)
        except ProcessEnds:
            return self.process(epochs)
        raise ValueError(f"the script trains {epochs} epochs and cannot be killed after epoch {killed_after}")


@dataclass(frozen=True)
class Resumed:
    """A run that an error ended, and that went on from its checkpoint, beside the same run without a stop."""

    epochs: float
    """Steps that count in the end, each at most once, in epochs."""
    losses_equal: bool
    """Whether the loss of every step is that of the run without a stop, to the bit."""
    weights_equal: bool
    """Whether the weights at the end are the same, to the bit."""

    @property
    def exact(self) -> bool:
        """Whether nothing tells that it was ended."""
        return self.losses_equal and self.weights_equal


def resumed_run(epochs: int, after: int) -> Resumed:
    """Train a linear layer with `jaxdist.fit`; once without a stop, once ended after the checkpoint of epoch `after`.

    An exception ends it some steps after the checkpoint, so that these are taken again.
    """
    cpu_mesh("1x1x1")
    momentum = optax.sgd(RATE, momentum=MOMENTUM)
    trainer = jaxdist.parallelize(_layer, _squared_error, momentum, mesh="1x1x1", scope="rows")
    x = np.random.default_rng(0).normal(size=(ROWS, 20)).astype(np.float32)
    rows = {"x": x, "t": x @ WANTED[:, None].astype(np.float32)}

    def killed(step: int, state: object, metrics: object) -> None:
        if step == after * STEPS + STEPS // 2:
            raise ProcessEnds

    def fit(folder: Path, *callbacks: Callable[..., None]) -> Float[np.ndarray, " n"]:
        how = {"batch_size": BATCH, "steps": epochs * STEPS, "log_every": 1, "checkpoint_every": after * STEPS}
        state = jaxdist.fit(trainer, rows, run_dir=folder, callbacks=callbacks, log_tensorboard=False, **how)
        return np.concatenate([np.ravel(w) for w in jax.device_get(jax.tree.leaves(state.params))])

    said = io.StringIO()
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(said), redirect_stderr(said):
        whole, stopped = Path(folder) / "whole", Path(folder) / "killed"
        wanted = fit(whole)
        with suppress(ProcessEnds):
            fit(stopped, killed)
        found = fit(stopped)
        losses = _losses(stopped)
        return Resumed(len(losses) / STEPS, losses == _losses(whole), np.array_equal(found, wanted))


def _layer(rngs: nnx.Rngs) -> nnx.Linear:
    return nnx.Linear(20, 1, rngs=rngs)


def _squared_error(model: nnx.Linear, batch: dict[str, jax.Array]) -> jax.Array:
    return ((model(batch["x"]) - batch["t"]) ** 2).mean()


def _losses(run: Path) -> list[tuple[int, float]]:
    """Return step and loss of each line of a run."""
    return [(line["step"], line["loss"]) for line in history.read(run / "metrics.jsonl") if "loss" in line]
