"""What training costs in arithmetic, how much text a model wants, and what a node's network cards send."""

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
from jaxdist.lab.claim import Check, Outcome
from jaxdist.lab.claims import within
from jaxdist.planning.clusters import cluster
from jaxdist.planning.hardware import GPUS, Gpu
from jaxdist.planning.tables import table
from jaxdist.planning.timing import flops_per_token

YEAR = 365.25 * 24 * 3600
GPT3_TOKENS = 300e9
"""Brown et al. 2020, table D.1."""

OPTIMAL = Path(__file__).parents[1] / "chinchilla.csv"
"""Compute-optimal sizes and tokens (Hoffmann et al. 2022, table 3)."""


def flops_per_parameter(backward: bool = True) -> float:
    """FLOPs for one weight and one token, counted by XLA in a product with a matrix, and in its two gradients."""
    rows, width = 8, 16
    x, w, dy = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((rows, width), (width, width), (rows, width)))

    def step(x, w, dy):
        y, vjp = jax.vjp(jnp.matmul, x, w)
        return (y, vjp(dy)) if backward else y

    return jax.jit(step).lower(x, w, dy).cost_analysis()["flops"] / (rows * w.size)


def training(expected: str, tolerance: str, parameters: float, tokens: float, backward: bool = True) -> Outcome:
    """FLOPs to train so many parameters on so many tokens."""
    each = flops_per_parameter(backward)
    value = each * parameters * tokens
    lines = (
        f"{each:g} FLOPs for a parameter and a token, as XLA counts a product and its two gradients:",
        f"{each:g} x {parameters:.3g} x {tokens:.3g} = {value:.3g}",
    )
    return Outcome(value, within(value, expected, tolerance), lines)


def plain_rate(gpu: Gpu) -> float:
    """FLOP/s of its float32 units, each of which multiplies and adds in a cycle."""
    return 2 * gpu.cores * gpu.lanes * gpu.clock_ghz * 1e9


def years(expected: str, tolerance: str, gpu: str = "h100") -> Outcome:
    """How long one GPU takes for GPT-3, without its matrix units."""
    on, parameters = GPUS[gpu], models.parameters(models.build(GPT3))
    work = flops_per_parameter() * parameters * GPT3_TOKENS
    value = work / plain_rate(on) / YEAR
    exact = flops_per_token(GPT3) * GPT3_TOKENS
    lines = (
        f"{parameters:,} parameters x {GPT3_TOKENS:.3g} tokens x {flops_per_parameter():g} = {work:.3g} FLOPs; with "
        f"attention's products {exact:.3g}",
        f"{on.kind}: {plain_rate(on):.3g} FLOP/s in float32 without matrix units, {on.peak:.3g} in bfloat16 with them,",
        f"with which it were {work / on.peak / YEAR:.1f} years at best.",
    )
    return Outcome(value, within(value, expected, tolerance), lines, pictures.roofline)


def tokens_per_parameter(expected: str, tolerance: str, quantile: float = 0.5) -> Outcome:
    """The median over the published compute-optimal models."""
    with OPTIMAL.open(newline="") as file:
        rows = [(float(row["parameters"]), float(row["tokens"])) for row in csv.DictReader(file)]
    ratios = [tokens / parameters for parameters, tokens in rows]
    value = float(np.quantile(ratios, quantile))
    told = [(f"{p:.3g}", f"{t:.3g}", f"{ratio:.2f}") for (p, t), ratio in zip(rows, ratios, strict=True)]
    return Outcome(value, within(value, expected, tolerance), tuple(table([("parameters", "tokens", "ratio"), *told])))


def network(expected: str, tolerance: str, preset: str = "alps-gh200") -> Outcome:
    """GB/s that one GPU of a cluster sends to other nodes."""
    found = cluster(preset)
    value = found.across.bandwidth / 1e9
    lines = (
        f"{preset}: {found.per_host} x {found.gpu} to a node, {8 * value:g} Gb/s, {value:g} GB/s, each way for each",
    )
    return Outcome(value, within(value, expected, tolerance), lines)


CHECKS = {
    "gpt3-years": Check(years, {"gpu": "a100"}),
    "chinchilla": Check(tokens_per_parameter, {"quantile": 0.0}),
    "scaling-70b": Check(partial(training, parameters=70e9, tokens=1e12), {"backward": False}),
    "scaling-280b": Check(partial(training, parameters=280e9, tokens=10e12), {"backward": False}),
    "slingshot": Check(network, {"preset": "h100-ndr"}),
}
