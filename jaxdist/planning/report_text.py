"""Print a report for people: memory, collectives, and what theory predicts of both."""

from __future__ import annotations

from jaxdist import models
from jaxdist.mesh import describe, micro_batches
from jaxdist.planning import overlap, pipelines
from jaxdist.planning.collective_time import group_over
from jaxdist.planning.report import Report, Row
from jaxdist.planning.tables import table
from jaxdist.units import size

BAR = 60
"""Characters of the bar of memory."""


def lines(report: Report) -> list[str]:
    """Return the lines that `python -m jaxdist.explain` prints: sections, with an empty line between two of them."""
    sections = (
        _head(report),
        _memory(report),
        _kernels(report),
        _collectives(report),
        [*_totals(report), *_verdict(report)],
    )
    found: list[str] = []
    for section in sections:
        if found and section:
            found.append("")
        found += [line.rstrip() for line in section]
    return found


def _head(report: Report) -> list[str]:
    """Return what was compiled: devices, mesh, model, and notes."""
    config = report.config
    program = report.program
    where = f"{report.gpu.kind}, not here" if report.gpu else "CPU"
    k = micro_batches(config, report.mesh.shape)
    found = [
        f"compiled    for {report.mesh.size} x {where}, by jax {program.jax}: traced in {program.lower_seconds:.1f} s, "
        f"compiled in {program.compile_seconds:.1f} s",
        f"mesh        {describe(report.mesh.shape)}; precision {config.precision}; ZeRO {config.parallel.zero}; "
        f"{k} micro-batch(es); remat {config.model.remat}",
    ]
    if report.pipeline:
        found.append(f"pipeline    {pipelines.describe(report.pipeline)}")
    found.append(f"model       {models.parameters(report.model):,} parameters")
    found += [f"warning     {sentence}" for sentence in report.warnings]
    found += [f"note        {note}" for note in report.notes]
    return found


def _memory(report: Report) -> list[str]:
    """Return predicted beside compiled memory, and a bar of what the device would hold."""
    held = report.memory
    program = report.program
    arguments = held.arguments
    temporaries = held.total - held.arguments
    if not report.gpu:
        # CPU devices share one memory with their host, and the program reports only the sum.
        arguments += held.host
        temporaries += held.host_activations
    name = "temporaries, without activations" if report.config.model.images else "temporaries"
    rows = [("memory per device", "predicted", "compiled", "")]
    rows.append(_compared("arguments", arguments, program.argument_bytes))
    rows += [(f"  {part}", size(count), "", "") for part, count in held.persistent.items() if count]
    rows.append(_compared(name, temporaries, program.temporary_bytes))
    rows += [(f"  {part}, about", size(count), "", "") for part, count in held.transient.items() if count]
    rows.append(_compared("together", arguments + temporaries, program.peak_bytes))
    rows += _host_memory(report)
    found = [*table(rows, right=True), "", _bar(report)]
    if report.too_large:
        found.append(f"TOO LARGE   {report.too_large}")
    return found


def _compared(name: str, predicted: int, compiled: int) -> tuple[str, str, str, str]:
    """Return a row of the table: both sizes, and by how much the prediction is off."""
    if predicted == compiled:
        off = "equal"
    elif compiled:
        off = f"{100 * (predicted / compiled - 1):+.0f} %"
    else:
        off = ""
    return name, size(predicted), size(compiled), off


def _host_memory(report: Report) -> list[tuple[str, str, str, str]]:
    """Return the rows of what waits in host memory."""
    held = report.memory
    program = report.program
    waiting = {
        "host memory, between steps": (held.host, program.host_argument_bytes),
        "host memory, in a step": (held.host_activations, program.host_temporary_bytes),
    }
    rows = []
    for name, (predicted, compiled) in waiting.items():
        if not predicted and not compiled:
            continue
        if report.gpu:
            rows.append(_compared(name, predicted, compiled))
        else:
            # For CPU devices it is in the rows above.
            rows.append((name, size(predicted), "", ""))
    return rows


