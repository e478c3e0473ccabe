"""Who reads which sample, and a validation loss that no mesh changes."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path

import jax
import numpy as np

from jaxdist.config import Config, DataConfig, ModelConfig, TrainConfig
from jaxdist.data.batches import abstract_batch, global_rows
from jaxdist.data.tokens import TokenWriter
from jaxdist.lab.claim import Check, Outcome
from jaxdist.lab.claims import within
from jaxdist.lab.phases import cpu_mesh
from jaxdist.mesh import DATA
from jaxdist.planning.tables import table
from jaxdist.sharding import Layout
from jaxdist.training.run import Run

SAMPLES, BATCH = 96, 16
HOSTS = (1, 2, 4, 8)

MODEL = ModelConfig(layers=2, embed=16, heads=2, vocab=64, sequence=8)
TOKENS = 1050
MESHES = ("1x1x1", "4x1x1", "2x2x1")
"""The first is the one that the others are held against."""


def readers(hosts: int, axis: str, seed: int, epoch: int) -> list[np.ndarray]:
    """Rank -> the samples that it reads in an epoch, in order, where a host has one rank."""
    mesh = cpu_mesh(f"{axis}={hosts}")
    layout = Layout.on(mesh)
    rows = abstract_batch(BATCH, 1, 1, mesh, layout)["rows"]
    steps = range(epoch * SAMPLES // BATCH, (epoch + 1) * SAMPLES // BATCH)
    batches = [global_rows(seed, step, BATCH, SAMPLES).reshape(rows.shape) for step in steps]
    mine = rows.sharding.devices_indices_map(rows.shape)
    return [np.concatenate([batch[mine[device]].ravel() for batch in batches]) for device in mesh.devices.flat]


def unique(expected: str, tolerance: str, axis: str = DATA) -> Outcome:
    """Two epochs of a small data set, read by one host and by several, one of them again, and with another seed."""
    once = {hosts: _each_once(readers(hosts, axis, seed=0, epoch=0)) for hosts in HOSTS}
    first, second = (readers(4, axis, seed=0, epoch=epoch) for epoch in (0, 1))
    new_order = not np.array_equal(first, second) and _each_once(second)
    same, other = readers(4, axis, seed=0, epoch=0), readers(4, axis, seed=1, epoch=0)
    repeats = np.array_equal(first, same) and not np.array_equal(first, other)
    value = all(once.values()) and new_order and repeats
    rows = [
        (f"each of {SAMPLES} samples read once by {' '.join(map(str, HOSTS))} hosts", *map(_yes, once.values())),
        ("a new order in a new epoch", _yes(new_order)),
        ("the same order with the same seed only", _yes(repeats)),
    ]
    return Outcome(value, str(value).lower() == expected, tuple("  ".join(row) for row in rows))


def _each_once(read: list[np.ndarray]) -> bool:
    return np.array_equal(np.sort(np.concatenate(read)), np.arange(SAMPLES))


def _yes(true: bool) -> str:
    return "yes" if true else "no"


def validation(expected: str, tolerance: str, batches: int = 0) -> Outcome:
    """The largest relative difference of a mesh from one device, which goes over the whole held-out part.

    `batches` is how many the meshes look at; 0 all.
    """
    alone = losses(MESHES[0])[0]
    found = {mesh: losses(mesh)[batches] for mesh in MESHES[1:]}
    value = max(abs(loss - alone) / alone for loss in found.values())
    rows = [(mesh, f"{loss:.7f}", f"{abs(loss - alone) / alone:.1e}") for mesh, loss in found.items()]
    lines = table([("mesh", "loss", "from one device"), (MESHES[0], f"{alone:.7f}", ""), *rows])
    return Outcome(value, within(value, expected, tolerance), tuple(lines))


@cache
def losses(mesh: str) -> dict[int, float]:
    """Of all validation batches (0), the last of which is not full, and of the first alone (1).

    The parameters are those before the first step, the same bits on every mesh; the tokens are random.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tokens.bin"
        with TokenWriter(path, "uint16") as writer:
            writer.write(np.random.default_rng(0).integers(0, MODEL.vocab, TOKENS))
        config = Config(
            mesh=mesh,
            precision="float32",
            model=MODEL,
            data=DataConfig(path=path, validation_fraction=0.9),
            train=TrainConfig(global_batch_size=BATCH),
        )
        run = Run(config, devices=list(cpu_mesh(mesh).devices.flat))
        run.steps = 1
        with jax.set_mesh(run.mesh):
            params = run.init().params
            return {batches: run.validate(params, {}, batches)["loss"] for batches in (0, 1)}


CHECKS = {
    "sampler-unique": Check(unique, {"axis": "model"}),
    "val-reduce": Check(validation, {"batches": 1}),
}
