"""Clusters: how many GPUs a host has, how fast they compute, and how fast they talk inside a host and across hosts.

The shipped ones are TOML files (`configs/clusters`), every number with its source beside it; `python -m jaxdist.bench
collectives --fit FILE` measures a real one and writes such a file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from jaxdist.config import RequestError, nearest
from jaxdist.files import read_toml

PRESETS = {path.stem: path for path in sorted((Path(__file__).parent.parent / "configs" / "clusters").glob("*.toml"))}
"""The clusters inside the package, by name."""


@dataclass(frozen=True)
class Link:
    """What one GPU sends over, to the next rank of a ring."""

    bandwidth: float
    """Bytes per second, one way: as measured where a measurement is cited, else that of the data sheet."""
    latency: float
    """Seconds of one hop."""
    pair: float = 0.0
    """Bytes per second from one GPU to one other, where each has links of its own to the others of its host; 0 where a
    switch lets it reach any of them with all its links."""

    def within(self, ranks: np.ndarray | float) -> np.ndarray:
        """Bytes per second that a rank sends in a group of so many of a host: fewer others, fewer links."""
        return np.minimum(self.bandwidth, np.maximum(ranks - 1, 1) * (self.pair or self.bandwidth))


@dataclass(frozen=True)
class Cluster:
    """Hosts of the same GPUs. Sizes in bytes, rates per second."""

    name: str
    gpu: str
    """Its name in `hardware.GPUS`, or any other."""
    per_host: int
    memory: float
    """Of one GPU, what a program can use: what a run lets JAX take."""
    peak: float
    """Dense bfloat16 FLOP/s of one GPU."""
    matmul: float
    """The share of the peak that the best matrix product reaches, 0 to 1."""
    bandwidth: float
    """Of a GPU's memory."""
    inside: Link
    """Between the GPUs of a host."""
    across: Link
    """Between hosts: one GPU's share of the network cards."""
    overlap: float
    """Computing and communicating at once takes max + (overlap - 1) x min of the two: 1 hides all, 2 nothing."""
    sources: tuple[str, ...]


def cluster(name_or_file: str) -> Cluster:
    """A shipped cluster, or that of a TOML file.

    Raises `RequestError` with the nearest name, or with everything that is wrong in the file, a sentence for each key.
    """
    path = PRESETS.get(name_or_file) or Path(name_or_file)
    if not os.path.isfile(path):
        hint = "is a folder" if os.path.isdir(path) else "is neither a cluster nor a file"
        raise RequestError(f"cluster '{name_or_file}' {hint}; {nearest(name_or_file, PRESETS)}")
    try:
        given = read_toml(path)
    except ValueError as error:  # not TOML, or not UTF-8
        raise RequestError(f"cluster {path} is not valid TOML: {error}") from error
    except OSError as error:
        raise RequestError(f"cluster {path} cannot be read: {error.strerror or error}") from error
    if problems := list(_problems(given)):
        raise RequestError(*(f"{path}: {problem}" for problem in problems))
    links = {side: Link(**{key: float(value) for key, value in given.pop(side).items()}) for side in SIDES}
    sources = tuple(given.pop("sources"))
    numbers = {key: value if key in ("gpu", "per_host") else float(value) for key, value in given.items()}
    return Cluster(name=path.stem, **numbers, **links, sources=sources)


def calibrated(one: Cluster) -> bool:
    """Whether times on it are worth comparing: the shipped cluster of CPUs is one machine, and no other is like it."""
    shipped = cluster("cpu")
    return (one.gpu, one.peak, one.inside) != (shipped.gpu, shipped.peak, shipped.inside)


def how_to_calibrate(devices: int) -> str:
    """What a plan for CPUs says that nobody measured, and the commands that do; `devices` are those of the plan."""
    count = min(8, max(2, devices))  # of one device there are no links to measure
    return (
        f"CPU times are not calibrated: measure this machine with python -m jaxdist.bench collectives --mesh "
        f"{count}x1x1 --fit here.toml, then python -m jaxdist.plan --cluster here.toml"
    )


SIDES = ("inside", "across")

BOUNDS = {
    "per_host": (1, 10**6),
    "memory": (1, 1e15),
    "peak": (1, 1e21),
    "matmul": (0.001, 1),
    "bandwidth": (1, 1e18),
    "pair": (1, 1e18),
    "latency": (0, 10),
    "overlap": (1, 2),
}
"""What a number may be; a wrong unit, such as GB for bytes, shows in none of them, and so each key's unit is told."""

UNITS = {
    "memory": "bytes",
    "peak": "FLOP/s",
    "matmul": "a share of the peak",
    "bandwidth": "bytes per second",
    "pair": "bytes per second",
    "latency": "seconds",
}


def _problems(given: Mapping[str, Any]) -> Iterator[str]:
    """A sentence for each key of a file that is missing, wrong or not known."""
    yield from _table(given, [field.name for field in fields(Cluster) if field.name != "name"])
    for side in SIDES:
        if isinstance(given.get(side), dict):
            free = ["pair"] if side == "inside" else []
            yield from _table(given[side], ["bandwidth", "latency"], f"{side}.", free)


def _table(given: Mapping[str, Any], keys: Sequence[str], prefix: str = "", free: Sequence[str] = ()) -> Iterator[str]:
    """`free` are those that need not be there."""
    for key in given:
        if key not in (*keys, *free):
            yield f"unknown key '{prefix}{key}'; {nearest(key, [*keys, *free])}"
    keys = [*keys, *(key for key in free if key in given)]
    for key in keys:
        if key not in given:
            yield f"{prefix}{key} is missing; set it{_in(key)}"
        elif wrong := _wrong(key, given[key]):
            yield f"{prefix}{key} is {json.dumps(given[key], default=str)}: {wrong}"


def _wrong(key: str, value: Any) -> str:
    """What is wrong with the value of a key; empty where nothing is."""
    if key in SIDES:
        return "" if isinstance(value, dict) else f"must be a table; write [{key}] with bandwidth and latency"
    if key == "gpu":
        return "" if isinstance(value, str) and value else "must be the name of a GPU, in quotes"
    if key == "sources":
        fine = isinstance(value, list) and all(isinstance(one, str) for one in value)
        return "" if fine else 'must be a list of texts, such as ["measured on our machine"]'
    if isinstance(value, bool) or not isinstance(value, int if key == "per_host" else int | float):
        return f"must be a {'whole ' * (key == 'per_host')}number{_in(key)}"
    least, most = BOUNDS[key]
    return "" if least <= value <= most else f"must be from {least:g} to {most:g}{_in(key)}"


def _in(key: str) -> str:
    return f", in {UNITS[key]}" if key in UNITS else ""


def to_toml(cluster: Cluster, comments: Sequence[str]) -> str:
    """`cluster` as TOML that `cluster` reads back to an equal one, but for its name; `comments` stand above."""
    values = asdict(cluster)
    links = {side: values.pop(side) for side in SIDES}
    lines = [f"# {line}".rstrip() for line in comments]
    lines += [f"{key} = {json.dumps(value)}" for key, value in values.items() if key != "name"]
    for side, link in links.items():
        lines += ["", f"[{side}]", *(f"{key} = {value!r}" for key, value in link.items() if key != "pair" or value)]
    return "\n".join(lines) + "\n"