def _bar(report: Report) -> str:
    """Return a stacked bar of the compiled bytes, as long as the memory of the device where that is known."""
    program = report.program
    whole = program.peak_bytes
    capacity = "in all"
    if report.gpu:
        whole = max(whole, report.gpu.memory)
        capacity = f"of {size(report.gpu.memory)}"
    arguments = round(BAR * program.argument_bytes / whole)
    temporaries = round(BAR * program.peak_bytes / whole) - arguments
    bar = ("#" * arguments + "=" * temporaries).ljust(BAR, ".")
    return f"[{bar}] {size(program.peak_bytes)} {capacity}: # arguments, = temporaries"


def _kernels(report: Report) -> list[str]:
    """Return what the program computes, and what part of its memory traffic is no arithmetic."""
    found = report.kernels
    if found is None:
        return []
    products = ", ".join(f"{times:,} of {dtypes}" for dtypes, times in sorted(found.products.items()))
    total = max(1, found.bytes)
    traffic = f"{size(found.bytes)} read and written"
    rows = [
        ("kernels of one step", ""),
        ("flash attention", f"{found.flash_forward:,} forward, {found.flash_backward:,} backward"),
        ("matmuls", products or "none"),
        ("copies and transposes", f"{100 * found.copied / total:.1f} % of {traffic}"),
        ("in and out of stacks of layers", f"{100 * found.stacked / total:.1f} % of {traffic}"),
        ("largest array", f"{found.largest}, {size(found.largest_bytes)}"),
    ]
    return table(rows)


def _collectives(report: Report) -> list[str]:
    """Return the table of collectives, predicted beside compiled."""
    if not report.rows:
        return ["no collectives: there is one device"]
    rows = [("axes", "collective", "calls", "predicted", "compiled", "sent", "for")]
    for row in report.rows:
        rows.append(
            (
                "+".join(row.axes),
                row.kind,
                f"{row.calls:,}",
                size(row.predicted_bytes) if row.has_prediction else "-",
                size(row.payload_bytes),
                size(row.wire_bytes),
                _purpose(report, row),
            )
        )
    return ["collectives of one step, bytes of one device", *table(rows, right=True)]


def _purpose(report: Report, row: Row) -> str:
    """Return what the collectives of a row are for, and how they differ from the prediction."""
    remark = row.remark
    if (row.axes, row.kind) in report.known and row.difference:
        remark = f"known: {row.difference}"
    words = [*row.what]
    if remark:
        words.append(remark)
    return "; ".join(words) or "scalars"


def _totals(report: Report) -> list[str]:
    """Return bytes and time by axis, the ratio of the ZeRO paper, and what overlaps compute."""
    found = []
    for axes, sent in report.wire_bytes_per_axis.items():
        time = ""
        if report.cluster:
            rate = float(group_over(report.mesh.shape, axes.split("+"), report.cluster).rate)
            time = f", {1e3 * sent / rate:,.1f} ms at {rate / 1e9:g} GB/s"
        found.append(f"sent over {axes}: {size(sent)} per device and step{time}")
    traffic = report.memory.host_traffic
    if traffic:
        time = ""
        seconds = report.host_seconds
        if report.gpu and seconds is not None:
            time = f", {1e3 * seconds:,.1f} ms at {report.gpu.host / 1e9:g} GB/s"
        found.append(f"sent each way between device and host: {size(traffic)} per device and step{time}")
    if report.ratio_to_data_parallel is not None:
        found.append(
            f"elements over the batch axes: {report.ratio_to_data_parallel:.3f} x those of plain data parallelism"
        )
    found += [overlap.line(axes, sent) for axes, sent in report.sent.items()]
    return found


def _verdict(report: Report) -> list[str]:
    """Return whether the program agrees with the prediction, and each difference with both numbers."""
    if report.unpredicted:
        return [report.unpredicted]
    if not report.rows:
        return []
    if not report.differences:
        return ["every collective is as predicted, to the element; scalars are left out"]
    found = []
    for row in report.differences:
        reason = report.known.get((row.axes, row.kind))
        if reason:
            found.append(f"known difference: {row.both}; {reason}")
    for row in report.unknown:
        found.append(f"NOT PREDICTED: {row.both}")
    if report.unknown:
        found.append("the program differs from the prediction, and no known difference explains it: exit code 1")
    return found
