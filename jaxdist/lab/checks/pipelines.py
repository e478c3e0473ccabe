"""Bubbles counted unit by unit, weight versions, uneven stages, and pipelines compared with tensor parallelism."""

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
from jaxdist.lab.claim import Check, Claim, Outcome
from jaxdist.lab.schedules import TIMES
from jaxdist.mesh import abstract_mesh, parse_mesh
from jaxdist.mesh.split import Split
from jaxdist.output.tables import table
from jaxdist.output.units import size
from jaxdist.parallel.pipeline import timeline
from jaxdist.parallel.pipeline.schedules import Schedule, make
from jaxdist.parallel.pipeline.simulate import bubble
from jaxdist.planning import communication, pipelines
from jaxdist.planning.sharded_model import ShardedModel
from jaxdist.sharding import Layout

STAGES = (1, 2, 3, 4, 8)
MICRO_BATCHES = (1, 2, 4, 5, 8, 32)

OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def formula(text: str, **values: int) -> Fraction:
    """Return the value of a formula of the table: names, whole numbers, + - * / and parentheses."""

    def value(node: ast.expr) -> Fraction:
        if isinstance(node, ast.BinOp):
            return OPERATIONS[type(node.op)](value(node.left), value(node.right))
        if isinstance(node, ast.Name):
            return Fraction(values[node.id])
        return Fraction(node.value)

    return value(ast.parse(text, mode="eval").body)


def speed_up(claim: Claim, stages: int = 4, micro_batches: int = 1) -> Outcome:
    """Measure the speed-up of a pipeline over one device that runs all stages one after the other."""
    schedule = make("gpipe", stages, micro_batches)
    cost = bubble(schedule, TIMES)
    value = float(stages * cost.work / cost.lockstep)
    lines = (f"bubble {cost.share} of the time on {stages} devices", *timeline.text(schedule).splitlines())
    return Outcome(value, claim.met(value), lines, partial(timeline.picture, schedule))


def bubble_fraction(claim: Claim, schedule: str = "gpipe") -> Outcome:
    """Check the share of time that a rank waits, in every pipeline of up to 8 stages and 32 micro-batches."""
    counted = {(S, M): bubble(make(schedule, S, M), TIMES).share for S in STAGES for M in MICRO_BATCHES}
    wrong = [(S, M) for (S, M), share in counted.items() if share != formula(claim.expected, S=S, M=M)]
    value = claim.expected
    if wrong:
        S, M = wrong[0]
        value = f"{counted[S, M]} at S, M = {S}, {M}"
    rows = [("S \\ M", *map(str, MICRO_BATCHES))]
    for S in STAGES:
        rows.append((str(S), *(str(counted[S, M]) for M in MICRO_BATCHES)))
    # The more micro-batches, the smaller the bubble.
    drawn = [make(schedule, 4, M) for M in (2, 4, 8)]
    lines = (f"counted in {len(counted)} schedules:", *table(rows))
    return Outcome(value, not wrong, lines, partial(timeline.picture, drawn))


def versions(schedule: Schedule) -> list[int]:
    """Return for each rank the most versions of its weights that it needs at a time, the newest included.

    A rank of a pipeline without a flush is updated after each B, and the F and B of a micro-batch use the same version
    (weight stashing).
    """
    if not schedule.flush:
        return [_most(F, B) for F, B in zip(schedule.forward, schedule.backward, strict=True)]
    return [1] * schedule.stages


def _most(forward: np.ndarray, backward: np.ndarray) -> int:
    """Return the most versions of one rank, from the ticks of F and B of each micro-batch."""
    # The version that a micro-batch uses is the number of updates before its F.
    used = [int(np.sum(backward < tick)) for tick in forward]
    most = 0
    for tick in range(int(backward.max()) + 1):
        wanted = {u for u, f, b in zip(used, forward, backward, strict=True) if f <= tick <= b}
        most = max(most, len(wanted))
    return most


