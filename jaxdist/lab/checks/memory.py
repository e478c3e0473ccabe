"""Model states by ZeRO stage, and the devices that hold the large models, from abstract arrays without any device."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxdist import models
from jaxdist.config import Config, ModelConfig, OptimizerConfig, ParallelConfig, TrainConfig
from jaxdist.lab import pictures
from jaxdist.lab.claim import Check, Claim, Outcome
from jaxdist.lab.phases import cpu_mesh
from jaxdist.mesh.split import compute_width
from jaxdist.output.tables import table
from jaxdist.training.run import Run

GB = 10**9
LLAMA_7B = ModelConfig(family="llama", layers=36, embed=4096, heads=32, mlp=11008, vocab=51200, sequence=1024)
"""About 7.5 billion parameters, all of which 1024 devices can split."""

GPT2 = ModelConfig(layers=48, embed=1600, heads=25, vocab=50257, sequence=1024)
"""GPT-2 XL (Radford et al. 2019, table 2)."""

GPT3 = ModelConfig(layers=96, embed=12288, heads=96, vocab=50257, sequence=2048)
"""GPT-3 175B (Brown et al. 2020, table 2.1)."""

# PaLM is given by its number of parameters: its layers, of two parts side by side, do not exist here.
PALM = 540_000_000_000
"""Parameters by PaLM's name."""

PALM_EXACT = 540_350_000_000
"""Parameters as counted by Chowdhery et al. 2022, table 1."""


@dataclass(frozen=True)
class States:
    """Bytes of the model's states that one device holds."""

    parameters: int
    """Elements of the whole model."""
    weights: int
    gradients: int
    """As the run shards its gradient accumulators, but at the 2 bytes that the paper counts."""
    optimizer: int
    """Masters and moments, in float32."""
    within_step: int
    """The planner's prediction of gradients while a step runs: reduced ones in float32, and one layer's whole."""

    @property
    def total(self) -> int:
        """Weights, gradients, masters and moments."""
        return self.weights + self.gradients + self.optimizer


@cache
def states(zero: int, devices: int) -> States:
    """Return the abstract states of data parallelism over `devices` at this ZeRO stage, with AdamW.

    They are measured on the shards of the state that the run begins with, and of its gradient accumulators.
    """
    config = Config(
        mesh=f"{devices}x1x1",
        precision="mixed",
        model=LLAMA_7B,
        parallel=ParallelConfig(zero=zero),
        optimizer=OptimizerConfig(warmup=0),
        train=TrainConfig(global_batch_size=devices),
    )
    run = Run(config, dry=True)
    # The steps shape only the learning-rate schedule, but the optimizer cannot be made without them.
    run.steps = 1
    with jax.sharding.use_abstract_mesh(run.mesh):
        state = run.engine.abstract()
        gradients = jax.eval_shape(run.forward.accumulators, state.weights)
    return States(
        parameters=models.parameters(run.model),
        weights=on_one_device(state.weights),
        gradients=on_one_device(gradients, width=compute_width(config)),
        optimizer=on_one_device(state.params) + on_one_device(state.optimizer),
        within_step=run.predicted_memory.gradients,
    )


def on_one_device(tree: Any, width: int | None = None) -> int:
    """Return the bytes of the arrays of `tree` that lie on one device, without scalars.

    `width` is the bytes of an element, by default of its dtype.
    """
    count = 0
    for array in jax.tree.leaves(tree):
        # Scalars, such as the step, are no model states in the paper's sense.
        if array.ndim:
            count += math.prod(array.sharding.shard_shape(array.shape)) * (width or array.dtype.itemsize)
    return count


def factor(claim: Claim, zero: int, devices: int = 1024) -> Outcome:
    """Measure how many times less a device holds than without partitioning."""
    whole = states(0, 1).total
    rows = [("devices", "states", "factor")]
    for n in [n for n in (4, 64, 256) if n < devices] + [devices]:
        total = states(zero, n).total
        rows.append((str(n), f"{total / GB:.2f} GB", f"{whole / total:.3f}"))
    value = whole / states(zero, devices).total
    return Outcome(value, claim.met(value), tuple(table(rows)))


