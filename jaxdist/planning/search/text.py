"""A plan for a person, and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from shlex import quote
from typing import Any

from jaxdist.config import Config, leaves
from jaxdist.mesh import DATA, MODEL, PIPELINE, REPLICA
from jaxdist.models import Model, parameters
from jaxdist.planning import collective_time, parameter_layout
from jaxdist.planning.clusters import Cluster, calibrated, how_to_calibrate
from jaxdist.planning.hardware import GPUS
from jaxdist.planning.search.estimate import FORMULAS, Estimate, layout_of, ranks_inside, seconds, together, told
from jaxdist.planning.search.plan import Plan
from jaxdist.planning.search.questions import alone
from jaxdist.planning.search.reasons import reason
from jaxdist.planning.tables import table
from jaxdist.units import size

SHOWN = 10

OPTIMAL = 20
"""Tokens for each parameter, where a given amount of arithmetic learns the most (Hoffmann et al. 2022)."""


def lines(plan: Plan, name: str, base: Config) -> Iterator[str]:
    c, train, m = plan.cluster, plan.config.train, plan.config.model
    if not calibrated(c):
        yield f"note        {how_to_calibrate(plan.devices)}"
    yield (
        f"cluster     {c.name}: {plan.devices} x {c.gpu}, {c.per_host} in a host; {size(c.memory)} each; "
        f"{c.inside.bandwidth / 1e9:g} GB/s inside, {c.across.bandwidth / 1e9:g} GB/s each across"
    )
    yield (
        f"model       {parameters(plan.model):,} parameters; {train.global_batch_size} rows x {m.sequence:,} = "
        f"{train.global_batch_size * m.sequence:,} tokens per step; {plan.config.precision}"
    )
    counts = plan.rejected
    yield (
        f"candidates  {len(plan.rough_memory):,}: {counts['memory']:,} need more memory, {counts['slower']:,} are "
        f"slower at first sight"
    )
    yield ""
    yield from ranking(plan)
    yield ""
    yield f"chosen      {reason(plan)}"
    for note in notes(plan.ranked[0], plan.model):
        yield f"note        {note}"
    yield "times       of a step without launches, input and other jobs: real ones are longer (docs/planning.md)"
    yield f"train       {command(plan.ranked[0], base, name)}"
    if gpu := GPUS.get(plan.cluster.gpu):
        whole = f"not possible: explain compiles for whole hosts of {gpu.per_host} {plan.cluster.gpu}"
        can = gpu.fills_hosts(plan.devices)
        yield f"verify      {verification(plan.ranked[0], base, name) if can else whole}"
    yield f"run         {run_time(plan)}"


def ranking(plan: Plan) -> Iterator[str]:
    rows = [("", "mesh", "ZeRO", "micro-batches", "recomputes", "schedule", "memory", "step", "MFU", "time goes to")]
    for place, one in enumerate(plan.ranked[:SHOWN], 1):
        rows.append((f"{'1=' if plan.tied(one) and place > 1 else place}", *row(one, plan)))
    yield from table(rows)


def row(one: Estimate, plan: Plan) -> tuple[str, ...]:
    used = one.memory.total / plan.cluster.memory
    return (
        one.config.mesh,
        str(one.config.parallel.zero) + ", sequence" * one.config.parallel.sequence,
        micro(one),
        one.config.model.remat,
        schedule(one),
        f"{size(one.memory.total)} ({used:.0%})",
        took(one.seconds, plan.cluster),
        f"{one.mfu:.1%}",
        ", ".join(f"{part} {one.share(part):.1%}" for part in one.parts if one.share(part) >= 0.0005),
    )


def notes(one: Estimate, model: Model) -> list[str]:
    """What was to be split in this row and is not: `train` says the same in its summary."""
    layout = layout_of(one.config, one.shape, one.cluster)
    return parameter_layout.notes(one.config, parameter_layout.placed(one.config, model, layout), layout)


def took(seconds: float, cluster: Cluster) -> str:
    """A predicted time; `~` where nobody has measured such devices."""
    return f"{'' if calibrated(cluster) else '~'}{seconds:.3g} s"


def micro(one: Estimate) -> str:
    return str(one.micro) + " outside" * (one.config.parallel.micro_batches == "outside")


def schedule(one: Estimate) -> str:
    if one.shape[PIPELINE] == 1:
        return "-"
    pipeline = one.config.pipeline
    return pipeline.schedule + f" v={pipeline.virtual}" * (pipeline.virtual > 1)


def summary(plan: Plan) -> Iterator[str]:
    """What a run says of its plan."""
    one = plan.ranked[0]
    if not calibrated(plan.cluster):
        yield how_to_calibrate(plan.devices)
    yield f"{told(one)}, {size(one.memory.total)}, {took(one.seconds, plan.cluster)} a step: {reason(plan)}"


def changes(one: Estimate, base: Config) -> dict[str, str]:
    """Knob -> value, where it is not that of `base`: what the plan decides, and what it was asked for."""
    there, found = leaves(base), leaves(one.config)
    there["mesh"] = ""  # it is always told
    if base.precision == "auto":
        there["precision"] = found["precision"]  # what that means on these devices
    text = lambda value: str(value).lower() if isinstance(value, bool) else str(value)
    return {knob: text(value) for knob, value in found.items() if value != there[knob] and knob != "run_dir"}


def command(one: Estimate, base: Config, name: str) -> str:
    return f"python -m jaxdist.train {quote(name)} {_options(one, base)}"


def verification(one: Estimate, base: Config, name: str) -> str:
    """The command that compiles this step: activations are only estimated here."""
    return f"python -m jaxdist.explain {quote(name)} {_options(one, base)} --target {one.cluster.gpu}"


def _options(one: Estimate, base: Config) -> str:
    return " ".join(f"--{knob.replace('_', '-')} {quote(value)}" for knob, value in changes(one, base).items())


def why(plan: Plan) -> Iterator[str]:
    """How the figures of the first come about."""
    one = plan.ranked[0]
    if not calibrated(plan.cluster):
        yield how_to_calibrate(plan.devices)
    yield f"{told(one)} on {plan.cluster.name}"
    yield ""
    yield from table([(part, f"{count:.4g} s", FORMULAS[part]) for part, count in one.parts.items()])
    yield ""
    held = one.memory.persistent | one.memory.transient
    yield from table([(name, size(count), HELD.get(name, "")) for name, count in held.items() if count])
    yield ""
    found = collectives(plan)
    yield from table([("sent by one device", "kind", "over", "calls", "bytes", "seconds"), *(row for row, _ in found)])
    yield ""
    yield from (formula for _, formula in found)


def collectives(plan: Plan) -> list[tuple[tuple[str, ...], str]]:
    """For each of the first's a row of figures, and how one call of it is computed."""
    one, found = plan.ranked[0], []
    for sent in together(one.transfers):
        over = " ".join(f"{axis}={one.shape[axis]}" for axis in sent.axes)
        took = seconds(sent, one.shape, plan.cluster)
        row = (sent.what, sent.kind, over, f"{sent.calls:,}", size(sent.wire_bytes), f"{took:.3g}")
        inside = ranks_inside(one.shape, sent.axes, plan.cluster.per_host)
        each = sent.payload_bytes / sent.calls
        found.append((row, collective_time.why(sent.kind, each, sent.devices, inside, plan.cluster)))
    return found