def stashed(claim: Claim, schedule: str = "pipedream") -> Outcome:
    """Measure the weight versions of the first and last of S stages, in pipelines of 2 to 8 over many batches."""
    # Enough batches for every rank to reach its steady state.
    found = {S: versions(make(schedule, S, 4 * S)) for S in range(2, 9)}
    value = claim.expected
    for S, of in found.items():
        span = f"{of[0]}..{of[-1]}"
        if span != claim.expected.replace("S", str(S)):
            value = f"{span} of {S} stages"
            break
    rows = [(str(S), " ".join(map(str, of))) for S, of in found.items()]
    lines = tuple(table([("S", "versions by rank"), *rows]))
    title = f"{schedule}, 4 stages: versions of its weights that a stage keeps"
    return Outcome(value, claim.met(value), lines, partial(pictures.of_stages, found[4], "versions", title))


def planned(config: Config) -> ShardedModel:
    """Return the model of a configuration on its mesh, without devices."""
    split = Split(config, parse_mesh(config.mesh))
    layout = Layout.of(split, abstract_mesh(split.shape), CPU)
    return ShardedModel(split, models.build(config.model, layout), layout)


def layer_split(claim: Claim, stages: int = 64) -> Outcome:
    """Measure how many stages have how many layers, and whether the planner's note says what an uneven split costs."""
    config = Config(mesh=f"1x8x{stages}", precision="mixed", model=GPT3, pipeline=PipelineConfig(microbatches=stages))
    pipe = planned(config).pipe
    counts = sorted(Counter(pipe.stages.sizes).items(), reverse=True)
    value = f"{counts[0][1]} stages of {counts[0][0]}"
    for layers, count in counts[1:]:
        value += f" and {count} of {layers}"
    note = pipelines.uneven(config, pipe)
    # Stages of different sizes are padded, which costs time, and the planner must say so.
    reported = bool(note) == pipe.stages.padded
    lines = textwrap.wrap(note, 120)
    if not lines:
        lines = ["all stages are alike"]
    drawn = partial(pictures.grid, model=8, layers=pipe.stages.sizes)
    return Outcome(value, claim.met(value) and reported, tuple(lines), drawn)


def inter_intra(claim: Claim, inter: str = "1x1x4", intra: str = "1x4x1") -> Outcome:
    """Compare a pipeline with tensor parallelism on as many devices: bytes sent per device and step, and idle time."""
    sizes = ModelConfig(family="llama", layers=16, embed=2048, heads=16, vocab=32000, sequence=2048)
    train = TrainConfig(global_batch_size=32, accumulation=8)
    rows = [("", "sent per device and step", "idle")]
    sent = {}
    idle = {}
    for name, mesh in (("PP", inter), ("TP", intra)):
        config = Config(mesh=mesh, precision="mixed", model=sizes, train=train)
        sharded = planned(config)
        sent[name] = sum(one.wire_bytes for one in communication.predict(sharded))
        idle[name] = 0 if sharded.pipe is None else sharded.pipe.bubble.share
        rows.append((f"{name}, {mesh}", size(sent[name]), f"{idle[name]:.1%}"))
    value = f"bytes: PP {_sign(sent)} TP; idle: PP {_sign(idle)} TP"
    about = f"{sizes.layers} layers of {sizes.embed}; 8 micro-batches of 4 rows of {sizes.sequence}:"
    return Outcome(value, claim.met(value), (about, *table(rows)))


def _sign(of: dict[str, float]) -> str:
    """Return how PP compares with TP: `<`, `>` or `=`."""
    if of["PP"] < of["TP"]:
        return "<"
    if of["PP"] > of["TP"]:
        return ">"
    return "="


CHECKS = {
    "pipeline-naive": Check(speed_up, {"micro_batches": 4}),
    "pipeline-gpipe": Check(bubble_fraction, {"schedule": "zb-u"}),
    "pipedream-1f1b": Check(stashed, {"schedule": "1f1b"}),
    "inter-vs-intra": Check(inter_intra, {"inter": "4x1x1"}),
    "gpt3-3d": Check(layer_split, {"stages": 48}),
}
