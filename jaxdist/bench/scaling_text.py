"""Write a scaling study as text."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from jaxdist.output.tables import table
from jaxdist.output.units import counted, size

WIDTH = 120


def lines(result: Mapping[str, Any]) -> list[str]:
    """Return the lines that `python -m jaxdist.bench scaling` prints for a result of `study`."""
    text = [*_head(result), "", *_rows(result), "", *_fits(result["fits"])]
    for note in result["notes"]:
        text += _note(note)
    return [line.rstrip() for line in text]


def setting(result: Mapping[str, Any]) -> list[str]:
    """Return model, batch, devices and versions, which a table or a picture needs beside it."""
    each = "on every number of devices" if result["mode"] == "strong" else "for each device"
    micro_batches = ""
    if result["accumulation"] > 1:
        micro_batches = f" in {result['accumulation']} micro-batches"
    length = ""
    if result["sequence"]:
        length = f" x {result['sequence']} tokens"
    processes = ""
    if result["processes"] > 1:
        processes = f" of {result['processes']} processes"
    virtual = ""
    if result["virtual_devices"]:
        hosts = "one CPU" if result["hosts"] == 1 else f"the CPUs of {result['hosts']} hosts"
        virtual = f", virtual: {hosts} with {counted(result['cores'], 'core')}"
    most = max(one["devices"] for one in result["measurements"])
    return [
        f"{result['config']} ({result['model']}, {result['parameters']:,} parameters, {result['precision']})",
        f"{result['batch']} rows{length} per step {each}{micro_batches}",
        f"up to {most} x {result['device']}{processes}{virtual}",
        ", ".join(f"{name} {number}" for name, number in result["versions"].items()),
    ]


def _head(result: Mapping[str, Any]) -> list[str]:
    model, batch, devices, versions = setting(result)
    turns = "in turn" if result["interleaved"] else "one measurement after the other"
    return [
        f"{result['mode'] + ' scaling':<15}{model}",
        f"{'batch':<15}{batch}",
        f"{'devices':<15}{devices}; {versions}",
        f"{'steps':<15}{result['repeats']} measured after {result['warmup']}, {turns}",
    ]


def _rows(result: Mapping[str, Any]) -> list[str]:
    """Return the table of measurements; columns that say nothing about this study are left out."""
    columns = [_columns(one, result) for one in result["measurements"]]
    heading = tuple(columns[0])
    return table([heading, *(tuple(cells.values()) for cells in columns)], right=True)


def _columns(one: Mapping[str, Any], result: Mapping[str, Any]) -> dict[str, str]:
    """Return the cells of one measurement by the heading of their column."""
    low, high = one["step_seconds_quartiles"]
    cells = {"ZeRO": str(one["zero"]), "devices": str(one["devices"])}
    if result["processes"] > 1:
        cells["processes"] = str(one["processes"])
    cells["rows"] = str(one["global_batch_size"])
    cells["ms/step"] = f"{1e3 * one['step_seconds']:.1f}"
    cells["quartiles"] = f"{1e3 * low:.1f}-{1e3 * high:.1f}"
    cells["rows/s"] = f"{one['rows_per_second']:,.1f}"
    if result["unit"] == "token":
        cells["tokens/s"] = f"{one['tokens_per_second']:,.0f}"
    if result["rows_per_epoch"]:
        cells["s/epoch"] = f"{one['epoch_seconds']:,.1f}"
    cells["speed-up"] = f"{one['speed_up']:.2f}"
    cells["ideal"] = f"{one['ideal']:g}"
    cells["efficiency"] = f"{100 * one['efficiency']:.0f} %"
    sent = one["wire_bytes"]
    share = one["communication_share"]
    cells["sent/step"] = "unknown" if sent is None else size(sent)
    cells["share"] = "unknown" if share is None else f"{100 * share:.1f} %"
    cells["loss"] = "not finite" if one["loss"] is None else f"{one['loss']:.5f}"
    return cells


def _fits(fits: Sequence[Mapping[str, Any]]) -> list[str]:
    text = []
    for fit in fits:
        law = f"{fit['law']}'s law"
        text.append(
            f"{law:<14} ZeRO {fit['zero']}: serial fraction {fit['serial_fraction']:.3f}, "
            f"residual {fit['residual']:.3f} of {fit['residual_of']}"
        )
    return text


def _note(note: str) -> list[str]:
    first, *more = textwrap.wrap(note, WIDTH - 15, break_on_hyphens=False)
    return [f"{'note':<15}{first}", *(f"{'':<15}{line}" for line in more)]
