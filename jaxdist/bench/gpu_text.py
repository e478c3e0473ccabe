"""What `bench gpu` has found, as tables for a person."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxdist.bench.gpu_parts import PARTS_OF_A_STEP, gap
from jaxdist.config import ModelConfig
from jaxdist.planning.tables import table
from jaxdist.planning.timing import mfu
from jaxdist.units import size

WIDTH = 120

Found = Mapping[str, Any]


def lines(found: Found) -> list[str]:
    """All of it, a blank line between its parts."""
    parts = [_where(found), _numerics(found), _models(found), _variants(found), _step(found), _longest(found)]
    for what in "notes", "problems":
        told = [line for text in found[what] for line in textwrap.wrap(text, WIDTH - 2, subsequent_indent="  ")]
        parts.append([what, *told] if told else [])
    return [line for part in parts if part for line in (*part, "")][:-1]


def _where(found: Found) -> list[str]:
    device, driver = found["device"], found["driver"]
    versions = [f"python {found['python']}"]
    if device:
        versions += [f"{name} {device[name]}" for name in ("jax", "jaxlib", "flax", "optax", "numpy")]
    if found["torch"]:
        versions.append(f"torch {found['torch']['torch']}")
    rows = [
        ("command", found["command"]),
        ("date", f"{found['date']}; {found['seconds']:.0f} s of {found['seconds_allowed']}"),
        ("device", f"{device['device']}, {size(device['capacity_bytes'])} for XLA" if device else "not asked"),
        ("driver", ", ".join(f"{name} {value}" for name, value in driver.items()) if driver else "no nvidia-smi here"),
        ("versions", ", ".join(versions)),
        (
            "environment",
            ", ".join(f"{n}={v}" for n, v in found["environment"].items()) or "no XLA_ and no JAX_ variable",
        ),
    ]
    return [f"{name:<12} {text}" for name, text in rows]


def _numerics(found: Found) -> list[str]:
    device = found["device"]
    if not device:
        return []
    rows = [(f"{device['dtype']} against plain float32", "off by", "allowed", "")]
    rows += [
        (one["what"], off(one["error"]), f"{one['bound']:.1e}", "" if one["fine"] else "WRONG")
        for one in device["numerics"]
    ]
    rates = [
        f"matrix product {'x'.join(map(str, one['shape']))}: {one['flops_per_second'] / 1e12:.4g} TFLOP/s"
        for one in device["matmuls"]
    ]
    return [*table(rows), "", *rates, f"memory: {device['copy_bytes_per_second'] / 1e9:.4g} GB/s read and written"]


def _percent(share: float | None) -> str:
    return "unknown" if share is None else f"{share:.1%}"


def _bytes(count: float | None) -> str:
    return "unknown" if count is None else size(count)


def _models(found: Found) -> list[str]:
    """A line for each model, and one for the first in PyTorch."""
    if not found["models"]:
        return []
    rows = [("model", "rows", "step", "tokens/s", "MFU", "peak memory", "predicted", "matmul", "attention", "other")]
    for one in found["models"]:
        kernels = one.get("kernels")
        busy = kernels and sum(kernels["seconds"].values())
        parts = [_percent(time / busy) for time in kernels["seconds"].values()] if kernels else ["", "", ""]
        memory = _bytes(one["memory_bytes"]), _bytes(one["predicted_bytes"])
        rows.append((one["name"], str(one["rows"]), *_speed(one), *memory, *parts))
    told = [f"{one['name']}: {one['config']} {_options(one)}; {one['attention']}" for one in found["models"]]
    base, torch = found["models"][0], found["torch"]
    if torch:
        share = mfu(torch["tokens_per_second"], base["flops_per_token"], 1, base["peak_flops"])
        name = "  in torch, compiled" if torch["compiled"] else "  in torch, eager"
        rows.insert(2, (name, str(torch["rows"]), *_speed({**torch, "mfu": share}), _bytes(torch["memory_bytes"])))
        ratio = base["tokens_per_second"] / torch["tokens_per_second"]
        losses = f"losses of the last step {base['loss']:.4f} here, {torch['loss']:.4f} there"
        told.append(f"{base['name']}: {ratio:.3f} times the tokens per second of torch; {losses}")
    return [*_even(rows), "", *told, f"FLOPs per token: {base['flops_formula']}; peak {_peak(base)}"]


def _peak(base: Found) -> str:
    return f"{base['peak_flops'] / 1e12:.0f} TFLOP/s" if base["peak_flops"] else "unknown, and so MFU"


def _options(one: Found) -> str:
    return " ".join(f"--{name} {value}" for name, value in one["options"].items())


def _speed(one: Found) -> tuple[str, str, str]:
    return f"{one['step_seconds'] * 1e3:.2f} ms", f"{one['tokens_per_second']:,.0f}", _percent(one["mfu"])


def _even(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows filled up to the longest."""
    width = max(map(len, rows))
    return table([(*row, *[""] * (width - len(row))) for row in rows])


def _variants(found: Found) -> list[str]:
    if not found["variants"]:
        return []
    base = found["models"][0]
    rows = [
        (f"{base['name']}, changed", "step", "tokens/s", "MFU", "of the first", "compiled in", "temporaries", "flags")
    ]
    for one in ({**base, "name": f"{base['layers']}, remat {base['remat']}", "flags": ""}, *found["variants"]):
        share = f"{one['tokens_per_second'] / base['tokens_per_second']:.3f}"
        took, held = f"{one['compile_seconds']:.1f} s", _bytes(one["temporary_bytes"])
        rows.append((one["name"], *_speed(one), share, took, held, one["flags"]))
    return table(rows)


def _step(found: Found) -> list[str]:
    """What the steps consist of, in milliseconds, beside the time of a good one."""
    device, told = found["device"], [one for one in found["models"] if one.get("kernels")]
    if not device or not told:
        return []
    rate = max(one["flops_per_second"] for one in device["matmuls"])
    columns = [
        gap(
            ModelConfig(**one["sizes"]), one["tokens_per_step"], one["step_seconds"], one["kernels"]["seconds"], rate,
            one["peak_flops"],
        )
        for one in told
    ]  # fmt: skip
    rows = [("milliseconds of a step", *(one["name"] for one in told))]
    rows += [
        (name, *("unknown" if column[name] is None else f"{column[name] * 1e3:.2f}" for column in columns))
        for name in PARTS_OF_A_STEP
    ]
    return table(rows)


def _longest(found: Found) -> Iterator[str] | list[str]:
    """The ten longest kernels of the first model, by which one sees whether they are counted where they belong."""
    base = next((one for one in found["models"] if one.get("kernels")), None)
    if base is None:
        return []
    rows = [(f"longest kernels of {base['name']}", "calls a step", "a step", "counted as")]
    for one in base["kernels"]["longest"]:
        name = one["name"] if len(one["name"]) <= 70 else one["name"][:67] + "..."
        rows.append((name, f"{one['calls']:g}", f"{one['seconds'] * 1e3:.3f} ms", one["part"]))
    return table(rows)


def off(error: float | None) -> str:
    """How far a result is from what it should be."""
    return "not a number" if error is None else f"{error:.1e}"
