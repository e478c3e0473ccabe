"""Format a plan: lines for people, and a JSON object."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from shlex import quote
from typing import Any

from jaxdist.config import Config, leaves
from jaxdist.mesh import crossing
from jaxdist.models import Model
from jaxdist.output.tables import table
from jaxdist.output.units import size
from jaxdist.planning import (
    certainty,
    collective_time,
    exposure,
    layout_notes,
    model_report,
    reference_pass,
    transfer_time,
)
from jaxdist.planning.clusters import calibrated, how_to_calibrate, of_gpu
from jaxdist.planning.collective_time import group_over
from jaxdist.planning.expert_rows import assumption
from jaxdist.planning.hardware import GPUS
from jaxdist.planning.search import slow_link
from jaxdist.planning.search.candidates import MESH
from jaxdist.planning.search.estimate import Estimate, label, sharded_model, took_about
from jaxdist.planning.search.plan import Plan
from jaxdist.planning.search.questions import alone
from jaxdist.planning.search.reasons import EQUAL, reason
from jaxdist.planning.timing import in_window
from jaxdist.planning.transfer_time import merge_calls, seconds_in, seconds_over_axes

SHOWN = 10
"""Ranked candidates that are printed."""

MEMORY_FORMULAS = {
    "parameters": "4 x elements at rest: divided by model, pipeline, and by data from ZeRO 1 on",
    "optimizer": "4, or 2 in bfloat16, x elements at rest x moments of the update rule",
    "their bfloat16 copy": "2 x elements in use, at ZeRO 3 at rest",
    "errors of compression": "4 x elements that cross the replicas",
    "at the last outer step": "4 x elements at rest, and as much again with outer momentum",
    "batch": "4 x (tokens + labels) of all micro-batches",
    "gradients": "f32 sums and the gradients of one micro-batch; from ZeRO 2 on, shards and one whole layer",
    "weights in use": "cast or gathered: all, or at ZeRO 3 one layer",
    "activations": "bytes that a layer saves per token x tokens in flight x layers, and one layer's temporaries",
}
"""How the bytes of each kind of memory are computed."""


def lines(plan: Plan, name: str, base: Config, run: str = "", where: str = "") -> Iterator[str]:
    """Yield the whole answer of the command; `name` is the configuration that it was given, with contents `base`.

    `run` says how long a whole run takes; `where` is the cluster as it was named.
    """
    cluster = plan.cluster
    first = plan.ranked[0]
    sequence = plan.config.model.sequence
    batch = plan.config.train.global_batch_size
    rejected = plan.rejected
    tokens = f"{batch} rows x {sequence:,} = {batch * sequence:,} tokens per step"
    if not calibrated(cluster):
        yield f"note        {how_to_calibrate(plan.devices)}"
    yield (
        f"cluster     {cluster.name}: {plan.devices} x {cluster.gpu}, {cluster.per_host} in a host; "
        f"{size(cluster.memory)} each; {cluster.inside.bandwidth / 1e9:g} GB/s inside, "
        f"{cluster.across.bandwidth / 1e9:g} GB/s each across{_sites(plan)}"
    )
    yield (
        f"model       {model_report.model_size(plan.config.model, plan.model)}; {tokens}; {plan.config.precision}"
        f"{in_window(plan.config.model)}"
    )
    yield (
        f"candidates  {len(plan.rough_memory):,}: {rejected['memory']:,} need more memory, {rejected['slower']:,} are "
        f"slower by a rough estimate"
    )
    yield ""
    yield from ranking(plan)
    yield ""
    yield f"chosen      {reason(plan)}"
    assumed = assumption(plan.config.model)
    if assumed:
        yield f"assumed     {assumed}"
    changed = slow_link.sentence(plan)
    if changed:
        yield f"loss        {changed}"
    advice = slow_link.advice(plan, slow_link.cheaper(plan))
    if advice:
        yield f"slow link   {advice}"
    for sentence in _sites_spanned(plan):
        yield f"warning     {sentence}"
    for note in notes(first, plan.model):
        yield f"note        {note}"
    yield f"rate        {rate(first)}"
    yield f"times       {times(plan)}"
    yield f"train       {command(first, base, name)}"
    # Explain compiles only for GPUs that it has a description of.
    if cluster.gpu in GPUS:
        yield f"verify      {verification(first, base, name, where)}"
    if run:
        yield f"run         {run}"


def _sites(plan: Plan) -> str:
    """Return the sites of the plan's devices and the link between them; empty where they lie in one."""
    sites = plan.cluster.sites(plan.devices)
    link = plan.cluster.between
    if sites == 1 or link is None:
        return ""
    return (
        f"; {sites} sites of {plan.cluster.per_site}, {link.bandwidth / 1e9:g} GB/s and {link.latency * 1e3:g} ms "
        f"between them for all of a site"
    )


