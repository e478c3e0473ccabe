"""A report for a person: memory, collectives, and what theory says of both."""

from __future__ import annotations

from jaxdist import models
from jaxdist.mesh import describe, micro_batches
from jaxdist.planning import overlap, pipelines
from jaxdist.planning.report import Report
from jaxdist.planning.tables import table
from jaxdist.planning.timing import bandwidth
from jaxdist.units import size

BAR = 60
"""Characters of the bar."""


def lines(report: Report) -> list[str]:
    """What `python -m jaxdist.explain` prints."""
    parts = _head(report), _memory(report), _kernels(report), _collectives(report), _beside(report)
    return [line.rstrip() for part in parts if part for line in [*part, ""]][:-1]


def _head(report: Report) -> list[str]:
    config, program = report.config, report.program
    where = f"{report.gpu.kind}, not here" if report.gpu else "CPU"
    k = micro_batches(config, report.mesh.shape)
    pipeline = [f"pipeline    {pipelines.told(report.pipeline)}"] if report.pipeline else []
    notes = [f"note        {note}" for note in report.notes]
    return [
        f"compiled    for {report.mesh.size} x {where}, by jax {program.jax}: traced in {program.lower_seconds:.1f} s, "
        f"compiled in {program.compile_seconds:.1f} s",
        f"mesh        {describe(report.mesh.shape)}; precision {config.precision}; ZeRO {config.parallel.zero}; "
        f"{k} micro-batch(es); remat {config.model.remat}",
        *pipeline,
        f"model       {models.parameters(report.model):,} parameters",
        *notes,
    ]


def _memory(report: Report) -> list[str]:
    """Predicted beside compiled, and a bar of what the device would hold."""
    held, program = report.memory, report.program
    shared = not report.gpu  # CPU devices and their host have one memory, of which the program tells the sum
    arguments = held.arguments + shared * held.host
    temporaries = held.total - held.arguments + shared * held.host_activations
    both = lambda name, a, b: (name, size(a), size(b), _off(a, b))
    rows = [("memory per device", "predicted", "compiled", "")]
    rows.append(both("arguments", arguments, program.argument_bytes))
    rows += [(f"  {name}", size(count), "", "") for name, count in held.persistent.items() if count]
    name = "temporaries, without activations" if report.config.model.images else "temporaries"
    rows.append(both(name, temporaries, program.temporary_bytes))
    rows += [(f"  {name}, about", size(count), "", "") for name, count in held.transient.items() if count]
    rows.append(both("together", arguments + temporaries, program.peak_bytes))
    rows += _in_host(report)
    told = table(rows, right=True)
    told += ["", _bar(report)]
    return [*told, f"TOO LARGE   {report.too_large}"] if report.too_large else told


def _in_host(report: Report) -> list[tuple[str, str, str, str]]:
    """What waits in the host's memory; where that is the devices' own, it is among the rows above."""
    held, program = report.memory, report.program
    waiting = {
        "host's memory, between steps": (held.host, program.host_argument_bytes),
        "host's memory, in a step": (held.host_activations, program.host_temporary_bytes),
    }
    told = lambda a, b: (size(a), size(b), _off(a, b)) if report.gpu else (size(a), "", "")
    return [(name, *told(*both)) for name, both in waiting.items() if any(both)]


def _bar(report: Report) -> str:
    """A stacked bar of the compiled bytes, as long as the memory of the device where that is known."""
    program = report.program
    whole = max(report.gpu.memory if report.gpu else 0, program.peak_bytes)
    arguments = round(BAR * program.argument_bytes / whole)
    temporaries = round(BAR * program.peak_bytes / whole) - arguments
    bar = ("#" * arguments + "=" * temporaries).ljust(BAR, ".")
    there = f"of {size(report.gpu.memory)}" if report.gpu else "in all"
    return f"[{bar}] {size(program.peak_bytes)} {there}: # arguments, = temporaries"


def _kernels(report: Report) -> list[str]:
    """What the program computes, and what part of what it reads and writes is no arithmetic."""
    found = report.kernels
    if found is None:
        return []
    count = lambda products: ", ".join(f"{times:,} of {dtypes}" for dtypes, times in sorted(products.items()))
    share = lambda part: f"{100 * part / max(1, found.bytes):.1f} % of {size(found.bytes)} read and written"
    rows = [
        ("kernels of one step", ""),
        ("flash attention", f"{found.flash_forward:,} forward, {found.flash_backward:,} backward"),
        ("matrix products", count(found.products) or "none"),
        ("copies and transposes", share(found.copied)),
        ("in and out of stacks of layers", share(found.stacked)),
        ("largest array", f"{found.largest}, {size(found.largest_bytes)}"),
    ]
    return table(rows)


def _collectives(report: Report) -> list[str]:
    rows = [("axes", "collective", "calls", "predicted", "compiled", "sent", "for")]
    for row in report.rows:
        remark = f"known: {row.difference}" if (row.axes, row.kind) in report.known and row.difference else row.remark
        what = "; ".join([*row.what, *([remark] if remark else [])]) or "scalars"
        predicted = size(row.predicted_bytes) if row.foretold else "-"
        sizes = predicted, size(row.payload_bytes), size(row.wire_bytes)
        rows.append(("+".join(row.axes), row.kind, f"{row.calls:,}", *sizes, what))
    if not rows[1:]:
        return ["nothing crosses the mesh: there is one device"]
    return ["collectives of one step, bytes of one device", *table(rows, right=True)]


def _beside(report: Report) -> list[str]:
    """Totals by axis, the ratio of the ZeRO paper, and what runs beside compute."""
    told = []
    for axes, sent in report.wire_bytes_per_axis.items():
        time = ""
        if report.gpu:
            rate = bandwidth(report.gpu, report.mesh.shape, axes.split("+"))
            time = f", {1e3 * sent / rate:,.1f} ms at {rate / 1e9:g} GB/s"
        told.append(f"sent over {axes}: {size(sent)} per device and step{time}")
    if held := report.memory.host_traffic:
        time = f", {1e3 * report.host_seconds:,.1f} ms at {report.gpu.host / 1e9:g} GB/s" if report.gpu else ""
        told.append(f"sent each way between device and host: {size(held)} per device and step{time}")
    if report.ratio_to_data_parallel is not None:
        told.append(
            f"elements over the batch axes: {report.ratio_to_data_parallel:.3f} x those of plain data parallelism"
        )
    told += [overlap.told(axes, one) for axes, one in report.sent.items()]
    return [*told, *_verdict(report)]


def _verdict(report: Report) -> list[str]:
    """Whether the program moves what is predicted; each difference with both numbers."""
    if report.unpredicted:
        return [report.unpredicted]
    if not report.differences:
        return ["every collective is as predicted, to the element; scalars are left out"]
    found = []
    for row in report.differences:
        if reason := report.known.get((row.axes, row.kind)):
            found.append(f"known difference: {row.both}; {reason}")
    for row in report.unknown:
        found.append(f"NOT PREDICTED: {row.both}")
    if report.unknown:
        found.append("the program does not move what is predicted, and no known difference explains it: exit code 1")
    return found


def _off(predicted: int, compiled: int) -> str:
    return "equal" if predicted == compiled else f"{100 * (predicted / compiled - 1):+.0f} %" if compiled else ""
