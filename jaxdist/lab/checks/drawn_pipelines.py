"""What the documents draw of pipelines: who sends, who waits, which gradients are stale, and where layers are cut."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from functools import partial

import numpy as np

from jaxdist.config import Config, ModelConfig, TrainConfig
from jaxdist.lab import model_parallel, pictures
from jaxdist.lab.checks.data import data_set
from jaxdist.lab.checks.pipelines import formula, planned
from jaxdist.lab.claim import Check, Claim, Outcome
from jaxdist.lab.phases import cpu_mesh
from jaxdist.lab.schedules import TIMES
from jaxdist.output.tables import table
from jaxdist.parallel.pipeline import timeline
from jaxdist.parallel.pipeline.schedules import Schedule, make
from jaxdist.parallel.pipeline.simulate import Times, bubble
from jaxdist.training.run import Run

STAGES = (2, 3, 4, 8)
"""Values of S."""

EQUAL = Times(Fraction(1), Fraction(1, 2), Fraction(1, 2))
"""A backward unit that takes as long as a forward unit, as the documents draw them."""


DRAWN = Times(F=2)
"""The same in whole numbers, for pictures."""


def holds(claim: Claim, counted: dict[int, list], wanted: Callable[[int], list]) -> str:
    """Return the expected formula if what was counted for each S is `wanted(S)`, else the first that is not."""
    for S, found in counted.items():
        if found != wanted(S):
            return f"{' '.join(map(str, found))} at S = {S}"
    return claim.expected


def sends(claim: Claim, virtual: int = 1, micro_batches: int = 8) -> Outcome:
    """Count for each micro-batch the units that wait for a neighbour: each of them needs a message.

    A unit of the schedule waits if it runs in a later tick than that of the chunk before it, or behind it in the
    backward pass. Beside it stand the messages of two layers on two devices, which really ran.
    """
    name = "gpipe" if virtual == 1 else "interleaved"
    found = {}
    for S in STAGES:
        schedule = make(name, S, micro_batches if virtual == 1 else 8 * S, virtual)
        forward = np.sum(schedule.forward[1:] > schedule.forward[:-1])
        backward = np.sum(schedule.backward[:-1] > schedule.backward[1:])
        found[S] = [Fraction(int(forward + backward), schedule.micro_batches)]
    value = holds(claim, found, lambda S: [formula(claim.expected, S=S)])
    by_hand = [phase for phase in model_parallel.measure().phases if len(phase.devices) == 2]
    shapes = []
    for phase in by_hand:
        (made,) = phase.makes
        shapes.append(f"{made} {next(iter(phase.alive[made].values()))}")
    rows = [("S", "sends of a micro-batch"), *((str(S), str(count)) for S, (count,) in found.items())]
    lines = (*table(rows), f"two layers on two devices send {len(by_hand)} times: {', '.join(shapes)}")
    drawn = partial(pictures.sends, make("gpipe", 4, 1))
    return Outcome(value, claim.met(value) and len(by_hand) == formula(claim.expected, S=2), lines, drawn)


def staleness(claim: Claim, schedule: str = "pipedream") -> Outcome:
    """Count the updates of a stage between the forward and the backward pass of a micro-batch, in the steady state."""
    found = {}
    for S in STAGES:
        made = make(schedule, S, 4 * S)
        found[S] = [_missed(made, rank) for rank in range(S)]
    value = holds(claim, found, lambda S: [int(formula(claim.expected, S=S, s=s)) for s in range(S)])
    rows = [("S", "missed by stage 0, 1, ..."), *((str(S), " ".join(map(str, each))) for S, each in found.items())]
    title = f"{schedule}, 4 stages: updates of a stage that a gradient misses"
    quantity = "updates between the forward and the backward pass of a micro-batch"
    drawn = partial(pictures.of_stages, found[4], quantity, title)
    return Outcome(value, claim.met(value), tuple(table(rows)), drawn)


def _missed(schedule: Schedule, rank: int) -> int:
    """Return the most updates of a rank that a gradient does not know of; a pipeline with a flush makes none."""
    if schedule.flush:
        return 0
    forward, backward = schedule.forward[rank], schedule.backward[rank]
    between = (forward[:, None] < backward[None, :]) & (backward[None, :] < backward[:, None])
    return int(between.sum(axis=1).max())


def steady_idle(claim: Claim, steady: bool = True, stages: int = 4, micro_batches: int = 32) -> Outcome:
    """Count the ticks in which a stage of PipeDream has no unit, between its first backward and its last forward unit.

    Without `steady`, from its first unit to the last of all stages.
    """
    schedule = make("pipedream", stages, micro_batches)
    shares = []
    for rank in range(stages):
        forward, backward = schedule.forward[rank], schedule.backward[rank]
        first, last = (backward.min(), forward.max()) if steady else (0, schedule.ticks - 1)
        busy = {int(tick) for tick in (*forward, *backward) if first <= tick <= last}
        shares.append(1 - Fraction(len(busy), int(last - first + 1)))
    value = float(max(shares))
    whole = f"ticks {first} to {last}" if not steady else "from a stage's first backward to its last forward unit"
    lines = (
        f"{micro_batches} micro-batches on {stages} stages, {whole}:",
        *(f"stage {rank} waits {share} of the ticks" for rank, share in enumerate(shares)),
    )
    return Outcome(value, claim.met(value), lines, partial(pictures.steady, make("pipedream", stages, 16)))


def gpipe_order(claim: Claim, schedule: str = "gpipe", stages: int = 3, micro_batches: int = 4) -> Outcome:
    """Measure the idle part of a schedule whose units all last as long, and the order of its backward units."""
    made = make(schedule, stages, micro_batches)
    idle = bubble(made, EQUAL).share
    orders = {" ".join(str(m + 1) for m in np.argsort(ticks)) for ticks in made.backward}
    value = f"{idle} and {' or '.join(sorted(orders))}"
    drawn = partial(timeline.picture, made, times=DRAWN)
    return Outcome(value, claim.met(value), tuple(timeline.text(made).splitlines()), drawn)


def idle_of_each(claim: Claim, stages: int = 4, micro_batches: int = 1) -> Outcome:
    """Count for each device the ticks in which it has no unit; layers are one to a stage."""
    made = make("gpipe", stages, micro_batches)
    idle = []
    for rank in range(stages):
        busy = len({*made.forward[rank], *made.backward[rank]})
        idle.append(1 - Fraction(busy, made.ticks))
    value = " or ".join(sorted({str(share) for share in idle}))
    lines = [f"device {rank} waits in {share} of {made.ticks} ticks" for rank, share in enumerate(idle)]
    lines.append(f"with backward units of twice the time: {bubble(made, TIMES).share}")
    return Outcome(value, claim.met(value), tuple(lines), partial(timeline.picture, made, times=DRAWN))


def cut(claim: Claim, layers: int = 31, stages: int = 3) -> Outcome:
    """Read the layers of the largest stage, which sets the pace, as a run cuts them."""
    model = ModelConfig(layers=layers, embed=16, heads=2, vocab=64, sequence=8)
    sizes = planned(Config(mesh=f"1x1x{stages}", model=model)).pipe.stages.sizes
    value = max(sizes)
    first = 0
    lines = [
        "Of the cuts whose largest stage is the smallest, jaxdist takes the one whose first stages are the longest:"
    ]
    for stage, size in enumerate(sizes):
        lines.append(f"stage {stage}: layers {first}-{first + size - 1}")
        first += size
    return Outcome(value, claim.met(value), tuple(lines))


def by_hand(claim: Claim, epochs: int = 10, samples: int = 2048, batch: int = 32) -> Outcome:
    """Count the steps that a run makes of so many rows, and the part of a step in which each of two devices works."""
    with data_set(samples) as data:
        train = TrainConfig(global_batch_size=batch, epochs=epochs)
        model = ModelConfig(layers=2, embed=16, heads=2, vocab=64, sequence=8)
        config = Config(mesh="1x1x1", precision="float32", model=model, data=data, train=train)
        steps = Run(config, devices=list(cpu_mesh("1x1x1").devices.flat)).steps
    result = model_parallel.measure()
    work = result.work
    shares = {str(Fraction(count, sum(work.values()))) for count in work.values()}
    value = f"{steps} and {' or '.join(sorted(shares))}"
    lines = (
        f"{samples} samples, {batch} in a step, {epochs} epochs: {steps} steps",
        *(f"device {device} works in {count} of {sum(work.values())} phases" for device, count in work.items()),
        "python -m jaxdist.lab model-parallel tells every phase.",
    )
    return Outcome(value, claim.met(value) and result.passed, lines)


CHECKS = {
    "pipeline-sends": Check(sends, {"virtual": 2}),
    "pipedream-staleness": Check(staleness, {"schedule": "1f1b"}),
    "pipedream-bubble": Check(steady_idle, {"steady": False}),
    "pipeline-3x4": Check(gpipe_order, {"schedule": "1f1b"}),
    "vertical-idle": Check(idle_of_each, {"micro_batches": 4}),
    "split-31": Check(cut, {"stages": 4}),
    "simple-model-parallel": Check(by_hand, {"epochs": 5}),
}