def _sites_spanned(plan: Plan) -> list[str]:
    """Return a sentence for each axis of the first candidate, other than `replica`, that spans sites."""
    first = plan.ranked[0]
    rule = crossing.asked(first.config)
    return transfer_time.warnings(first.shape, first.transfers, plan.cluster, rule, first.outer)


def ranking(plan: Plan) -> Iterator[str]:
    """Yield the table of the best candidates; `1=` marks ties with the first."""
    rows: list[tuple[str, ...]] = [
        ("", "mesh", "ZeRO", "micro-batches", "recomputes", "schedule", "memory", "step", "MFU", "time goes to")
    ]
    for place, candidate in enumerate(plan.ranked[:SHOWN], 1):
        tied = plan.tied(candidate) and place > 1
        rows.append(("1=" if tied else str(place), *row(candidate, plan)))
    if plan.ranked[0].in_force:
        rows.append(("-", *row(plan.exact.ranked[0], plan)))
    if crossing.asked(plan.config).name:
        shown = [*plan.ranked[:SHOWN], plan.exact.ranked[0]]
        replicas = ["replicas", *(candidate.in_force or "exact" for candidate in shown)]
        # After the mesh and the ZeRO stage, on which the loss then depends.
        rows = [(*cells[:3], words, *cells[3:]) for cells, words in zip(rows, replicas, strict=False)]
    yield from table(rows)


def row(candidate: Estimate, plan: Plan) -> tuple[str, ...]:
    """Return the cells of a candidate after its place."""
    config = candidate.config
    used = candidate.memory.total / plan.cluster.memory
    visible = [part for part in candidate.parts if candidate.share(part) >= 0.0005]
    attention = candidate.attention
    return (
        f"{config.mesh} ({attention.form})" if attention else config.mesh,
        f"{config.parallel.zero}, sequence" if config.parallel.sequence else str(config.parallel.zero),
        micro(candidate),
        config.model.remat,
        schedule(candidate),
        f"{size(candidate.memory.total)} ({used:.0%})",
        took_about(candidate),
        f"{candidate.mfu:.1%}",
        ", ".join(f"{part} {candidate.share(part):.1%}" for part in visible),
    )


def notes(candidate: Estimate, model: Model) -> list[str]:
    """Return which parameters are not split as requested, and what overlaps nothing, as the summary of `train` does.

    Also what a run does before its first step, where that takes long.
    """
    split = candidate.split
    waits = exposure.note(split, candidate.memory.total, GPUS.get(candidate.cluster.gpu))
    found = [*layout_notes.notes(sharded_model(split, model, candidate.cluster)), *([waits] if waits else [])]
    reference = reference_pass.note(candidate.config)
    if reference:
        took = reference_pass.seconds(candidate.sending, candidate.cluster)
        found.append(f"{reference}; {took:.3g} s of arithmetic for each {reference_pass.PAIRS:,} pairs")
    return found


def times(plan: Plan) -> str:
    """Return how the times are to be read."""
    first = plan.ranked[0]
    sentence = (
        f"nine in ten published steps of a kind lay in such an interval, and {certainty.coverage():.0%} of a source "
        "that was left out"
    )
    if first.pessimistic > EQUAL * first.seconds:
        sentence += f"; with one network card of each host for weights, the first takes {first.pessimistic:.3g} s"
    return f"{sentence} (docs/explanation/planner.md)"


