"""What a device holds: optimizer state in the host's memory, one whole layer at a time, shards that are updated."""

from __future__ import annotations

import math
import re

import jax

from jaxdist.config import Config, ParallelConfig
from jaxdist.lab.checks.traffic import TINY, data_parallel_step
from jaxdist.lab.claim import Check, Claim, Outcome
from jaxdist.lab.phases import cpu_mesh
from jaxdist.output.tables import table
from jaxdist.programs.hlo_text import Instruction, bytes_of, parse, results
from jaxdist.training.run import Run

COLLECTIVE = re.compile(r" = (.*?) (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(-start)?\(")


def on_device(claim: Claim, offload: str = "optimizer") -> Outcome:
    """Count the bytes of moments and masters that a step takes from the device's memory, not from the host's."""
    config = Config(mesh="2x1x1", precision="mixed", model=TINY, parallel=ParallelConfig(zero=1, offload=offload))
    run = Run(config, devices=list(cpu_mesh(config.mesh).devices.flat))
    run.steps = 1
    with jax.set_mesh(run.mesh):
        state = run.engine.abstract()
    held = {"host": 0, "device": 0}
    for leaf in jax.tree.leaves((state.params, state.optimizer)):
        # Counts of updates are scalars and stay.
        if leaf.ndim:
            held["host" if leaf.sharding.memory_kind == "pinned_host" else "device"] += leaf.size * leaf.dtype.itemsize
    lines = tuple(f"masters and moments in the memory of the {where}: {count:,} bytes" for where, count in held.items())
    return Outcome(held["device"], claim.met(held["device"]), lines)


def whole_at_once(claim: Claim, zero: int = 3) -> Outcome:
    """Count the bytes of weights that a step gathers at one time, with more and more layers.

    Weights that are gathered in the body of a loop are freed when it ends; those of the entry stay. A unit is a layer,
    or all that is outside of layers.
    """
    value = claim.expected
    rows = [("layers", "a layer", "the rest", "whole at one time")]
    for layers in (2, 3):
        step = data_parallel_step(zero, layers)
        parameters = step.run.sharded.parameters
        layer = 4 * sum(one.elements for one in parameters if one.stacked) // layers
        rest = 4 * sum(one.elements for one in parameters if not one.stacked)
        most = max(map(_gathered_bytes, parse(step.text).computations.values()))
        rows.append((str(layers), f"{layer:,}", f"{rest:,}", f"{most:,}"))
        if most != max(layer, rest):
            value = f"{most / max(layer, rest):g} x the largest unit of {layers} layers"
            break
    lines = ("bytes of weights in a step on 4 devices, compiled:", *table(rows))
    return Outcome(value, claim.met(value), lines)


def _gathered_bytes(computation: list[Instruction]) -> int:
    """Return the bytes that the all-gathers of a computation itself make, without those of its loops."""
    gathers = [one for one in computation if one.opcode in ("all-gather", "all-gather-start")]
    return sum(bytes_of(dtype) * math.prod(shape) for one in gathers for dtype, shape in results(one))


def after_the_reduction(claim: Claim, zero: int = 3) -> Outcome:
    """Count the collectives on arrays that run after the last reduce-scatter of a compiled step.

    XLA prints a program in the order in which it runs. Without a reduce-scatter, those of the whole step count.
    """
    text = data_parallel_step(zero).text
    lines = text[text.index("\nENTRY ") :].splitlines()
    # The layers' own are in the body of a loop, which the entry calls.
    scatters = {name for name, body in _computations(text).items() if "reduce-scatter" in body}
    last = 0
    for number, line in enumerate(lines):
        called = re.search(r"body=%?([\w.-]+)", line)
        if " reduce-scatter" in line or (called and called[1] in scatters):
            last = number
    moves = [match for line in lines[last + 1 :] if (match := COLLECTIVE.search(line))]
    # A single number has no dims: f32[].
    found = [match for match in moves if re.search(r"\[\d", match[1])]
    single = len(moves) - len(found)
    told = (f"after the last reduce-scatter: {len(found)} collectives on arrays, {single} on single numbers",)
    return Outcome(len(found), claim.met(len(found)), told)


def _computations(text: str) -> dict[str, str]:
    """Return the computations of a program's text by name."""
    found = re.findall(r"^%?([\w.-]+) \([^\n]*\{\n(.*?)^\}", text, re.MULTILINE | re.DOTALL)
    return dict(found)


CHECKS = {
    "zero-offload": Check(on_device, {"offload": "none"}),
    "fsdp-largest-layer": Check(whole_at_once, {"zero": 0}),
    "fsdp-shardwise-update": Check(after_the_reduction, {"zero": 0}),
}
