"""Which rank reads which sample, and a validation loss that no mesh changes, both from batches as a run makes them."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jax
import numpy as np
from jaxtyping import Float, Int

from jaxdist.config import Config, DataConfig, ModelConfig, TrainConfig
from jaxdist.data.batches import Batch
from jaxdist.data.order import global_rows
from jaxdist.data.tokens import TokenWriter
from jaxdist.lab.claim import Check, Claim, Outcome
from jaxdist.lab.phases import cpu_mesh
from jaxdist.models import Params
from jaxdist.output.tables import table
from jaxdist.training.run import Run

SAMPLES = 96
"""Rows to train on."""

HELD_OUT = 38
"""Rows to validate on; the last batch of them is not full."""

BATCH = 16
"""Rows of a global batch."""

HOSTS = (1, 2, 4, 8)
MODEL = ModelConfig(layers=2, embed=16, heads=2, vocab=64, sequence=8)
MESHES = ("1x1x1", "4x1x1", "2x2x1")


@contextmanager
def data_set(samples: int = SAMPLES) -> Iterator[DataConfig]:
    """Make token files of so many rows to train on and of `HELD_OUT` rows, of random tokens and no two alike."""
    random = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        paths = []
        for name, rows in (("train.bin", samples), ("held_out.bin", HELD_OUT)):
            path = Path(folder) / name
            with TokenWriter(path, "uint16") as writer:
                writer.write(random.integers(0, MODEL.vocab, rows * MODEL.sequence + 1))
            paths.append(path)
        yield DataConfig(path=paths[0], validation_path=paths[1])


def windows(path: Path | str) -> tuple[Int[np.ndarray, "rows S"], Int[np.ndarray, "rows S"]]:
    """Return tokens and labels of every row of a file, read and cut by numpy alone.

    Labels are the tokens one place later. What does not fill a last row is left out.
    """
    ids = np.fromfile(path, "<u2").astype(np.int32)
    rows = (ids.size - 1) // MODEL.sequence
    used = rows * MODEL.sequence
    return ids[:used].reshape(rows, MODEL.sequence), ids[1 : used + 1].reshape(rows, MODEL.sequence)


def started(mesh: str, data: DataConfig, seed: int = 0) -> Run:
    """Return a run of the small model over CPU devices."""
    train = TrainConfig(global_batch_size=BATCH, steps=SAMPLES // BATCH, seed=seed)
    config = Config(mesh=mesh, precision="float32", model=MODEL, data=data, train=train)
    return Run(config, devices=list(cpu_mesh(mesh).devices.flat))


def readers(hosts: int, seed: int, epoch: int, data: DataConfig) -> list[Int[np.ndarray, " n"]]:
    """Return for each data rank the samples of an epoch that lie on it, in order; each host has one rank.

    A sample is recognised by its tokens and labels. A row that is no sample of the file counts as -1.
    """
    # A host is a data rank here: each reads the rows of its rank.
    run = started(f"{hosts}x1x1", data, seed)
    # Tokens and labels together: a row whose labels are shifted wrongly is no sample of the file.
    known = {one.tobytes(): sample for sample, one in enumerate(np.concatenate(windows(data.path), axis=1))}
    steps = range(epoch * SAMPLES // BATCH, (epoch + 1) * SAMPLES // BATCH)
    batches = [run.task.batch(global_rows(seed, step, BATCH, run.task.rows), step) for step in steps]
    read = []
    for device in run.mesh.devices.flat:
        rows = np.concatenate([rows_on(device, batch) for batch in batches])
        read.append(np.array([known.get(row.tobytes(), -1) for row in rows]))
    return read


def rows_on(device: jax.Device, batch: Batch) -> Int[np.ndarray, "rows 2*S"]:
    """Return the rows of a batch that lie on a device: the tokens of each, then its labels."""
    parts = []
    for name in ("tokens", "labels"):
        (here,) = (shard.data for shard in batch[name].addressable_shards if shard.device == device)
        parts.append(np.asarray(here).reshape(-1, MODEL.sequence))
    return np.concatenate(parts, axis=1)


def unique(claim: Claim) -> Outcome:
    """Check that an epoch reads each sample once, on any number of hosts, in an order that epoch and seed determine."""
    with data_set() as data:
        first = {hosts: readers(hosts, seed=0, epoch=0, data=data) for hosts in HOSTS}
        again = readers(4, seed=0, epoch=0, data=data)
        second = readers(4, seed=0, epoch=1, data=data)
        other = readers(4, seed=1, epoch=0, data=data)
    once = [_each_once(first[hosts]) for hosts in HOSTS]
    new_order = not np.array_equal(first[4], second) and _each_once(second)
    repeats = np.array_equal(first[4], again) and not np.array_equal(first[4], other)
    value = all(once) and new_order and repeats
    hosts = " ".join(map(str, HOSTS))
    lines = (
        f"each of {SAMPLES} samples read once by {hosts} hosts  " + "  ".join(map(_yes, once)),
        f"a new order in a new epoch  {_yes(new_order)}",
        f"the same order with the same seed only  {_yes(repeats)}",
    )
    return Outcome(value, claim.met(value), lines)


def _each_once(read: list[Int[np.ndarray, " n"]]) -> bool:
    return np.array_equal(np.sort(np.concatenate(read)), np.arange(SAMPLES))


def _yes(true: bool) -> str:
    return "yes" if true else "no"


def validation(claim: Claim, meshes: tuple[str, ...] = MESHES) -> Outcome:
    """Measure the largest relative difference of a mesh's validation loss from a plain sum over all held-out rows.

    The parameters are those before the first step. numpy takes the sum, in float64, over rows that numpy cut out of the
    file; only the logits come from the model, on one device.
    """
    with data_set() as data:
        # All meshes get the same parameters, drawn on one device.
        alone = started("1x1x1", data)
        with jax.set_mesh(alone.mesh):
            params = jax.device_get(jax.jit(alone.forward.init)(jax.random.key(0))[0])
        wanted = plain_loss(alone, params, data.validation_path)
        found = {mesh: validated(started(mesh, data), params) for mesh in meshes}
    differences = {mesh: abs(loss - wanted) / wanted for mesh, loss in found.items()}
    value = max(differences.values())
    rows = [("mesh", "loss", "from the plain sum"), (f"plain sum over {HELD_OUT} rows", f"{wanted:.7f}", "")]
    for mesh, loss in found.items():
        rows.append((mesh, f"{loss:.7f}", f"{differences[mesh]:.1e}"))
    return Outcome(value, claim.met(value), tuple(table(rows)))


def plain_loss(run: Run, params: Params, path: Path | str) -> float:
    """Return the mean cross-entropy in nats of every token of a file but its first, cut into the rows of the model."""
    tokens, labels = windows(path)
    with jax.set_mesh(run.mesh):
        logits = np.asarray(jax.jit(run.forward.logits)(run.forward.weights(params), tokens), np.float64)
    # The loss of a token is log sum exp of its logits minus the logit of its label.
    chosen = np.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    return float(np.mean(log_sum_exp(logits) - chosen))


def log_sum_exp(logits: Float[np.ndarray, "... V"]) -> Float[np.ndarray, "..."]:
    """Return the logarithm of the sum of exponentials over the vocabulary, without overflow."""
    largest = logits.max(axis=-1)
    return largest + np.log(np.exp(logits - largest[..., None]).sum(axis=-1))


def validated(run: Run, params: Params) -> float:
    """Return the validation loss that a run finds for these parameters, over all of its held-out rows."""
    with jax.set_mesh(run.mesh):
        # As the run places its parameters between steps.
        where = jax.tree.map(lambda place: jax.NamedSharding(run.mesh, place.held), run.forward.places)
        return run.validate(jax.device_put(params, where), {}, batches=0)["loss"]


CHECKS = {
    "sampler-unique": Check(unique),
    "val-reduce": Check(validation),
}
