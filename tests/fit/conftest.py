"""A module so small that its program compiles in a second, batches in all forms, and runs that are cut off."""

import json
import os
import signal
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import jaxdist
from jaxdist.cluster import script
from jaxdist.process.stop_signals import SIGNALS

ROWS, SIZE, STEPS = 40, 8, 12

X = np.random.default_rng(0).uniform(size=(ROWS, 4)).astype(np.float32)
DATA = {"x": X, "y": np.sort(X)}


class Net(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(4, 8, rngs=rngs)
        self.down = nnx.Linear(8, 4, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.tanh(self.up(x)))


def loss_fn(module, batch):
    return ((module(batch["x"]) - batch["y"]) ** 2).mean()


def trainer(mesh: str = "4x1x1", zero: int = 1, optimizer=None, **options) -> jaxdist.Parallel:
    optimizer = optimizer or optax.adam(1e-2)
    size = int(np.prod([int(part) for part in mesh.split("x")]))
    return jaxdist.parallelize(Net, loss_fn, optimizer, mesh=mesh, zero=zero, devices=jax.devices()[:size], **options)


def batch_of(step: int) -> dict[str, np.ndarray]:
    """A batch that is a function of the step."""
    rows = np.random.default_rng(step).integers(0, ROWS, SIZE)
    return {name: a[rows] for name, a in DATA.items()}


class Killed(Exception):
    """The process is gone: nothing is saved."""


def kill_at(step: int):
    """A callback."""

    def kill(now, state, metrics):
        if now == step:
            raise Killed

    return kill


def stop_at(step: int):
    """A callback that sends this process a signal."""

    def stop(now, state, metrics):
        if now == step:
            os.kill(os.getpid(), signal.SIGTERM)

    return stop


def fit(folder: Path, batches, of: jaxdist.Parallel, **options):
    """`jaxdist.fit` as most tests call it."""
    options = {"steps": STEPS, "log_every": 1, "checkpoint_every": 3, "log_tensorboard": False} | options
    return jaxdist.fit(of, batches, run_dir=folder, **options)


def lines(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def losses(folder: Path) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in lines(folder) if "loss" in line}


def same(a, b) -> None:
    """To the bit."""
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(a), jax.device_get(b))


@pytest.fixture(scope="session")
def four() -> jaxdist.Parallel:
    """On four devices."""
    return trainer()


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """A process that has not joined others yet, and has the handlers of its signals back at the end."""
    monkeypatch.setattr(script, "_joined", [])
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
