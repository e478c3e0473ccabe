"""Write the result of `bench gpu` as tables, for people and in Markdown."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from jaxdist.bench.gpu_order import DEVICE, MODEL, RUN, TORCH, VARIANT
from jaxdist.bench.gpu_parts import PARTS_OF_A_STEP, gap
from jaxdist.bench.gpu_process import SENSORS
from jaxdist.config import ModelConfig
from jaxdist.output.tables import table
from jaxdist.output.units import size
from jaxdist.planning.timing import mfu

WIDTH = 120

Found = Mapping[str, Any]


class Values:
    """What the parts have found, by their kinds."""

    def __init__(self, found: Found):
        of_kind: dict[str, list[Any]] = {MODEL: [], VARIANT: [], TORCH: [], DEVICE: [], RUN: []}
        for part in found["parts"]:
            if part["value"]:
                of_kind[part["kind"]].append({"name": part["name"]} | part["value"])
        self.models = of_kind[MODEL]
        self.variants = of_kind[VARIANT]
        self.runs = of_kind[RUN]
        self.torch = of_kind[TORCH]
        self.device = next(iter(of_kind[DEVICE]), None)


def lines(found: Found) -> list[str]:
    """Return all tables, then notes and problems, with a blank line between them."""
    values = Values(found)
    parts = [_where(found, values), _models(values), _variants(values), _runs(values), _device(values)]
    parts += [_step(values), _longest(values)]
    problems = [f"{part['name']}: {part['problem']}" for part in found["parts"] if part["problem"]]
    for what, texts in (("notes", found["notes"]), ("problems", problems)):
        if texts:
            wrapped = [textwrap.wrap(text, WIDTH - 2, subsequent_indent="  ") for text in texts]
            parts.append([what, *(line for text in wrapped for line in text)])
    text = []
    for part in parts:
        if part:
            text += [*part, ""]
    return text[:-1]


def markdown(found: Found) -> list[str]:
    """Return a Markdown table of all parts, with the state of the GPU beside each figure, and all tables below it."""
    titles = ("part", "state", "seconds", "figure", "SM MHz", "memory MHz", "W", "°C")
    rows = [titles, ("---",) * len(titles)]
    for part in found["parts"]:
        sensors = part["sensors"] or {}
        measured = [f"{sensors[name]:g}" if name in sensors else "" for name in SENSORS.values()]
        figure = _figure(part) if part["value"] else part["problem"]
        rows.append((part["name"], part["state"], f"{part['seconds']:.0f}", figure, *measured))
    text = ["| " + " | ".join(cell.replace("|", "/").replace("\n", " ") for cell in row) + " |" for row in rows]
    return ["# bench gpu", "", *text, "", "```", *lines(found), "```"]


def _figure(part: Found) -> str:
    """Return what a part has found, in a few words."""
    value = part["value"]
    if part["kind"] == RUN:
        return value["told"]
    if part["kind"] == DEVICE:
        fastest = max((one["flops_per_second"] for one in value["matmuls"]), default=0.0)
        copied = value["copy_bytes_per_second"] or 0.0
        wrong = sum(not one["fine"] for one in value["numerics"])
        compared = len(value["numerics"])
        return f"{fastest / 1e12:.4g} TFLOP/s, {copied / 1e9:.4g} GB/s, {wrong} of {compared} results wrong"
    milliseconds, tokens, share = _speed({"mfu": None} | value)
    return f"{milliseconds}, {tokens} tokens/s, MFU {share}"


def _where(found: Found, values: Values) -> list[str]:
    """Return what ran, when, and with which hardware, versions and environment."""
    device = values.device
    versions = [f"python {found['python']}"]
    device_text = "not asked"
    if device:
        versions += [f"{name} {device[name]}" for name in ("jax", "jaxlib", "flax", "optax", "numpy")]
        device_text = f"{device['device']}, {size(device['capacity_bytes'])} for XLA"
    if values.torch:
        versions.append(f"torch {values.torch[0]['torch']}")
    driver = "no nvidia-smi here"
    if found["driver"]:
        driver = ", ".join(f"{name} {value}" for name, value in found["driver"].items())
    environment = ", ".join(f"{name}={value}" for name, value in found["environment"].items())
    rows = [
        *(("command", command) for command in found["commands"]),
        ("date", f"{found['date']}; {found['seconds']:.0f} s"),
        ("device", device_text),
        ("driver", driver),
        ("versions", ", ".join(versions)),
        ("environment", environment or "no XLA_ and no JAX_ variable"),
    ]
    return [f"{name:<12} {text}" for name, text in rows]


def _device(values: Values) -> list[str]:
    """Return the errors of the fast kernels, and the rates of matmuls, of memory and of attention."""
    device = values.device
    if not device:
        return []
    rows = [(f"{device['dtype']} against plain float32", "off by", "allowed", "")]
    for one in device["numerics"]:
        verdict = "" if one["fine"] else "WRONG"
        rows.append((one["what"], off(one["error"]), f"{one['bound']:.1e}", verdict))
    text = [*table(rows), ""] if device["numerics"] else []
    for one in device["matmuls"]:
        shape = "x".join(map(str, one["shape"]))
        text.append(f"matrix product {shape}: {one['flops_per_second'] / 1e12:.4g} TFLOP/s")
    if device["copy_bytes_per_second"]:
        text.append(f"memory: {device['copy_bytes_per_second'] / 1e9:.4g} GB/s read and written")
    for one in device["attention"]:
        passes = ("forward", "forward and backward")
        rates = ", ".join(f"{one[f'{name} flops_per_second'] / 1e12:.4g} TFLOP/s {name}" for name in passes)
        text.append(f"attention, heads of {one['size']}: {rates}")
    return text


def _runs(values: Values) -> list[str]:
    """Return a line for each part that ran a command, and the tables of the profiles."""
    text = []
    for one in values.runs:
        text += textwrap.wrap(f"{one['name']}: {one['told']}", WIDTH, subsequent_indent="  ")
        text += one.get("lines", [])
    return text


def _percent(share: float | None) -> str:
    return "unknown" if share is None else f"{share:.1%}"


def _bytes(count: float | None) -> str:
    return "unknown" if count is None else size(count)


def _models(values: Values) -> list[str]:
    """Return a line for each model, and those for the first in PyTorch."""
    if not values.models:
        return []
    rows = [("model", "rows", "step", "tokens/s", "MFU", "peak memory", "predicted", "matmul", "attention", "other")]
    remarks = []
    for one in values.models:
        memory = (_bytes(one["memory_bytes"]), _bytes(one["predicted_bytes"]))
        rows.append((one["name"], str(one["rows"]), *_speed(one), *memory, *_busy_shares(one)))
        options = " ".join(f"--{name} {value}" for name, value in one["options"].items())
        remarks.append(f"{one['name']}: {one['config']} {options}; {one['attention']}")
    base = values.models[0]
    for place, torch in enumerate(values.torch, start=2):
        share = mfu(torch["tokens_per_second"], base["flops_per_token"], 1, base["peak_flops"])
        speed = _speed({**torch, "mfu": share})
        # Below the first model, which it is compared with.
        rows.insert(place, (f"  {torch['name']}", str(torch["rows"]), *speed, _bytes(torch["memory_bytes"])))
        ratio = base["tokens_per_second"] / torch["tokens_per_second"]
        losses = f"losses of the last step {base['loss']:.4f} here, {torch['loss']:.4f} there"
        remarks.append(f"{base['name']}: {ratio:.3f} times the tokens per second of {torch['name']}; {losses}")
    peak = "unknown, and so MFU"
    if base["peak_flops"]:
        peak = f"{base['peak_flops'] / 1e12:.0f} TFLOP/s"
    return [*_even(rows), "", *remarks, f"FLOPs per token: {base['flops_formula']}; peak {peak}"]


def _busy_shares(one: Found) -> list[str]:
    """Return the shares of matmuls, attention and other kernels in the busy time; blank without a trace."""
    kernels = one.get("kernels")
    if not kernels:
        return ["", "", ""]
    busy = sum(kernels["seconds"].values())
    return [_percent(seconds / busy) for seconds in kernels["seconds"].values()]


def _speed(one: Found) -> tuple[str, str, str]:
    return f"{one['step_seconds'] * 1e3:.2f} ms", f"{one['tokens_per_second']:,.0f}", _percent(one["mfu"])


def _even(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a table of rows that are filled up to the longest."""
    width = max(map(len, rows))
    return table([(*row, *[""] * (width - len(row))) for row in rows])


