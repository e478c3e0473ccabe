"""The documents' training scripts: steps and rows, a loss that trains nothing, snapshots, and float16."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jaxdist
from jaxdist.cluster.process_env import find
from jaxdist.config import ClusterConfig, Config, DataConfig, ModelConfig, TrainConfig
from jaxdist.lab.checks.data import data_set
from jaxdist.lab.claim import Check, Claim, Outcome
from jaxdist.lab.phases import cpu_mesh
from jaxdist.lab.snapshots import Script, resumed_run
from jaxdist.models.loss import cross_entropy
from jaxdist.output.tables import table
from jaxdist.output.units import counted
from jaxdist.sharding import Layout
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


def epochs_of_snapshots(claim: Claim, saves_next: bool = False, total: int = 10, killed: int = 5) -> Outcome:
    """Count the epochs that the documents' script trains if it is killed after a snapshot, and those of a run here.

    The script counts on from the number in its snapshot: of the epoch that has ended, or with `saves_next` of the one
    after it. A run of jaxdist that is resumed has to end with the weights of one that was never stopped, to the bit.
    """
    script = Script(saves_next)
    weights = script.restarted(total, killed)
    alone = Script().process(total)
    apart = np.linalg.norm(weights - alone) / np.linalg.norm(alone)
    ours = resumed_run(total, killed)
    lines = (
        f"the script trains the epochs {' '.join(map(str, script.trained))}",
        f"its weights end {apart:.1%} from those of a training without a stop",
        f"jaxdist, ended by an error and resumed, trains {ours.epochs:g} epochs; "
        f"losses and weights are those without a stop, to the bit: {'yes' if ours.exact else 'NO'}",
    )
    exact = ours.exact and ours.epochs == total
    return Outcome(len(script.trained), claim.met(len(script.trained)) and exact, lines)


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
    """Measure steps of a trainer in float16 whose gradient is 2^-30: with a scale of 2^`power`, without, and too large.

    The rate is so large that a gradient that is kept moves the weight by exactly 1. A step that overflows has to leave
    the weight as it was.
    """
    trainer = jaxdist.parallelize(_one_weight, _tiny_loss, optax.sgd(1 / TINY), mesh="1x1x1", precision="float16")
    moved = {}
    scales = {}
    kept, lost, skipped = "2^-30, scaled", "2^-30, not scaled", "infinite"
    for name, scale, x in ((kept, 2.0**power, 1.0), (lost, 1.0, 1.0), (skipped, 2.0**power, np.inf)):
        state = trainer.init(0)
        own = state.loss_scale.scale
        scaled = state.loss_scale._replace(scale=jax.device_put(np.float32(scale), own.sharding))
        before = float(state.params["kernel"][0, 0])
        state, _ = trainer.step(state._replace(loss_scale=scaled), {"x": np.full((2, 1), x, np.float32)})
        moved[name] = before - float(state.params["kernel"][0, 0])
        scales[name] = scale, float(state.loss_scale.scale)
    found = {
        "kept": moved[kept] == 1,
        "lost": moved[lost] == 0,
        "halved": moved[skipped] == 0 and scales[skipped] == (2.0**power, 2.0 ** (power - 1)),
    }
    value = " / ".join(word for word, true in found.items() if true)
    rows = [("gradient in float16", "the weight moves by", "scale of the loss", "scale after the step")]
    for told, (before, after) in scales.items():
        rows.append((told, f"{moved[told]:g}", f"{before:g}", f"{after:g}"))
    return Outcome(value, claim.met(value), tuple(table(rows)))


TINY = 2.0**-30
"""A gradient that float16 does not hold: its smallest number is 2^-24."""


def _one_weight(rngs: nnx.Rngs) -> nnx.Linear:
    return nnx.Linear(1, 1, use_bias=False, kernel_init=nnx.initializers.zeros, rngs=rngs)


def _tiny_loss(model: nnx.Linear, batch: dict[str, jax.Array]) -> jax.Array:
    """Return a loss whose gradient is `TINY` x: on its way back it passes through float16."""
    return (model(batch["x"]).astype(jnp.float32) * TINY).mean()


CHECKS = {
    "ddp-steps": Check(steps, {"per_process": False}),
    "global-batch": Check(rows_of_each, {"batch": 64}),
    "toy-cross-entropy": Check(toy_loss, {"classes": 2}),
    "snapshot-epoch": Check(epochs_of_snapshots, {"saves_next": True}),
    "snapshot-writers": Check(writers, {"nodes": 1}),
    "torchrun-env": Check(variables, {}),
    "fp16-loss-scale": Check(scaled, {"power": 2}),
}
