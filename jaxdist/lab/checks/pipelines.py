"""Schedules counted unit by unit, weight versions, uneven stages, and pipelines beside tensor parallelism."""

from __future__ import annotations

import ast
import operator
import textwrap
from collections import Counter
from fractions import Fraction
from functools import partial

import numpy as np

from jaxdist import models
from jaxdist.config import Config, ModelConfig, PipelineConfig, TrainConfig
from jaxdist.explain import CPU
from jaxdist.lab import pictures
from jaxdist.lab.checks.memory import GPT3
from jaxdist.lab.claim import Check, Outcome
from jaxdist.lab.claims import within
from jaxdist.mesh import abstract_mesh, parse_mesh
from jaxdist.parallel.pipeline import timeline
from jaxdist.parallel.pipeline.schedules import Schedule, make
from jaxdist.parallel.pipeline.simulate import Times, bubble
from jaxdist.planning import communication, pipelines
from jaxdist.planning.tables import table
from jaxdist.sharding import Layout, rules
from jaxdist.units import size

TIMES = Times(Fraction(1), Fraction(1), Fraction(1))
"""Of a stage and a micro-batch: B takes twice as long as F. Fractions, so that what is equal is equal."""

OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def formula(text: str, **values: int) -> Fraction:
    """What a formula of the table comes to: names, whole numbers, + - * / and parentheses."""

    def of(node: ast.expr) -> Fraction:
        if isinstance(node, ast.BinOp):
            return OPERATIONS[type(node.op)](of(node.left), of(node.right))
        return Fraction(values[node.id] if isinstance(node, ast.Name) else node.value)

    return of(ast.parse(text, mode="eval").body)


def speed_up(expected: str, tolerance: str, stages: int = 4, micro_batches: int = 1) -> Outcome:
    """Of a pipeline over one device, which runs all stages one after the other."""
    schedule = make("gpipe", stages, micro_batches)
    cost = bubble(schedule, TIMES)
    value = float(stages * cost.work / cost.lockstep)
    lines = (f"bubble {cost.share} of the time on {stages} devices", *timeline.text(schedule).splitlines())
    return Outcome(value, within(value, expected, tolerance), lines, partial(timeline.picture, schedule))


def bubble_fraction(expected: str, tolerance: str, schedule: str = "gpipe") -> Outcome:
    """The share of time that a rank waits, in every pipeline of up to 8 stages and 32 micro-batches."""
    cases = [(S, M) for S in (1, 2, 3, 4, 8) for M in (1, 2, 4, 5, 8, 32)]
    counted = {(S, M): bubble(make(schedule, S, M), TIMES).share for S, M in cases}
    wrong = [case for case in cases if counted[case] != formula(expected, S=case[0], M=case[1])]
    rows = [(f"{S}", *(str(counted[S, M]) for M in (1, 2, 4, 5, 8, 32))) for S in (1, 2, 3, 4, 8)]
    value = expected if not wrong else f"{counted[wrong[0]]} at S, M = {wrong[0][0]}, {wrong[0][1]}"
    lines = table([("S \\ M", "1", "2", "4", "5", "8", "32"), *rows])
    drawn = [make(name, 4, 8) for name in dict.fromkeys((schedule, "gpipe", "1f1b"))]
    return Outcome(value, not wrong, (f"counted in {len(cases)} schedules:", *lines), partial(timeline.picture, drawn))


def versions(schedule: Schedule) -> list[int]:
    """Rank -> the most versions of its weights that it needs at a time, its newest among them.

    A rank of a pipeline without a flush is updated after each B; the F of a micro-batch and its B want the same ones.
    """
    if not schedule.flush:
        return [_most(F, B) for F, B in zip(schedule.forward, schedule.backward, strict=True)]
    return [1] * schedule.stages


def _most(forward: np.ndarray, backward: np.ndarray) -> int:
    """Of one rank, whose F and B of each micro-batch are in these ticks."""
    used = [int(np.sum(backward < tick)) for tick in forward]
    ticks = range(int(backward.max()) + 1)
    wanted = ({u for u, f, b in zip(used, forward, backward, strict=True) if f <= t <= b} for t in ticks)
    return max(map(len, wanted))