HELD = {
    "parameters": "4 x elements at rest: divided by model, pipeline, and by data from ZeRO 1 on",
    "optimizer": "4 x elements at rest x moments of the update rule",
    "their bfloat16 copy": "2 x elements in use, at ZeRO 3 at rest",
    "batch": "4 x (tokens + labels) of all micro-batches",
    "gradients": "f32 sums, and a micro-batch's own; shards from ZeRO 2 on, and one layer whole",
    "weights in use": "cast or gathered: all, or at ZeRO 3 one layer",
    "activations": "bytes that a layer keeps of a token x tokens in flight x layers, and one layer's own at once",
}


def trade_off(plan: Plan) -> Iterator[str]:
    """Alpa's intra- and inter-operator parallelism (Zheng et al. 2022, section 2): which sends, and which waits."""
    rows = [("all devices on", "as", "idle", "sent by one device", "step", "memory")]
    impossible = []
    for axis, one in alone(plan):
        if isinstance(one, str):
            impossible.append(f"{axis} cannot be: {one}")
            continue
        sent = sum(each.wire_bytes for each in one.transfers)
        held = size(one.memory.total) + (" (does not fit)" if not one.fits else "")
        rows.append((axis, told(one), f"{one.share('waiting'):.1%}", size(sent), took(one.seconds, plan.cluster), held))
    yield from table(rows)
    yield from impossible


def compared(found: Sequence[tuple[int, Estimate | str]]) -> Iterator[str]:
    """More devices for the same batch: what each of them still does."""
    rows, impossible = [("devices", "first", "step", "tokens/s", "efficiency", "memory")], []
    base = next(((count, one) for count, one in found if isinstance(one, Estimate)), None)
    for count, one in found:
        if isinstance(one, str) or base is None:
            impossible.append(f"{count}: {one}")
            continue
        each = one.tokens_per_second * base[0] / (base[1].tokens_per_second * count)
        rate, held = f"{one.tokens_per_second:,.0f}", size(one.memory.total)
        rows.append((str(count), told(one), took(one.seconds, one.cluster), rate, f"{each:.0%}", held))
    yield from table(rows)
    yield from impossible


def run_time(plan: Plan) -> str:
    one, count = plan.ranked[0], parameters(plan.model)
    hours = OPTIMAL * count / one.tokens_per_second / 3600
    lasts = f"{hours / 24:,.1f} days" if hours >= 48 else f"{hours:,.1f} hours"
    about = "" if calibrated(plan.cluster) else "~"
    return (
        f"{OPTIMAL} tokens for each parameter are {OPTIMAL * count:,}: {about}{lasts}, "
        f"{about}{hours * plan.devices:,.0f} device-hours, {6 * OPTIMAL * count**2:.3g} FLOP by 6ND"
    )


def json(plan: Plan, base: Config, more: Sequence[tuple[int, Estimate | str]], reason: str) -> dict[str, Any]:
    """The schema of `docs/planning.md`; `reason` is why a mesh is not the first, if that was asked."""
    return {
        "why": [formula for _, formula in collectives(plan)],
        "why_not": reason or None,
        "trade_off": {
            axis: {"impossible": one} if isinstance(one, str) else _one(one, base) for axis, one in alone(plan)
        },
        "compared": [
            {"devices": count, "impossible": one} if isinstance(one, str) else {"devices": count, **_one(one, base)}
            for count, one in more
        ],
        "cluster": plan.cluster.name,
        "calibrated": calibrated(plan.cluster),
        "devices": plan.devices,
        "candidates": len(plan.rough_memory),
        "rejected": dict(plan.rejected),
        "notes": notes(plan.ranked[0], plan.model),
        "ranked": [_one(one, base) for one in plan.ranked],
    }


def _one(one: Estimate, base: Config) -> dict[str, Any]:
    return {
        "options": changes(one, base),
        "mesh": {axis: one.shape[axis] for axis in (REPLICA, DATA, MODEL, PIPELINE)},
        "memory": one.memory.total,
        "seconds": one.seconds,
        "parts": dict(one.parts),
        "tokens_per_second": one.tokens_per_second,
        "mfu": one.mfu,
    }
