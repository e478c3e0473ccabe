"""The documents' training scripts: steps and rows, a loss that trains nothing, snapshots, and float16."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jaxdist.cluster.process_env import find
from jaxdist.config import ClusterConfig, Config, DataConfig, ModelConfig, TrainConfig
from jaxdist.lab.checks.data import data_set
from jaxdist.lab.claim import Check, Claim, Outcome
from jaxdist.lab.phases import cpu_mesh
from jaxdist.models.loss import cross_entropy
from jaxdist.output.tables import table
from jaxdist.output.units import counted
from jaxdist.parallel.finite import finite
from jaxdist.sharding import Layout
from jaxdist.training.forward import loss_scale
from jaxdist.training.run import Run

SAMPLES = 2048
"""Samples of the documents' data set."""

EACH = 32
"""Rows of a process in a step, in the documents' script."""

MODEL = ModelConfig(layers=2, embed=16, heads=2, vocab=64, sequence=8)


def run(devices: int, batch: int, data: DataConfig, epochs: float = 1) -> Run:
    """Return a run of a small model on so many data ranks, for whole epochs."""
    train = TrainConfig(global_batch_size=batch, epochs=epochs)
    config = Config(mesh=f"{devices}x1x1", precision="float32", model=MODEL, data=data, train=train)
    return Run(config, devices=list(cpu_mesh(config.mesh).devices.flat))


def steps(claim: Claim, per_process: bool = True) -> Outcome:
    """Count the steps of an epoch on 1, 2, 4 and 8 devices, with as many rows on each, or with as many in all."""
    counts = (1, 2, 4, 8)
    with data_set(SAMPLES) as data:
        found = [run(n, EACH * n if per_process else EACH, data).steps for n in counts]
    value = ", ".join(map(str, found))
    rows = [("devices", "rows in a step", "steps")]
    for n, count in zip(counts, found, strict=True):
        rows.append((str(n), str(EACH * n if per_process else EACH), str(count)))
    return Outcome(value, claim.met(value), tuple(table(rows)))


def rows_of_each(claim: Claim, batch: int = 32) -> Outcome:
    """Read the rows of a global batch that lie on each device."""
    found = {}
    with data_set(SAMPLES) as data:
        for n in (1, 2, 4):
            tokens = run(n, batch, data).batch()["tokens"]
            shape = tokens.sharding.shard_shape(tokens.shape)
            found[n] = int(np.prod(shape)) // MODEL.sequence
    value = ", ".join(map(str, found.values()))
    lines = tuple(f"{n} devices: {rows} rows on each of a batch of {batch}" for n, rows in found.items())
    return Outcome(value, claim.met(value), lines)


def toy_loss(claim: Claim, classes: int = 1) -> Outcome:
    """Measure the gradient of the cross-entropy over so many classes, of a linear layer of 20 numbers."""
    random = np.random.default_rng(0)
    x = random.normal(size=(1, 1, EACH, 20)).astype(np.float32)
    t = random.normal(size=(EACH, 1)).astype(np.float32)
    w = random.normal(size=(classes, 20)).astype(np.float32)
    mesh = cpu_mesh("1x1x1")
    layout = Layout.on(mesh)
    labels = np.zeros((1, 1, EACH), np.int32)
    with jax.set_mesh(mesh):
        gradient = jax.jit(jax.grad(lambda w: cross_entropy(layout, x, w, labels)))(w)
    squared = jax.grad(lambda w: jnp.mean((x[0, 0] @ w.T - t) ** 2))(w)
    value = float(jnp.linalg.norm(gradient))
    lines = (
        f"cross-entropy over {counted(classes, 'class')}: norm of the gradient {value:g}",
        f"mean squared error of the same layer and rows: {float(jnp.linalg.norm(squared)):.3f}",
    )
    return Outcome(value, claim.met(value), lines)


def epochs_of_snapshots(claim: Claim, saves: str = "this epoch", total: int = 10, killed: int = 5) -> Outcome:
    """Count the epochs that the documents' script trains if it is killed after a snapshot, and those of a run here.

    The script counts from the epoch in the snapshot; `saves`: which number it writes. A run of jaxdist goes on with the
    batch after the last one: a second run, which knows only how many batches there were, reads the other rows.
    """
    trained = list(range(killed + 1))
    first = killed if saves == "this epoch" else killed + 1
    trained += range(first, total)
    with data_set(96) as data:
        ours = run(1, 16, data, epochs=total).task
        at = killed * 6
        resumed = [ours.rows_after(step) for step in range(at)]
        with data_set(96) as again:
            after = run(1, 16, again, epochs=total).task
            resumed += [after.rows_after(step) for step in range(at, total * 6)]
    read = np.bincount(np.concatenate(resumed), minlength=96)
    lines = (
        f"the script trains the epochs {' '.join(map(str, trained))}",
        f"jaxdist, begun again after {at} of {total * 6} steps: each row is read {read.min()} to {read.max()} x",
    )
    return Outcome(len(trained), claim.met(len(trained)) and set(read) == {total}, lines)


