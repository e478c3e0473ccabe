"""The traffic over the data axis, counted in the compiled program: ZeRO's stages, and a pipeline's one reduction."""

from __future__ import annotations

import math
from collections import Counter
from fractions import Fraction
from functools import cache, partial
from typing import NamedTuple

import jax

from jaxdist.config import Config, ModelConfig, ParallelConfig, PipelineConfig, TrainConfig
from jaxdist.lab import fsdp_walkthrough, pictures
from jaxdist.lab.checks.memory import states
from jaxdist.lab.claim import Check, Claim, Outcome
from jaxdist.lab.phases import calls_on_arrays, cpu_mesh, shape_text
from jaxdist.mesh import DATA
from jaxdist.output.tables import table
from jaxdist.parallel.pipeline import timeline
from jaxdist.parallel.pipeline.schedules import make
from jaxdist.planning import communication
from jaxdist.planning.predicted_collectives import ALL_REDUCE
from jaxdist.programs.hlo import Collective, collectives
from jaxdist.training.run import Run

TINY = ModelConfig(family="llama", layers=2, embed=32, heads=4, mlp=64, vocab=64, sequence=8)
"""A model whose every dim divides by the devices here."""


class CompiledStep(NamedTuple):
    """A step that is compiled for CPU devices, with its collectives."""

    run: Run
    moves: list[Collective]
    text: str
    """The program."""


def compiled(config: Config) -> CompiledStep:
    """Compile the step of this configuration on CPU devices, and read every collective of it."""
    run = Run(config, devices=list(cpu_mesh(config.mesh).devices.flat))
    run.steps = 1  # only for the learning-rate schedule
    with jax.set_mesh(run.mesh):
        text = run.lower().compile().as_text()
        return CompiledStep(run, collectives(text, run.mesh), text)


@cache
def data_parallel_step(zero: int, layers: int = TINY.layers) -> CompiledStep:
    """Compile the step of the tiny model with so many layers at a ZeRO stage; claims share it."""
    config = Config(
        mesh="4x1x1",
        precision="float32",
        model=TINY.model_copy(update={"layers": layers}),
        parallel=ParallelConfig(zero=zero),
    )
    return compiled(config)


def elements(zero: int, layers: int) -> tuple[float, float]:
    """Return the elements that a device sends over data in a step, here and in plain data parallelism; no scalars."""
    step = data_parallel_step(zero, layers)
    # XLA may combine scalars with arrays in one collective: count the share of the arrays.
    sent = sum(one.wire * one.array_elements / one.elements for one in step.moves if DATA in one.axes)
    return sent, communication.data_parallel(step.run.sharded)


def volume(claim: Claim, zero: int) -> Outcome:
    """Measure what a device sends, relative to plain data parallelism.

    At stages below 3 that is the whole step. At stage 3 it is one layer, by the difference to a step with one layer
    more: the embedding table is no layer, is gathered once for both its uses, and costs no more than before.
    """
    sent, plain = elements(zero, layers=2)
    rows = [
        (f"elements that a device sends, ZeRO {zero}", "compiled step", "plain", "ratio"),
        ("all of 2 layers", f"{sent:,.0f}", f"{plain:,.0f}", f"{sent / plain:.4f}"),
    ]
    remarks = []
    if zero == 3:
        sent_by_three, plain_by_three = elements(zero, layers=3)
        sent = sent_by_three - sent
        plain = plain_by_three - plain
        rows.append(("each layer more", f"{sent:,.0f}", f"{plain:,.0f}", f"{sent / plain:.4f}"))
        remarks.append(
            "A layer is gathered in both passes; the table, which is no layer, once for both: 2, not 3 elements."
        )
    value = sent / plain
    return Outcome(value, claim.met(value), (*table(rows), *remarks))