def linear(claim: Claim, zero: int = 3) -> Outcome:
    """Check whether the factor is exactly the number of devices, at every power of two up to 1024."""
    whole = states(zero, 1).total
    counts = [2**n for n in range(11)]
    # Fractions compare exactly.
    factors = {n: Fraction(whole, states(zero, n).total) for n in counts}
    value = f"{float(factors[counts[-1]]):.4g} at N=1024"
    if all(found == n for n, found in factors.items()):
        value = "N"
    lines = table([("N", "factor"), *((str(n), f"{float(found):g}") for n, found in factors.items())])
    return Outcome(value, claim.met(value), tuple(lines))


def gigabytes(claim: Claim, zero: int, devices: int = 64) -> Outcome:
    """Measure the GB that a device holds of the states of a model of 7.5 billion parameters."""
    held = states(zero, devices)
    value = held.total / GB
    lines = [
        f"{held.parameters:,} parameters, {devices} devices, ZeRO {zero}; one device holds",
        *table([(name, f"{count:8.3f} GB") for name, count in _in_gigabytes(held).items()]),
        *_gradients(held, zero),
    ]
    return Outcome(value, claim.met(value), tuple(lines), partial(_bars, devices=devices))


def _in_gigabytes(held: States) -> dict[str, float]:
    """Return the parts of the states in GB."""
    parts = {"weights": held.weights, "gradients": held.gradients, "masters and moments": held.optimizer}
    return {name: count / GB for name, count in parts.items()}


def _gradients(held: States, zero: int) -> list[str]:
    """Return how gradients differ from the paper."""
    predicted = f"{held.within_step / GB:.3f} GB are predicted"
    text = f"The paper counts gradients of 2 bytes. Here they exist only while a step runs: {predicted}"
    if zero < 2:
        return [f"{text}."]
    return [
        f"{text},",
        "one layer and the table whole at a time, and each shard, once it is reduced, in float32: 4 bytes.",
    ]


def _bars(path: Path, devices: int) -> None:
    """Draw the states of every ZeRO stage."""
    columns = {f"ZeRO {zero}": _in_gigabytes(states(zero, devices)) for zero in range(4)}
    title = f"model states of {states(0, 1).parameters / 1e9:.2f} billion parameters on {devices} devices"
    pictures.bars(columns, "GB per device", title, path)


def weights(claim: Claim, of: ModelConfig | int, dtype: str = "bfloat16") -> Outcome:
    """Measure the GB of the parameters of a model, which is given by its configuration or by a number of them."""
    count = of if isinstance(of, int) else models.parameters(models.build(of))
    width = jnp.dtype(dtype).itemsize
    value = count * width / GB
    return Outcome(value, claim.met(value), (f"{count:,} parameters of {width} bytes",))


def devices(claim: Claim, of: ModelConfig | int, dtype: str = "bfloat16", room: int = 8, exactly: int = 0) -> Outcome:
    """Measure how many devices of `room` GB hold the parameters of a model.

    The model is given by its configuration or by a number of parameters; `exactly` is the number that a rounded one
    stands for.
    """
    width = jnp.dtype(dtype).itemsize

    def needed(count: int) -> int:
        return math.ceil(count * width / (room * GB))

    if isinstance(of, int):
        count = of
    else:
        count = models.parameters(models.build(of))
    lines = [f"{count:,} parameters of {width} bytes are {count * width / GB:.2f} GB; a device has {room} GB"]
    if exactly:
        lines.append(f"of {exactly:,}, which the number stands for, it takes {needed(exactly)}")
    return Outcome(needed(count), claim.met(needed(count)), tuple(lines))


def optimizer_share(claim: Claim, optimizer: str = "adamw") -> Outcome:
    """Measure the part of the bytes of the states that are the optimizer's: masters and moments."""
    each = bytes_of_each("mixed", optimizer)
    value = float((each["master weights"] + each["moments"]) / sum(each.values()))
    lines = table([(name, f"{bytes} bytes") for name, bytes in each.items()])
    return Outcome(value, claim.met(value), (f"per parameter, {optimizer} in mixed precision on one device:", *lines))


def kept_values(claim: Claim, optimizer: str = "adamw") -> Outcome:
    """Count the values that the update rule keeps for each parameter beside the parameter itself."""
    value = float(bytes_of_each("mixed", optimizer)["moments"] / 4)
    lines = (f"{optimizer} keeps {value:g} values for each parameter; in mixed precision the master is a further one",)
    return Outcome(value, claim.met(value), lines)