def stashed(expected: str, tolerance: str, schedule: str = "pipedream") -> Outcome:
    """From the first to the last of S stages, in pipelines of 2 to 8 that go on for many batches."""
    found = {S: versions(make(schedule, S, 4 * S)) for S in range(2, 9)}
    told = {S: f"{of[0]}..{of[-1]}" for S, of in found.items()}
    wrong = [S for S in found if told[S] != expected.replace("S", str(S))]
    value = f"{told[wrong[0]]} of {wrong[0]} stages" if wrong else expected
    rows = [(str(S), " ".join(map(str, of))) for S, of in found.items()]
    drawn = partial(timeline.picture, make(schedule, 4, 8))
    return Outcome(value, not wrong, tuple(table([("S", "versions by rank"), *rows])), drawn)


def planned(config: Config) -> tuple[Layout, models.Model, pipelines.Pipeline | None]:
    """What follows from a configuration on devices that need not be there."""
    shape = parse_mesh(config.mesh)
    layout = Layout.on(abstract_mesh(shape), rules(config, shape), CPU)
    return layout, models.build(config.model, layout), pipelines.pipeline_of(config, layout)


def layer_split(expected: str, tolerance: str, stages: int = 64) -> Outcome:
    """How many stages have how many layers, with the sentence that tells what this costs."""
    config = Config(mesh=f"1x8x{stages}", precision="mixed", model=GPT3, pipeline=PipelineConfig(microbatches=stages))
    layout, _, pipe = planned(config)
    counts = sorted(Counter(pipe.stages.sizes).items(), reverse=True)
    value = f"{counts[0][1]} stages of {counts[0][0]}" + "".join(f" and {n} of {layers}" for layers, n in counts[1:])
    notes = [note for note in pipelines.notes(config, layout, pipe) if note.startswith("model.layers")]
    reported = bool(notes) == pipe.stages.padded
    lines = tuple(line for note in notes for line in textwrap.wrap(note, 120)) or ("all stages are alike",)
    drawn = partial(pictures.cube, model=8, layers=pipe.stages.sizes)
    return Outcome(value, value == expected and reported, lines, drawn)


def inter_intra(expected: str, tolerance: str, inter: str = "1x1x4", intra: str = "1x4x1") -> Outcome:
    """A pipeline and tensor parallelism on as many devices: what one device sends in a step, and how long it waits."""
    sizes = ModelConfig(family="llama", layers=16, embed=2048, heads=16, vocab=32000, sequence=2048)
    train = TrainConfig(global_batch_size=32, accumulation=8)
    rows, found = [("", "sent per device and step", "idle")], {}
    for name, mesh in (("PP", inter), ("TP", intra)):
        config = Config(mesh=mesh, precision="mixed", model=sizes, train=train)
        layout, model, pipe = planned(config)
        sent = sum(one.wire_bytes for one in communication.predict(config, model, layout))
        found[name] = sent, pipe.bubble.share if pipe else 0
        rows.append((f"{name}, {mesh}", size(sent), f"{found[name][1]:.1%}"))
    sign = lambda i: "<" if found["PP"][i] < found["TP"][i] else ">" if found["PP"][i] > found["TP"][i] else "="
    value = f"bytes: PP {sign(0)} TP; idle: PP {sign(1)} TP"
    about = f"{sizes.layers} layers of {sizes.embed}; 8 micro-batches of 4 rows of {sizes.sequence}:"
    return Outcome(value, value == expected, (about, *table(rows)))


CHECKS = {
    "pipeline-naive": Check(speed_up, {"micro_batches": 4}),
    "pipeline-gpipe": Check(bubble_fraction, {"schedule": "zb-u"}),
    "pipedream-1f1b": Check(stashed, {"schedule": "1f1b"}),
    "inter-vs-intra": Check(inter_intra, {"inter": "4x1x1"}),
    "gpt3-3d": Check(layer_split, {"stages": 48}),
}