def rate(candidate: Estimate) -> str:
    """Return the predicted throughput, and the FLOP/s of a device, of which recomputation is not a part."""
    tokens = candidate.tokens_per_second
    flops = candidate.mfu * candidate.cluster.peak
    return (
        f"{tokens:,.0f} tokens/s, {tokens / candidate.devices:,.0f} on each device; {flops / 1e12:.0f} TFLOP/s on each "
        f"(causal attention counts once)"
    )


def micro(candidate: Estimate) -> str:
    """Return the number of micro-batches, and whether they run outside the loop over layers."""
    if candidate.config.parallel.micro_batches == "outside":
        return f"{candidate.micro} outside"
    return str(candidate.micro)


def schedule(candidate: Estimate) -> str:
    """Return the pipeline schedule with its virtual stages; `-` without a pipeline."""
    if not candidate.split.pipelined:
        return "-"
    pipeline = candidate.config.pipeline
    if pipeline.virtual > 1:
        return f"{pipeline.schedule} v={pipeline.virtual}"
    return pipeline.schedule


def summary(plan: Plan) -> Iterator[str]:
    """Yield what a run with `--mesh auto` prints about its plan."""
    first = plan.ranked[0]
    if not calibrated(plan.cluster):
        yield how_to_calibrate(plan.devices)
    yield f"{label(first)}, {size(first.memory.total)}, {took_about(first)} a step: {reason(plan)}"
    changed = slow_link.sentence(plan)
    if changed:
        yield changed


def changes(candidate: Estimate, base: Config) -> dict[str, str]:
    """Return the options that turn `base` into the candidate: what the plan decides, and what the user changed."""
    before = leaves(base)
    after = leaves(candidate.config)
    # The mesh is always given.
    before["mesh"] = ""
    if base.precision == "auto":
        # It has been replaced by its meaning on these devices, where it means the same again.
        before["precision"] = after["precision"]
    changed = {}
    for knob, value in after.items():
        if value == before[knob] or knob == "run_dir":
            continue
        changed[knob] = str(value).lower() if isinstance(value, bool) else str(value)
    return changed


def command(candidate: Estimate, base: Config, name: str) -> str:
    """Return the command that trains the candidate; for adapters, BASE stands for weights that were not named."""
    config = candidate.config
    begins = " --init-from BASE" if config.model.frozen and config.init_from is None else ""
    return f"python -m jaxdist.train {quote(name)}{begins} {_options(candidate, base)}"


def verification(candidate: Estimate, base: Config, name: str, where: str) -> str:
    """Return the command that compiles this step: the memory of activations is only estimated here.

    It names the cluster, as `where` does, if the GPU alone means another one.
    """
    gpu = candidate.cluster.gpu
    on = f" --cluster {quote(where)}" if where and of_gpu(gpu) != candidate.cluster else ""
    return f"python -m jaxdist.explain {quote(name)} {_options(candidate, base)} --target {gpu}{on}"


def _options(candidate: Estimate, base: Config) -> str:
    return " ".join(f"--{knob.replace('_', '-')} {quote(value)}" for knob, value in changes(candidate, base).items())


def why(plan: Plan) -> Iterator[str]:
    """Yield the formula behind each figure of the first candidate, and its collectives."""
    first = plan.ranked[0]
    if not calibrated(plan.cluster):
        yield how_to_calibrate(plan.devices)
    yield f"{label(first)} on {plan.cluster.name}"
    yield ""
    formulas_of_parts = first.formulas
    yield from table([(part, f"{count:.4g} s", formulas_of_parts[part]) for part, count in first.parts.items()])
    yield ""
    held = first.memory.persistent | first.memory.transient
    yield from table([(name, size(count), MEMORY_FORMULAS.get(name, "")) for name, count in held.items() if count])
    yield ""
    rows: list[tuple[str, ...]] = [("sent by one device", "kind", "over", "calls", "bytes", "seconds")]
    formulas = []
    for figures, formula in collectives(first):
        rows.append(figures)
        formulas.append(formula)
    yield from table(rows)
    yield ""
    yield from formulas