def two_by_two(claim: Claim, micro_batches: int = 4) -> Outcome:
    """Measure the units of a device in the schedule, and how often the compiled step reduces a gradient over data."""
    config = Config(
        mesh="2x1x2",
        precision="float32",
        model=TINY,
        pipeline=PipelineConfig(schedule="1f1b", microbatches=micro_batches),
        train=TrainConfig(global_batch_size=2 * micro_batches),
    )
    run, moves, _ = compiled(config)
    schedule = make("1f1b", 2, micro_batches)
    counts = {}
    for kind, ticks in schedule.units.items():
        units = {ticks[rank].size for rank in range(2)}
        counts[kind] = "/".join(map(str, sorted(units)))
    summed = sum(one.array_elements * one.count for one in moves if one.kind == ALL_REDUCE and DATA in one.axes)
    # In units of the parameters that a device uses: 1 means that each gradient is reduced once.
    reductions = summed / sum(p.use for p in run.sharded.parameters)
    value = f"{counts['F']} F + {counts['B']} B + {reductions:g} reduce"
    lines = (
        f"all-reduce over {DATA}: {summed:,} elements, {reductions:g} for each parameter of a device",
        "each of the two pipelines:",
        *timeline.text(schedule).splitlines(),
    )
    return Outcome(value, claim.met(value), lines, partial(timeline.picture, schedule))


def walkthrough(claim: Claim, zero: int = 3) -> Outcome:
    """Run the lab of that name: count the collectives of its phases, each compiled by itself, and of the fused step."""
    result = fsdp_walkthrough.measure(zero)
    gather = fsdp_walkthrough.GATHER
    scatter = fsdp_walkthrough.SCATTER
    phases = Counter(result.calls["phases"])
    fused = Counter(result.calls["fused"])
    value = (
        f"{phases[gather]} {gather}s + {phases[scatter]} {scatter}s counted as phases; "
        f"{fused[gather]} + {fused[scatter]} in the fused step"
    )
    first = result.phases[0].alive
    shapes = [f"{name} {shape_text(first[name][0])}" for name in ("x", "w1", "w2")]
    gathers = result.gathers
    lines = (
        f"on each device at rest: {', '.join(shapes)}",
        f"{gathers.with_input_gradient} -> {gathers.lowered} -> {gathers.compiled} all-gathers: "
        "the first layer's backward pass needs no weight; the last",
        "layer's gather is used again. python -m jaxdist.lab fsdp-walkthrough tells every phase.",
        "no weight is updated before the backward pass has ended" if result.untouched else "A WEIGHT CHANGED EARLY",
    )
    drawn = partial(
        pictures.phases, {f"{at} {one.name}": max(one.bytes.values()) for at, one in enumerate(result.phases)}
    )
    return Outcome(value, claim.met(value) and result.passed, lines, drawn)


def walkthrough_shapes(claim: Claim, zero: int = 3) -> Outcome:
    """Read the shapes on each device when layer 1 has run: rows, gathered weight, result, and what is left of it."""
    result = fsdp_walkthrough.measure(zero)
    names = [phase.name for phase in result.phases]
    ran = result.phases[names.index("forward layer 1")].alive
    freed = result.phases[names.index("free layer 1")].alive
    parts = [(ran, "x"), (ran, "W1"), (ran, "h"), (freed, "w1")]
    shapes = [sorted({shape_text(shape) for shape in alive[name].values()}) for alive, name in parts]
    value = ", ".join("/".join(each) for each in shapes)
    devices = {len(alive[name]) for alive, name in parts}
    kept = sorted(name for name in freed if name.lower().startswith("w"))
    lines = (
        f"x, gathered W1, h = tanh(x W1) and w1 on each of {'/'.join(map(str, devices))} devices",
        f"weights that are left after the layer: {', '.join(kept)}",
    )
    return Outcome(value, claim.met(value) and kept == ["w1", "w2"], lines)


def stage_and_bytes(claim: Claim, zero: int = 2, devices: int = 8) -> Outcome:
    """Measure what a stage sends against plain data parallelism, and the bytes of states of a parameter."""
    sent, plain = elements(zero, layers=2)
    held = states(zero, devices)
    each = held.total / held.parameters
    value = f"{sent / plain:.1f} and {each:g}"
    lines = (f"ZeRO {zero}: {sent:,.0f} elements against {plain:,.0f}; {each:g} bytes on each of {devices} devices",)
    return Outcome(value, claim.met(value), lines)