def _variants(values: Values) -> list[str]:
    """Return a line for the first model, where it was measured, and one for each change to it."""
    if not values.variants:
        return []
    base = next(iter(values.models), None)
    shown = values.variants
    if base:
        shown = [{**base, "name": f"{base['layers']}, remat {base['remat']}"}, *shown]
    rows = [("changed", "rows", "step", "tokens/s", "MFU", "of the first", "compiled in", "temporaries")]
    for one in shown:
        share = ""
        if base:
            share = f"{one['tokens_per_second'] / base['tokens_per_second']:.3f}"
        compiled_in = f"{one['compile_seconds']:.1f} s"
        rows.append((one["name"], str(one["rows"]), *_speed(one), share, compiled_in, _bytes(one["temporary_bytes"])))
    return table(rows)


def _step(values: Values) -> list[str]:
    """Return the parts of the steps in milliseconds, beside the time of a good step."""
    traced = [one for one in values.models if one.get("kernels")]
    if not values.device or not values.device["matmuls"] or not traced:
        return []
    rate = max(one["flops_per_second"] for one in values.device["matmuls"])
    columns = []
    for one in traced:
        model = ModelConfig(**one["sizes"])
        kernels = one["kernels"]["seconds"]
        columns.append(gap(model, one["tokens_per_step"], one["step_seconds"], kernels, rate, one["peak_flops"]))
    rows = [("milliseconds of a step", *(one["name"] for one in traced))]
    for name in PARTS_OF_A_STEP:
        rows.append((name, *(_milliseconds(column[name]) for column in columns)))
    return table(rows)


def _milliseconds(seconds: float | None) -> str:
    return "unknown" if seconds is None else f"{seconds * 1e3:.2f}"


def _longest(values: Values) -> list[str]:
    """Return the ten longest kernels of the first model, to check that they are counted where they belong."""
    base = next((one for one in values.models if one.get("kernels")), None)
    if base is None:
        return []
    rows = [(f"longest kernels of {base['name']}", "calls a step", "a step", "counted as")]
    for one in base["kernels"]["longest"]:
        name = one["name"]
        if len(name) > 70:
            name = name[:67] + "..."
        rows.append((name, f"{one['calls']:g}", f"{one['seconds'] * 1e3:.3f} ms", one["part"]))
    return table(rows)


def off(error: float | None) -> str:
    """Return the error of a result as text; None is an error that is not finite."""
    return "not a number" if error is None else f"{error:.1e}"
