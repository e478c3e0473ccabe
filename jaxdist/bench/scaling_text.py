"""A scaling study for a person."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from jaxdist.planning.tables import table
from jaxdist.units import size

WIDTH = 120


def lines(told: Mapping[str, Any]) -> list[str]:
    """What `python -m jaxdist.bench scaling` prints of a result of `study`."""
    notes = [line for note in told["notes"] for line in _note(note)]
    return [line.rstrip() for line in [*_head(told), "", *_rows(told), "", *_fits(told["fits"]), *notes]]


def setting(told: Mapping[str, Any]) -> list[str]:
    """Model, batch, devices and versions: what a table or a picture needs beside it."""
    each = "on every number of devices" if told["mode"] == "strong" else "for each device"
    micro = f" in {told['accumulation']} micro-batches" if told["accumulation"] > 1 else ""
    length = f" x {told['sequence']} tokens" if told["sequence"] else ""
    most = max(one["devices"] for one in told["measurements"])
    hosts = "one CPU" if told["hosts"] == 1 else f"the CPUs of {told['hosts']} hosts"
    several = f" of {told['processes']} processes" * (told["processes"] > 1)
    virtual = f", virtual: {hosts} with {told['cores']} core(s)" * told["virtual_devices"]
    return [
        f"{told['config']} ({told['model']}, {told['parameters']:,} parameters, {told['precision']})",
        f"{told['batch']} rows{length} per step {each}{micro}",
        f"up to {most} x {told['device']}{several}{virtual}",
        ", ".join(f"{name} {number}" for name, number in told["versions"].items()),
    ]


def _head(told: Mapping[str, Any]) -> list[str]:
    model, batch, devices, versions = setting(told)
    turns = "in turn" if told["interleaved"] else "one measurement after the other"
    return [
        f"{told['mode'] + ' scaling':<15}{model}",
        f"{'batch':<15}{batch}",
        f"{'devices':<15}{devices}; {versions}",
        f"{'steps':<15}{told['repeats']} measured after {told['warmup']}, {turns}",
    ]


def _rows(told: Mapping[str, Any]) -> list[str]:
    tokens = ["tokens/s"] if told["unit"] == "token" else []
    epoch = ["s/epoch"] if told["rows_per_epoch"] else []
    several = ["processes"] if told["processes"] > 1 else []
    head = ["ZeRO", "devices", *several, "rows", "ms/step", "quartiles", "rows/s", *tokens, *epoch]
    rows = [(*head, "speed-up", "ideal", "efficiency", "sent/step", "share", "loss")]
    for one in told["measurements"]:
        low, high = one["step_seconds_quartiles"]
        share, loss = one["communication_share"], one["loss"]
        cells = [
            str(one["zero"]),
            str(one["devices"]),
            *[str(one["processes"])] * len(several),
            str(one["global_batch_size"]),
            f"{1e3 * one['step_seconds']:.1f}",
        ]
        cells += [f"{1e3 * low:.1f}-{1e3 * high:.1f}", f"{one['rows_per_second']:,.1f}"]
        cells += [f"{one['tokens_per_second']:,.0f}"] if tokens else []
        cells += [f"{one['epoch_seconds']:,.1f}"] if epoch else []
        cells += [f"{one['speed_up']:.2f}", f"{one['ideal']:g}", f"{100 * one['efficiency']:.0f} %"]
        cells += ["unknown" if one["wire_bytes"] is None else size(one["wire_bytes"])]
        cells += ["unknown" if share is None else f"{100 * share:.1f} %"]
        rows.append((*cells, "not finite" if loss is None else f"{loss:.5f}"))
    return table(rows, right=True)


def _fits(fits: Sequence[Mapping[str, Any]]) -> list[str]:
    return [
        f"{fit['law'] + chr(39) + 's law':<14} ZeRO {fit['zero']}: serial fraction {fit['serial_fraction']:.3f}, "
        f"residual {fit['residual']:.3f} of {fit['residual_of']}"
        for fit in fits
    ]


def _note(note: str) -> list[str]:
    first, *more = textwrap.wrap(note, WIDTH - 15, break_on_hyphens=False)
    return [f"{'note':<15}{first}", *(f"{'':<15}{line}" for line in more)]