def collectives(candidate: Estimate) -> list[tuple[tuple[str, ...], str]]:
    """Return for each collective of a candidate a row of figures, and how the time of one call is computed.

    Figures are those of a step; of an outer step, which ends `train.local_steps` steps, those of that one.
    """
    cluster = candidate.cluster
    found: list[tuple[tuple[str, ...], str]] = []
    every = f", every {candidate.config.train.local_steps} steps"
    outer = [replace(transfer, what=transfer.what + every) for transfer in candidate.outer]
    for transfer in [*merge_calls(candidate.transfers), *merge_calls(outer)]:
        over = " ".join(f"{axis}={candidate.shape[axis]}" for axis in transfer.axes)
        group = group_over(candidate.shape, transfer.axes, cluster)
        sent, took = size(transfer.wire_bytes), seconds_in(group, transfer)
        figures = (transfer.what, transfer.kind, over, f"{transfer.calls:,}", sent, f"{took:.3g}")
        of_call = transfer.payload_bytes / transfer.calls
        found.append((figures, collective_time.why(transfer.kind, of_call, group)))
    return found


def trade_off(plan: Plan) -> Iterator[str]:
    """Yield what each axis alone sends, and how long devices wait.

    This is the comparison of intra- and inter-operator parallelism in Alpa (Zheng et al. 2022, section 2).
    """
    rows = [("all devices on", "as", "idle", "sent by one device", "step", "memory")]
    impossible = []
    for axis, candidate in alone(plan):
        if isinstance(candidate, str):
            impossible.append(f"{axis} is not possible: {candidate}")
            continue
        sent = sum(transfer.wire_bytes for transfer in candidate.transfers)
        held = size(candidate.memory.total)
        if not candidate.fits:
            held += " (does not fit)"
        idle = f"{candidate.share('waiting'):.1%}"
        rows.append((axis, label(candidate), idle, size(sent), took_about(candidate), held))
    yield from table(rows)
    yield from impossible


def json(plan: Plan, base: Config, answers: dict[str, Any], reason: str) -> dict[str, Any]:
    """Return the object that `docs/reference/json.md` describes.

    `answers` are those about the size of a job; `reason` answers `--why-not`, if that was given.
    """
    first = plan.ranked[0]
    cheaper = slow_link.cheaper(plan)
    return {
        "why": [formula for _, formula in collectives(first)],
        "why_not": reason or None,
        "seconds_per_axis": seconds_over_axes(first.transfers, first.shape, plan.cluster),
        "trade_off": {axis: json_or_reason(candidate, base) for axis, candidate in alone(plan)},
        **answers,
        "cluster": plan.cluster.name,
        "calibrated": calibrated(plan.cluster),
        "devices": plan.devices,
        "candidates": len(plan.rough_memory),
        "rejected": dict(plan.rejected),
        "assumed": assumption(plan.config.model) or None,
        "loss": slow_link.sentence(plan) or None,
        "exact": _json(plan.exact.ranked[0], base) if crossing.asked(plan.config).name else None,
        "slow_link": slow_link.advice(plan, cheaper) or None,
        "cheaper": [_json(one.first, base) for one in cheaper],
        "notes": notes(first, plan.model),
        "warnings": _sites_spanned(plan),
        "ranked": [_json(candidate, base) for candidate in plan.ranked],
    }


def json_or_reason(candidate: Estimate | str, base: Config) -> dict[str, Any]:
    """Return a candidate as JSON, or the reason why there is none."""
    if isinstance(candidate, str):
        return {"impossible": candidate}
    return _json(candidate, base)


def _json(candidate: Estimate, base: Config) -> dict[str, Any]:
    return {
        "options": changes(candidate, base),
        "mesh": {axis: candidate.shape[axis] for axis in MESH},
        **model_report.context_json(candidate.split),
        "changes_loss": candidate.in_force or None,
        "memory": candidate.memory.total,
        "seconds": candidate.seconds,
        "interval": list(candidate.interval),
        "pessimistic_seconds": candidate.pessimistic,
        "parts": dict(candidate.parts),
        "tokens_per_second": candidate.tokens_per_second,
        "mfu": candidate.mfu,
    }