def writers(claim: Claim, nodes: int = 2, each: int = 4) -> Outcome:
    """Count the processes that would write a snapshot by LOCAL_RANK, and those that write here."""
    environments = [environment(nodes, each, rank) for rank in range(nodes * each)]
    by_local_rank = sum(one["LOCAL_RANK"] == "0" for one in environments)
    leaders = sum(find(ClusterConfig(), one).leader for one in environments)
    lines = (f"LOCAL_RANK is 0 in {by_local_rank} of {nodes * each} processes; jaxdist has {leaders} leader",)
    return Outcome(by_local_rank, claim.met(by_local_rank) and leaders == 1, lines)


def environment(nodes: int, each: int, rank: int) -> dict[str, str]:
    """Return the variables that torchrun sets for a process."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank % each),
        "LOCAL_WORLD_SIZE": str(each),
        "WORLD_SIZE": str(nodes * each),
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "29500",
    }


def variables(claim: Claim, nodes: int = 2, each: int = 4) -> Outcome:
    """Change each variable of a torchrun-style environment by itself, and see what of a process follows it."""
    rank = nodes * each - 2
    given = environment(nodes, each, rank)
    before = find(ClusterConfig(), given)
    changes = {
        "RANK": ("1", lambda env: env.process == 1),
        "LOCAL_RANK": ("1", lambda env: env.gpus == (1,)),
        "WORLD_SIZE": ("16", lambda env: env.processes == 16),
        "MASTER_ADDR": ("10.0.0.2", lambda env: env.coordinator.startswith("10.0.0.2:")),
        "MASTER_PORT": ("29501", lambda env: env.coordinator.endswith(":29501")),
    }
    followed = []
    rows = [("variable", "given", "this process")]
    for name, (text, follows) in changes.items():
        after = find(ClusterConfig(), {**given, name: text})
        if follows(after) and not follows(before):
            followed.append(name)
        rows.append((name, text, f"{after.process} of {after.processes}, GPU {after.gpus}, {after.coordinator}"))
    value = "all five" if len(followed) == len(changes) else ", ".join(followed)
    return Outcome(value, claim.met(value), tuple(table(rows)))


def scaled(claim: Claim, power: int = 16) -> Outcome:
    """Measure a gradient of 2^-30 in float16 with and without a scale of 2^`power`, and the scale after an overflow."""
    tiny = 2.0**-30

    def gradient(scale: float) -> jax.Array:
        # The loss is tiny times w: its gradient passes through float16 on its way back.
        def loss(w):
            return (w.astype(jnp.float16) * jnp.float16(1)).astype(jnp.float32) * (tiny * scale)

        return jax.grad(lambda w: loss(w))(jnp.float16(1)).astype(jnp.float32) / scale

    kept = float(gradient(2.0**power)) == tiny
    lost = float(gradient(1.0)) == 0
    scale = loss_scale.first()
    with jax.set_mesh(cpu_mesh("1x1x1")):
        good = finite([jnp.asarray([1.0, jnp.inf], jnp.float16)])[0]
    after = scale.after(good)
    halved = float(after.scale) == float(scale.scale) / 2
    value = " / ".join(word for word, true in (("kept", kept), ("lost", lost), ("halved", halved)) if true)
    lines = (
        f"2^-30 through float16: {float(gradient(1.0)):g}, with a scale of 2^{power}: {float(gradient(2.0**power)):g}",
        f"a gradient with an infinity: finite {bool(good)}, scale {float(scale.scale):g} -> {float(after.scale):g}",
    )
    return Outcome(value, claim.met(value), lines)


CHECKS = {
    "ddp-steps": Check(steps, {"per_process": False}),
    "global-batch": Check(rows_of_each, {"batch": 64}),
    "toy-cross-entropy": Check(toy_loss, {"classes": 2}),
    "snapshot-epoch": Check(epochs_of_snapshots, {"saves": "the next epoch"}),
    "snapshot-writers": Check(writers, {"nodes": 1}),
    "torchrun-env": Check(variables, {}),
    "fp16-loss-scale": Check(scaled, {"power": 2}),
}