def kept_or_discarded(claim: Claim, kept: int = 2) -> Outcome:
    """Measure the elements that a layer more costs for each parameter, kept after the forward pass or discarded.

    Psi stands for the parameters; the factor (N - 1)/N, which all collectives over N devices have, is divided out.
    """
    found = {}
    for zero in (kept, 3):
        (sent, plain), (more, plain_more) = elements(zero, layers=2), elements(zero, layers=3)
        found[zero] = 2 * (more - sent) / (plain_more - plain)
    value = f"{found[kept]:g} and {found[3]:g}"
    lines = (f"kept, ZeRO {kept}: {found[kept]:g} Psi", f"discarded and gathered again, ZeRO 3: {found[3]:g} Psi")
    return Outcome(value, claim.met(value), lines)


def gradient_kind(claim: Claim, zero: int = 3) -> Outcome:
    """Read from the compiled step by which collectives the gradients are summed over data."""
    kinds = kinds_of(zero)
    value = " + ".join(kind for kind in kinds if kind != fsdp_walkthrough.GATHER)
    lines = tuple(f"{count} {kind}" for kind, count in kinds.items())
    return Outcome(value, claim.met(value), (f"on arrays, over {DATA}, in a step of ZeRO {zero}:", *lines))


def uses(claim: Claim, sharded: int = 3) -> Outcome:
    """Read the kinds of collectives in the compiled steps of plain data parallelism and of another stage."""
    found = {zero: " + ".join(kinds_of(zero)) for zero in (0, sharded)}
    value = "; ".join(found.values())
    return Outcome(value, claim.met(value), tuple(f"ZeRO {zero}: {kinds}" for zero, kinds in found.items()))


def kinds_of(zero: int) -> dict[str, int]:
    """Return the calls of each kind of collective over data on arrays, in a compiled step of 4 devices."""
    return calls_on_arrays(one for one in data_parallel_step(zero).moves if DATA in one.axes)


def stored(claim: Claim, zero: int = 3) -> Outcome:
    """Count the elements of the parameters that a device stores between steps."""
    found = {}
    for devices in (2, 4, 8):
        config = Config(mesh=f"{devices}x1x1", precision="float32", model=TINY, parallel=ParallelConfig(zero=zero))
        run = Run(config, dry=True)
        run.steps = 1
        with jax.sharding.use_abstract_mesh(run.mesh):
            params = jax.tree.leaves(run.engine.abstract().params)
        whole = sum(p.size for p in params)
        found[devices] = Fraction(sum(math.prod(p.sharding.shard_shape(p.shape)) for p in params), whole)
    value = claim.expected
    for devices, share in found.items():
        if share != Fraction(1, devices):
            value = f"{share} P of {devices} devices"
    lines = tuple(f"{devices} devices: {share} of {whole:,} parameters on each" for devices, share in found.items())
    return Outcome(value, claim.met(value), lines)


CHECKS = {
    "fsdp-p-over-n": Check(stored, {"zero": 0}),
    "fsdp-reduction": Check(gradient_kind, {"zero": 0}),
    "primitive-uses": Check(uses, {"sharded": 0}),
    "fsdp-discard": Check(kept_or_discarded, {"kept": 3}),
    "fsdp-forward-shapes": Check(walkthrough_shapes, {}),
    "tip-zero2": Check(stage_and_bytes, {"zero": 3}),
    "zero-comm-1": Check(partial(volume, zero=1), {"zero": 3}),
    "zero-comm-2": Check(partial(volume, zero=2), {"zero": 3}),
    "zero-comm-3": Check(partial(volume, zero=3), {"zero": 2}),
    "pipeline-2x2": Check(two_by_two, {"micro_batches": 8}),
    "fsdp-walkthrough": Check(walkthrough, {"zero": 0}),
}
