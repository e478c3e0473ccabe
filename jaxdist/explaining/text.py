"""Print a report for people: memory, collectives, and what theory predicts of both."""

from __future__ import annotations

from jaxdist.explaining.compared import Row
from jaxdist.explaining.report import OuterReport, Report
from jaxdist.mesh import REPLICA, describe
from jaxdist.output.tables import table
from jaxdist.output.units import counted, size
from jaxdist.planning import model_report
from jaxdist.programs import overlap
from jaxdist.sharding import SEQUENCE

BAR = 60
"""Characters of the bar of memory."""


def lines(report: Report) -> list[str]:
    """Return the lines that `python -m jaxdist.explain` prints: sections, with an empty line between two of them."""
    sections = [
        _head(report),
        _memory(report),
        _kernels(report),
        _collectives(report),
        [*_totals(report), *_verdict(report)],
    ]
    for outer in report.outer_steps:
        sections += [_outer_memory(outer), _collectives(outer, "outer step"), _outer_totals(outer)]
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
    mesh = report.whole.mesh
    split = report.whole.sharded.split
    found = [
        f"compiled    for {mesh.size} x {where}, by jax {program.jax}: traced in {program.lower_seconds:.1f} s, "
        f"compiled in {program.compile_seconds:.1f} s",
        f"mesh        {describe(mesh.shape)}; precision {config.precision}; ZeRO {config.parallel.zero}; "
        f"{counted(split.micro_batches, 'micro-batch')}; remat {config.model.remat}",
    ]
    for outer in report.outer_steps:
        found.append(
            f"local steps {outer.local_steps} by each of {counted(mesh.size // report.mesh.size, REPLICA)}, "
            f"on {counted(report.mesh.size, 'device')}, then an outer step averages; the loss is not that of one device"
        )
    rows = [
        *model_report.of_axes(report.sharded),
        *model_report.of_step(report.sharded.split, report.sharded.model, report.transfers),
    ]
    found += [f"{name:<11} {text}" for name, text in rows]
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
    beside = sum(report.beside.values())
    rows += [(f"beside it, {part}", size(count), "", "") for part, count in report.beside.items()]
    rows.append(_compared("together", arguments + temporaries + beside, report.peak_bytes))
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
    whole = report.peak_bytes
    capacity = "in all"
    if report.gpu:
        whole = max(whole, report.gpu.memory)
        capacity = f"of {size(report.gpu.memory)}"
    arguments = round(BAR * program.argument_bytes / whole)
    temporaries = round(BAR * program.peak_bytes / whole) - arguments
    bar = "#" * arguments + "=" * temporaries
    parts = "# arguments, = temporaries"
    if report.beside:
        bar += "+" * (round(BAR * report.peak_bytes / whole) - len(bar))
        parts += ", + beside them"
    return f"[{bar.ljust(BAR, '.')}] {size(report.peak_bytes)} {capacity}: {parts}"


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


def _collectives(report: Report, step: str = "step") -> list[str]:
    """Return the table of collectives, predicted beside compiled."""
    if not report.rows:
        return [f"no collectives: there is one device{' in each replica' if len(report.programs) > 1 else ''}"]
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
        repeated = report.repeated.get((row.axes, row.kind))
        if repeated:
            once = f"{size(repeated)} once"
            what = "further rounds of experts, which no total has"
            rows.append(("+".join(row.axes), row.kind, "0 or more", "-", once, "-", what))
    return [f"collectives of one {step}, bytes of one device", *table(rows, right=True)]


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
        found.append(f"sent over {axes}: {size(sent)} per device and step{_time(report, axes)}")
    traffic = report.memory.host_traffic
    if traffic:
        time = ""
        seconds = report.host_seconds
        if report.gpu and seconds is not None:
            time = f", {1e3 * seconds:,.1f} ms at {report.gpu.host / 1e9:g} GB/s"
        found.append(f"sent each way between device and host: {size(traffic)} per device and step{time}")
    if report.ratio_to_data_parallel is not None:
        axes = " and ".join(["the batch axes", *report.sharded.layout.split(SEQUENCE)])
        found.append(f"elements over {axes}: {report.ratio_to_data_parallel:.3f} x those of plain data parallelism")
    found += [overlap.line(axes, sent) for axes, sent in report.sent.items()]
    return found


def _time(report: Report, axes: str, steps: int = 1) -> str:
    """Return how long collectives over these axes take, divided among `steps`; empty where no links are known."""
    took = report.seconds_per_axis.get(axes)
    if took is None or report.cluster is None:
        return ""
    return f", {1e3 * took / steps:,.1f} ms by {report.cluster.name}"


def _outer_memory(report: OuterReport) -> list[str]:
    """Return what the program of the outer step holds, predicted beside compiled."""
    program = report.program
    arguments = sum(report.arguments.values())
    rows = [("memory per device", "predicted", "compiled", "")]
    if not report.gpu:
        arguments += report.host_arguments
    rows.append(_compared("arguments", arguments, program.argument_bytes))
    rows += [(f"  {part}", size(count), "", "") for part, count in report.arguments.items() if count]
    if report.host_arguments and report.gpu:
        rows.append(_compared("host memory", report.host_arguments, program.host_argument_bytes))
    elif report.host_arguments:
        rows.append(("  host memory", size(report.host_arguments), "", ""))
    rows.append(("temporaries", "", size(program.temporary_bytes), ""))
    rows.append(("together, with the optimizer", "", size(report.peak_bytes), ""))
    return [
        f"outer step, once in {report.local_steps} steps: traced in {program.lower_seconds:.1f} s, compiled in "
        f"{program.compile_seconds:.1f} s",
        *table(rows, right=True),
    ]


def _outer_totals(outer: OuterReport) -> list[str]:
    """Return bytes and time of the outer step by axis, once and divided among local steps, and the verdict."""
    found = []
    for axes, sent in outer.wire_bytes_per_axis.items():
        each = outer.wire_bytes_per_axis_and_step[axes]
        found.append(
            f"sent over {axes}: {size(sent)} per device once in {outer.local_steps} steps{_time(outer, axes)}; "
            f"per step {size(each)}{_time(outer, axes, outer.local_steps)}"
        )
    return [*found, *_verdict(outer)]


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
