"""What crosses the data axis, counted in the compiled program: ZeRO's stages, and a pipeline's one reduction."""

from __future__ import annotations

from functools import cache, partial

import jax

from jaxdist.config import Config, ModelConfig, ParallelConfig, PipelineConfig, TrainConfig
from jaxdist.lab import fsdp_walkthrough
from jaxdist.lab.claim import Check, Outcome
from jaxdist.lab.claims import within
from jaxdist.lab.phases import cpu_mesh, shape_text
from jaxdist.mesh import DATA
from jaxdist.parallel.pipeline import timeline
from jaxdist.parallel.pipeline.schedules import make
from jaxdist.planning import communication
from jaxdist.planning.hlo import Collective, collectives
from jaxdist.planning.parameter_layout import placed
from jaxdist.planning.predicted_collectives import ALL_REDUCE
from jaxdist.planning.tables import table
from jaxdist.training.run import Run

TINY = ModelConfig(family="llama", layers=2, embed=32, heads=4, mlp=64, vocab=64, sequence=8)
"""Every dim of it divides by the devices here."""


def compiled(config: Config) -> tuple[Run, list[Collective]]:
    """A run of this configuration on CPU devices, and every collective of its compiled step."""
    run = Run(config, devices=list(cpu_mesh(config.mesh).devices.flat))
    run.steps = 1  # of the schedule alone
    with jax.set_mesh(run.mesh):
        return run, collectives(run.lower().compile().as_text(), run.mesh)


@cache
def elements(zero: int, layers: int, devices: int = 4) -> tuple[float, float]:
    """(what one device sends over data in a step, what it would in plain data parallelism), scalars left out."""
    config = Config(
        mesh=f"{devices}x1x1",
        precision="float32",
        model=TINY.model_copy(update={"layers": layers}),
        parallel=ParallelConfig(zero=zero),
    )
    run, moves = compiled(config)
    sent = sum(one.wire * one.array_elements / one.elements for one in moves if DATA in one.axes)
    return sent, communication.data_parallel(run.config, run.model, run.layout)


def volume(expected: str, tolerance: str, zero: int) -> Outcome:
    """Against plain data parallelism: of the whole step; at stage 3, of a layer, which is what a step with one more
    sends more. The table is no layer: it is gathered once for both its uses, and costs no more than ever."""
    sent, plain = elements(zero, layers=2)
    rows = [("all of 2 layers", f"{sent:,.0f}", f"{plain:,.0f}", f"{sent / plain:.4f}")]
    if zero == 3:
        more = [of_three - of_two for of_three, of_two in zip(elements(zero, layers=3), (sent, plain), strict=True)]
        sent, plain = more
        rows.append(("each layer more", f"{sent:,.0f}", f"{plain:,.0f}", f"{sent / plain:.4f}"))
    value = sent / plain
    why = ("A layer is gathered in both passes; the table, which is no layer, once for both: 2, not 3 elements.",)
    lines = table([(f"elements that a device sends, ZeRO {zero}", "compiled step", "plain", "ratio"), *rows])
    return Outcome(value, within(value, expected, tolerance), (*lines, *(why if zero == 3 else ())))


def two_by_two(expected: str, tolerance: str, micro_batches: int = 4) -> Outcome:
    """Units of a device by the schedule; over data, how often the compiled step adds up each gradient."""
    config = Config(
        mesh="2x1x2",
        precision="float32",
        model=TINY,
        pipeline=PipelineConfig(schedule="1f1b", microbatches=micro_batches),
        train=TrainConfig(global_batch_size=2 * micro_batches),
    )
    run, moves = compiled(config)
    schedule = make("1f1b", 2, micro_batches)
    units = {kind: {ticks[rank].size for rank in range(2)} for kind, ticks in schedule.units.items()}
    summed = sum(one.array_elements * one.count for one in moves if one.kind == ALL_REDUCE and DATA in one.axes)
    reductions = summed / sum(p.use for p in placed(run.config, run.model, run.layout))
    counts = {kind: "/".join(map(str, sorted(of))) for kind, of in units.items()}
    value = f"{counts['F']} F + {counts['B']} B + {reductions:g} reduce"
    lines = (f"all-reduce over {DATA}: {summed:,} elements, {reductions:g} for each parameter of a device",)
    drawn = timeline.text(schedule).splitlines()
    both = (*lines, "each of the two pipelines:", *drawn)
    return Outcome(value, value == expected, both, partial(timeline.picture, schedule))


def walkthrough(expected: str, tolerance: str, zero: int = 3) -> Outcome:
    """The lab of that name: what its phases move, each compiled for itself, and what the fused step does."""
    result = fsdp_walkthrough.measure(zero)
    gather, scatter = fsdp_walkthrough.GATHER, fsdp_walkthrough.SCATTER
    phases, fused = ({kind: of.get(kind, 0) for kind in (gather, scatter)} for of in result.calls.values())
    value = (
        f"{phases[gather]} {gather}s + {phases[scatter]} {scatter}s told as phases; "
        f"{fused[gather]} + {fused[scatter]} in the fused step"
    )
    first = result.phases[0].alive
    shapes = [f"{name} {shape_text(first[name][0])}" for name in ("x", "w1", "w2")]
    lines = (
        f"on each device at rest: {', '.join(shapes)}",
        f"{result.gathers.with_input_gradient} -> {result.gathers.lowered} -> {result.gathers.compiled} all-gathers: "
        "the first layer's backward pass needs no weight; the last",
        "layer's gather is used again. python -m jaxdist.lab fsdp-walkthrough tells every phase.",
        "no weight is updated before the backward pass has ended" if result.untouched else "A WEIGHT CHANGED EARLY",
    )
    return Outcome(value, value == expected and result.passed, lines)


CHECKS = {
    "zero-comm-1": Check(partial(volume, zero=1), {"zero": 3}),
    "zero-comm-2": Check(partial(volume, zero=2), {"zero": 3}),
    "zero-comm-3": Check(partial(volume, zero=3), {"zero": 2}),
    "pipeline-2x2": Check(two_by_two, {"micro_batches": 8}),
    "fsdp-walkthrough": Check(walkthrough, {"zero": 0}),
}
