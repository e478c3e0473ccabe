"""The arithmetic cost of training, the tokens that a model needs, and the bandwidth of a node's network cards."""

from __future__ import annotations

import csv
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxdist import models
from jaxdist.lab import pictures
from jaxdist.lab.checks.memory import GPT3
from jaxdist.lab.claim import Check, Claim, Outcome
from jaxdist.lab.phases import cpu_mesh
from jaxdist.output.tables import table
from jaxdist.parallel import tensor
from jaxdist.planning.clusters import cluster
from jaxdist.planning.hardware import GPUS, Gpu
from jaxdist.planning.timing import flops_per_token
from jaxdist.sharding import Layout

YEAR = 365.25 * 24 * 3600
GPT3_TOKENS = 300e9
"""Brown et al. 2020, table D.1."""

OPTIMAL = Path(__file__).parents[1] / "chinchilla.csv"
"""Compute-optimal sizes and tokens (Hoffmann et al. 2022, table 3)."""


def flops_per_parameter(backward: bool = True) -> float:
    """Return the FLOPs of one weight and one token, as XLA counts them in a matmul and in its two gradients."""
    rows = 8
    width = 16
    x = jax.ShapeDtypeStruct((rows, width), jnp.float32)
    w = jax.ShapeDtypeStruct((width, width), jnp.float32)
    dy = jax.ShapeDtypeStruct((rows, width), jnp.float32)

    def step(x, w, dy):
        y, vjp = jax.vjp(jnp.matmul, x, w)
        if backward:
            return y, vjp(dy)
        return y

    # Lowering is enough: XLA counts FLOPs without compiling.
    return jax.jit(step).lower(x, w, dy).cost_analysis()["flops"] / (rows * w.size)


def training(claim: Claim, parameters: float, tokens: float, backward: bool = True) -> Outcome:
    """Measure the FLOPs of training a number of parameters on a number of tokens."""
    each = flops_per_parameter(backward)
    value = each * parameters * tokens
    lines = (
        f"{each:g} FLOPs for a parameter and a token, as XLA counts a product and its two gradients:",
        f"{each:g} x {parameters:.3g} x {tokens:.3g} = {value:.3g}",
    )
    return Outcome(value, claim.met(value), lines)


def plain_rate(gpu: Gpu) -> float:
    """Return the FLOP/s of a GPU's float32 units, each of which multiplies and adds in every cycle."""
    return 2 * gpu.cores * gpu.lanes * gpu.clock_ghz * 1e9


def years(claim: Claim, gpu: str = "h100") -> Outcome:
    """Measure how long one GPU takes to train GPT-3 without its matrix units."""
    on = GPUS[gpu]
    parameters = models.parameters(models.build(GPT3))
    work = flops_per_parameter() * parameters * GPT3_TOKENS
    value = work / plain_rate(on) / YEAR
    # Beside it, the count with attention, which the rule of 6 FLOPs per parameter leaves out.
    exact = flops_per_token(GPT3) * GPT3_TOKENS
    lines = (
        f"{parameters:,} parameters x {GPT3_TOKENS:.3g} tokens x {flops_per_parameter():g} = {work:.3g} FLOPs; with "
        f"attention's products {exact:.3g}",
        f"{on.kind}: {plain_rate(on):.3g} FLOP/s in float32 without matrix units, {on.peak:.3g} in bfloat16 with them,",
        f"with which it were {work / on.peak / YEAR:.1f} years at best.",
    )
    times = {}
    for name in ("a100", "h100", "b200"):
        times[GPUS[name].kind] = (work / plain_rate(GPUS[name]) / YEAR, work / GPUS[name].peak / YEAR)
    title = f"training GPT-3: {work:.3g} FLOPs"
    return Outcome(value, claim.met(value), lines, partial(pictures.years, times, title))


def tokens_per_parameter(claim: Claim, quantile: float = 0.5) -> Outcome:
    """Measure the median of tokens per parameter over the published compute-optimal models."""
    with OPTIMAL.open(newline="") as file:
        published = [(float(row["parameters"]), float(row["tokens"])) for row in csv.DictReader(file)]
    ratios = [tokens / parameters for parameters, tokens in published]
    value = float(np.quantile(ratios, quantile))
    rows = [("parameters", "tokens", "ratio")]
    for (parameters, tokens), ratio in zip(published, ratios, strict=True):
        rows.append((f"{parameters:.3g}", f"{tokens:.3g}", f"{ratio:.2f}"))
    return Outcome(value, claim.met(value), tuple(table(rows)), partial(pictures.tokens, published, value))


