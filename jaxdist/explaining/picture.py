"""Draw the memory of a report as stacked bars."""

from __future__ import annotations

from pathlib import Path

from jaxdist.explaining.report import Report
from jaxdist.mesh import describe
from jaxdist.output.pictures import GREY, MEMORY, blank, write_picture

GIB = 2**30


def draw(report: Report, path: Path) -> None:
    """Draw predicted memory, part by part, beside compiled memory; a line marks the memory of the device."""
    held = report.memory
    program = report.program
    columns = {
        "predicted": {**held.persistent, **report.beside, **held.transient},
        "compiled": {
            "arguments": program.argument_bytes,
            **report.beside,
            "temporaries": program.peak_bytes - program.argument_bytes,
        },
    }
    figure = blank(6, 5)
    title = f"{describe(report.whole.mesh.shape)}, ZeRO {report.config.parallel.zero}, {report.config.precision}"
    axes = figure.add_subplot(ylabel="GiB per device", title=title)
    for column, parts in columns.items():
        bottom = 0.0
        for name, count in parts.items():
            if count:
                axes.bar(column, count / GIB, bottom=bottom, label=name, color=MEMORY[name])
                bottom += count / GIB
    if report.gpu:
        axes.axhline(report.gpu.memory / GIB, color=GREY, linestyle="--", label=f"memory of {report.gpu.kind}")
    figure.legend(loc="outside lower center", ncols=3, fontsize="small")
    write_picture(path, figure, dpi=120)