def of_mesh(claim: Claim, model: int = 8, pipeline: int = 64, bytes: int = 16) -> Outcome:
    """Divide the states of GPT-3, at so many bytes a parameter, by the devices of a mesh: arithmetic."""
    count = models.parameters(models.build(GPT3))
    value = count * bytes / (model * pipeline) / GB
    layers = -(-GPT3.layers // pipeline)
    block = (count - (GPT3.vocab + GPT3.sequence) * GPT3.embed) / GPT3.layers
    lines = (
        f"{count:,} parameters x {bytes} bytes / {model * pipeline} devices",
        f"as an even cut would have it: {GPT3.layers} layers on {pipeline} stages leave {layers} on some, which are "
        f"{layers * block * bytes / model / GB:.2f} GB",
    )
    return Outcome(value, claim.met(value), lines)


def per_parameter(claim: Claim, precision: str = "mixed") -> Outcome:
    """Measure the bytes per parameter of the train state, and of the gradients that the backward pass makes."""
    each = bytes_of_each(precision)
    value = f"{each['weights']} + {each['gradients']} + {each['master weights'] + each['moments']}"
    lines = table([(name, f"{bytes} bytes") for name, bytes in each.items()])
    return Outcome(value, claim.met(value), (f"per parameter, {precision}:", *lines))


def bytes_of_each(precision: str, optimizer: str = "adamw") -> dict[str, Fraction]:
    """Return the bytes per parameter of each part of the states of a small model on one device."""
    sizes = ModelConfig(layers=1, embed=16, heads=2, vocab=32, sequence=8)
    config = Config(precision=precision, model=sizes, optimizer=OptimizerConfig(name=optimizer, warmup=0))
    run = Run(config, devices=list(cpu_mesh("1x1x1").devices.flat))
    run.steps = 1

    def loss(weights, batch):
        return run.forward.loss(weights, None, {}, batch, None)[0]

    with jax.set_mesh(run.mesh):
        state = run.engine.abstract()
        batch = run.batch()
        # In float32 there is no copy of the weights besides the masters.
        used = state.weights or jax.eval_shape(run.forward.weights, state.params)
        gradients = jax.eval_shape(jax.grad(loss), used, batch)
    parts = {
        "weights": state.weights or {},
        "gradients": gradients,
        "master weights": state.params,
        "moments": [leaf for leaf in jax.tree.leaves(state.optimizer) if leaf.ndim],
    }
    elements = models.parameters(run.model)
    each = {}
    for name, tree in parts.items():
        held = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
        each[name] = Fraction(held, elements)
    return each


CHECKS = {
    "zero-states-4x": Check(partial(factor, zero=1), {"devices": 16}),
    "zero-states-8x": Check(partial(factor, zero=2), {"zero": 1}),
    "zero-states-nd": Check(linear, {"zero": 2}),
    "zero-7p5b-0": Check(partial(gigabytes, zero=0), {"zero": 1}),
    "zero-7p5b-1": Check(partial(gigabytes, zero=1), {"devices": 32}),
    "zero-7p5b-2": Check(partial(gigabytes, zero=2), {"devices": 32}),
    "zero-7p5b-3": Check(partial(gigabytes, zero=3), {"devices": 32}),
    "gpt3-fp16": Check(partial(weights, of=GPT3), {"dtype": "float32"}),
    "gpt2-fp16": Check(partial(weights, of=GPT2), {"dtype": "float32"}),
    "palm-fp16": Check(partial(weights, of=PALM), {"dtype": "float32"}),
    "gpt3-h100": Check(partial(devices, of=GPT3, room=80), {"dtype": "float32"}),
    "gpt3-512": Check(of_mesh, {"bytes": 18}),
    "adam-share": Check(optimizer_share, {"optimizer": "lion"}),
    "adam-extra": Check(kept_values, {"optimizer": "lion"}),
    "gpt3-min-gpus": Check(partial(devices, of=GPT3), {"dtype": "float32"}),
    "palm-min-gpus": Check(partial(devices, of=PALM, exactly=PALM_EXACT), {"dtype": "float32"}),
    "gpt2-min-gpus": Check(partial(devices, of=GPT2), {"room": 3}),
    "mixed-precision": Check(per_parameter, {"precision": "float32"}),
}