def backward_ratio(claim: Claim, width: int = 16, input_gradient: bool = True) -> Outcome:
    """Measure the FLOPs of the backward pass of a product over those of its forward pass, as XLA counts them."""
    mesh = cpu_mesh("1x1x1")
    layout = Layout.on(mesh)
    x = jax.ShapeDtypeStruct((1, 8, width), jnp.float32)
    w = jax.ShapeDtypeStruct((width, 4 * width), jnp.float32)
    y = jax.ShapeDtypeStruct((1, 8, 4 * width), jnp.float32)

    def forward(x, w):
        return tensor.einsum(layout, "BSD,DF->BSF", x, w)

    def backward(x, w, dy):
        dx, dw = jax.vjp(forward, x, w)[1](dy)
        return (dx, dw) if input_gradient else dw

    counts = []
    with jax.set_mesh(mesh):
        for function, arguments in ((forward, (x, w)), (backward, (x, w, y))):
            counts.append(jax.jit(function).lower(*arguments).compile().cost_analysis()["flops"])
    ahead, back = counts
    value = back / ahead
    lines = (f"forward {ahead:,.0f} FLOPs, backward {back:,.0f}: a product for the input and one for the weight",)
    return Outcome(value, claim.met(value), lines)


def amdahl(claim: Claim, devices: int = 100, serial: float = 0.01) -> Outcome:
    """Return the speed-up by Amdahl's law: arithmetic."""

    def speed_up(n: float) -> float:
        return 1 / (serial + (1 - serial) / n)

    value = speed_up(devices)
    rows = [("devices", "speed-up"), *((str(n), f"{speed_up(n):.2f}") for n in (1, 10, 100, 1000))]
    about = f"a serial part of {serial:.0%}"
    drawn = partial(pictures.speed_up, speed_up, devices, about)
    return Outcome(value, claim.met(value), (f"{about}:", *table(rows)), drawn)


def tokens_of_table(claim: Claim, tokens: tuple[float, ...] = (1e12, 10e12)) -> Outcome:
    """Divide the tokens of the lecture's table by its parameters, 70B and 280B: arithmetic."""
    sizes = (70e9, 280e9)
    ratios = [each / parameters for parameters, each in zip(sizes, tokens, strict=True)]
    value = " and ".join(f"{ratio:.1f}" for ratio in ratios)
    rows = zip(tokens, sizes, ratios, strict=True)
    lines = tuple(f"{t:.3g} tokens / {n:.3g} parameters = {ratio:.1f}" for t, n, ratio in rows)
    return Outcome(value, claim.met(value), (*lines, "The rule beside the table is 20 tokens for each parameter."))


def network(claim: Claim, preset: str = "alps-gh200") -> Outcome:
    """Return the GB/s that one GPU of a cluster sends to other nodes, as the planner has them."""
    found = cluster(preset)
    value = found.across.bandwidth / 1e9
    lines = (
        f"{preset}: {found.per_host} x {found.gpu} to a node, {8 * value:g} Gb/s, {value:g} GB/s, each way for each",
    )
    return Outcome(value, claim.met(value), lines)


def node_network(claim: Claim, preset: str = "alps-gh200") -> Outcome:
    """Return the GB/s that a whole node of a cluster sends to others, as the planner has them."""
    found = cluster(preset)
    value = found.per_host * found.across.bandwidth / 1e9
    lines = (f"{preset}: {found.per_host} modules of a node, {found.across.bandwidth / 1e9:g} GB/s each way for each",)
    return Outcome(value, claim.met(value), lines)


CHECKS = {
    "backward-twice": Check(backward_ratio, {"input_gradient": False}),
    "hundred-gpus": Check(amdahl, {"serial": 0.0}),
    "chinchilla-table": Check(tokens_of_table, {"tokens": (1.4e12, 5.6e12)}),
    "slingshot-node": Check(node_network, {"preset": "h100-ndr"}),
    "gpt3-years": Check(years, {"gpu": "a100"}),
    "chinchilla": Check(tokens_per_parameter, {"quantile": 0.0}),
    "scaling-70b": Check(partial(training, parameters=70e9, tokens=1e12), {"backward": False}),
    "scaling-280b": Check(partial(training, parameters=280e9, tokens=10e12), {"backward": False}),
    "slingshot": Check(network, {"preset": "h100-ndr"}),
}
