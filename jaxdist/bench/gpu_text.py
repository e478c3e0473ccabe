"""Write the result of `bench gpu` as tables."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from jaxdist.bench.gpu_parts import PARTS_OF_A_STEP, gap
from jaxdist.config import ModelConfig
from jaxdist.output.tables import table
from jaxdist.output.units import size
from jaxdist.planning.timing import mfu

WIDTH = 120

Found = Mapping[str, Any]


def lines(found: Found) -> list[str]:
    """Return all tables, then notes and problems, with a blank line between them."""
    parts = [_where(found), _numerics(found), _models(found), _variants(found), _step(found), _longest(found)]
    for what in ("notes", "problems"):
        if found[what]:
            wrapped = [textwrap.wrap(text, WIDTH - 2, subsequent_indent="  ") for text in found[what]]
            parts.append([what, *(line for text in wrapped for line in text)])
    text = []
    for part in parts:
        if part:
            text += [*part, ""]
    return text[:-1]


def _where(found: Found) -> list[str]:
    """Return what ran, when, and with which hardware, versions and environment."""
    device = found["device"]
    versions = [f"python {found['python']}"]
    device_text = "not asked"
    if device:
        versions += [f"{name} {device[name]}" for name in ("jax", "jaxlib", "flax", "optax", "numpy")]
        device_text = f"{device['device']}, {size(device['capacity_bytes'])} for XLA"
    if found["torch"]:
        versions.append(f"torch {found['torch']['torch']}")
    driver = "no nvidia-smi here"
    if found["driver"]:
        driver = ", ".join(f"{name} {value}" for name, value in found["driver"].items())
    environment = ", ".join(f"{name}={value}" for name, value in found["environment"].items())
    rows = [
        ("command", found["command"]),
        ("date", f"{found['date']}; {found['seconds']:.0f} s of {found['seconds_allowed']}"),
        ("device", device_text),
        ("driver", driver),
        ("versions", ", ".join(versions)),
        ("environment", environment or "no XLA_ and no JAX_ variable"),
    ]
    return [f"{name:<12} {text}" for name, text in rows]


def _numerics(found: Found) -> list[str]:
    """Return the errors of the fast kernels, and the rates of matmuls and of memory."""
    device = found["device"]
    if not device:
        return []
    rows = [(f"{device['dtype']} against plain float32", "off by", "allowed", "")]
    for one in device["numerics"]:
        verdict = "" if one["fine"] else "WRONG"
        rows.append((one["what"], off(one["error"]), f"{one['bound']:.1e}", verdict))
    text = [*table(rows), ""]
    for one in device["matmuls"]:
        shape = "x".join(map(str, one["shape"]))
        text.append(f"matrix product {shape}: {one['flops_per_second'] / 1e12:.4g} TFLOP/s")
    text.append(f"memory: {device['copy_bytes_per_second'] / 1e9:.4g} GB/s read and written")
    return text


def _percent(share: float | None) -> str:
    return "unknown" if share is None else f"{share:.1%}"


def _bytes(count: float | None) -> str:
    return "unknown" if count is None else size(count)


def _models(found: Found) -> list[str]:
    """Return a line for each model, and one for the first in PyTorch."""
    if not found["models"]:
        return []
    rows = [("model", "rows", "step", "tokens/s", "MFU", "peak memory", "predicted", "matmul", "attention", "other")]
    remarks = []
    for one in found["models"]:
        memory = (_bytes(one["memory_bytes"]), _bytes(one["predicted_bytes"]))
        rows.append((one["name"], str(one["rows"]), *_speed(one), *memory, *_busy_shares(one)))
        options = " ".join(f"--{name} {value}" for name, value in one["options"].items())
        remarks.append(f"{one['name']}: {one['config']} {options}; {one['attention']}")
    base = found["models"][0]
    torch = found["torch"]
    if torch:
        share = mfu(torch["tokens_per_second"], base["flops_per_token"], 1, base["peak_flops"])
        name = "  in torch, compiled" if torch["compiled"] else "  in torch, eager"
        # Below the first model, which it is compared with.
        rows.insert(2, (name, str(torch["rows"]), *_speed({**torch, "mfu": share}), _bytes(torch["memory_bytes"])))
        ratio = base["tokens_per_second"] / torch["tokens_per_second"]
        losses = f"losses of the last step {base['loss']:.4f} here, {torch['loss']:.4f} there"
        remarks.append(f"{base['name']}: {ratio:.3f} times the tokens per second of torch; {losses}")
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


def _variants(found: Found) -> list[str]:
    """Return a line for the first model, and one for each change to it."""
    if not found["variants"]:
        return []
    base = found["models"][0]
    unchanged = {**base, "name": f"{base['layers']}, remat {base['remat']}", "flags": ""}
    rows = [
        (f"{base['name']}, changed", "step", "tokens/s", "MFU", "of the first", "compiled in", "temporaries", "flags")
    ]
    for one in (unchanged, *found["variants"]):
        share = f"{one['tokens_per_second'] / base['tokens_per_second']:.3f}"
        compiled_in = f"{one['compile_seconds']:.1f} s"
        rows.append((one["name"], *_speed(one), share, compiled_in, _bytes(one["temporary_bytes"]), one["flags"]))
    return table(rows)


def _step(found: Found) -> list[str]:
    """Return the parts of the steps in milliseconds, beside the time of a good step."""
    traced = [one for one in found["models"] if one.get("kernels")]
    if not found["device"] or not traced:
        return []
    rate = max(one["flops_per_second"] for one in found["device"]["matmuls"])
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


def _longest(found: Found) -> list[str]:
    """Return the ten longest kernels of the first model, to check that they are counted where they belong."""
    base = next((one for one in found["models"] if one.get("kernels")), None)
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
