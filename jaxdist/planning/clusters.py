"""Clusters: how many GPUs a host has, how fast they compute, and how fast they communicate in a host and across hosts.

A cluster may consist of several sites, between which the link is slower still.

The shipped ones are TOML files (`configs/clusters`) with a source beside every number. `python -m jaxdist.bench
collectives --fit FILE` measures a real cluster and writes such a file. A file may name another one as its `base` and
hold only what differs from it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property, reduce
from operator import getitem
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import Field, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from jaxdist.config import RequestError, listed, nearest
from jaxdist.files import read_toml
from jaxdist.output.units import multiples
from jaxdist.planning.hardware import GPUS, PRESETS
from jaxdist.planning.rates import Rates, published_rates
from jaxdist.process.gpu_memory import GPU_SHARE
from jaxdist.request.knobs import sentence, shown

UNLIMITED = 2**62
"""GPUs of the only site."""

Number = Annotated[int, Field(ge=1, le=10**6)]
Bandwidth = Annotated[float, Field(ge=1, le=1e18)]
Factor = Annotated[float, Field(gt=0, allow_inf_nan=False)]


@dataclass(frozen=True)
class Link:
    """The link over which one GPU sends to the next rank of a ring."""

    bandwidth: Bandwidth
    """Bytes per second, one way: measured where a measurement is cited, else from the data sheet."""
    latency: Annotated[float, Field(ge=0, le=10)]
    """Seconds of one hop."""
    pair: Bandwidth = 0.0
    """Bytes per second from one GPU to one other, where each has separate links to the others of its host; 0 where a
    switch lets it reach any of them over all its links."""

    def within(self, ranks: np.ndarray | float) -> np.ndarray:
        """Return the bytes per second that a rank sends in a group of this size in a host."""
        # Without a switch, a rank uses only its links to the others of the group.
        return np.minimum(self.bandwidth, np.maximum(ranks - 1, 1) * (self.pair or self.bandwidth))


@dataclass(frozen=True)
class Cluster:
    """Hosts with the same GPUs. Sizes in bytes, rates per second."""

    name: str
    gpu: Annotated[str, Field(min_length=1)]
    """Its name in `hardware.GPUS`, or any other."""
    per_host: Number
    memory: Annotated[float, Field(ge=1, le=1e15)]
    """The memory of one GPU that a program can use: as much as a run lets JAX take."""
    peak: Annotated[float, Field(ge=1, le=1e21)]
    """Dense bfloat16 FLOP/s of one GPU."""
    matmul: Annotated[float, Field(ge=0.001, le=1)]
    """The share of the peak that the best matmul reaches, 0 to 1."""
    bandwidth: Bandwidth
    """The bandwidth of a GPU's memory."""
    inside: Link
    """The link between the GPUs of a host."""
    across: Link
    """The link between hosts: one GPU's share of the network cards."""
    overlap: Annotated[float, Field(ge=1, le=2)]
    """Computing and communicating at once takes max + (overlap - 1) x min of the two: 1 hides all, 2 nothing."""
    sources: tuple[str, ...]
    hosts_per_site: Number = 0
    """The number of hosts of a site; 0 where all hosts are in one site."""
    between: Link | None = None
    """The link between sites: all that a site sends to other sites, in bytes per second; None for one site."""
    watts: Annotated[float, Field(ge=1, le=1e5)] = 0.0
    """The most that one GPU draws; 0 where it is not known."""
    efficiency: tuple[tuple[str, float], ...] = ()
    """Constants of `rates.Rates` that are those of this cluster, and their values: fitted to steps of its own."""

    @cached_property
    def rates(self) -> Rates:
        """The rates of steps on its devices: of its own steps, where it has any (`refit`)."""
        return replace(published_rates(self.gpu), **dict(self.efficiency))

    @property
    def per_site(self) -> int:
        """The number of GPUs of a site; larger than any plan where there is one site."""
        if self.between is None:
            return UNLIMITED
        return self.per_host * self.hosts_per_site

    def sites(self, devices: int) -> int:
        """Return how many sites a number of GPUs fills; the last one may be filled in part."""
        return -(-devices // self.per_site)

    def fills_hosts(self, count: int) -> bool:
        """Return whether a number of GPUs is a part of one host, or whole hosts."""
        return count <= self.per_host or count % self.per_host == 0


def of_gpu(name: str) -> Cluster | None:
    """Return the shipped cluster, of one site, of the GPU `name`, such as h100; None for the `hardware.CARDS`."""
    return next((found for found in one_site() if found.gpu == name), None)


def one_site() -> list[Cluster]:
    """Return the shipped clusters of one site."""
    return [found for found in map(cluster, PRESETS) if found.between is None]


def of_kind(device_kind: str) -> Cluster | None:
    """Return the shipped cluster of the GPU with exactly this device kind, or None.

    A similar name is not enough: a sister model may have other links or another memory.
    """
    return next((of_gpu(name) for name, gpu in GPUS.items() if gpu.kind == device_kind), None)


def cluster(name_or_file: str) -> Cluster:
    """Return a shipped cluster, or that of a TOML file.

    Raises `RequestError` with the nearest name, or with everything that is wrong in the file, a sentence for each key.
    """
    path = _path_of(name_or_file)
    if path is None:
        raise RequestError(_no_cluster("cluster", name_or_file, name_or_file))
    given = _with_base(path, ())
    given = {**_known_of_gpu(given.get("gpu")), **given}
    problems = [*_unknown(given), *_half_of_sites(given)]
    constants, wrong_constants = _read_as(dict[str, Factor], given.pop(EFFICIENCY, {}), EFFICIENCY)
    found, wrong = _read_as(Cluster, given | {"name": path.stem})
    problems += wrong + wrong_constants
    if problems:
        raise RequestError(*(f"{path}: {problem}" for problem in problems))
    return replace(found, efficiency=tuple(constants.items()))


def _path_of(name_or_file: str, folder: Path | None = None) -> Path | None:
    """Return the file of a shipped cluster, or of a path that may be relative to `folder`; None for neither."""
    if name_or_file in PRESETS:
        return PRESETS[name_or_file]
    path = Path(name_or_file)
    if folder is not None:
        path = folder / path
    return path if path.is_file() else None


def _no_cluster(what: str, name: str, at: str | Path) -> str:
    """Return the message for a name that no cluster has; `at` is where a file of this name was looked for."""
    hint = "is a folder" if os.path.isdir(at) else "is neither a cluster nor a file"
    return f"{what} '{name}' {hint}; {nearest(name, PRESETS)}"


def _with_base(path: Path, above: tuple[Path, ...]) -> dict[str, Any]:
    """Return the keys of a file, and of its base those that it does not set itself, table by table.

    `above` are the files of which this one is the base, directly or not. Raises `RequestError` for a file that cannot
    be read, a base that is not there, and one that has this file as its own base.
    """
    given = _read(path)
    name = given.pop(BASE, None)
    if name is None:
        return given
    if not isinstance(name, str):
        raise RequestError(f'{path}: {BASE} is {json.dumps(name, default=str)}: must be a name, such as "h100-ndr"')
    found = _path_of(name, path.parent)
    if found is None:
        raise RequestError(f"{path}: {_no_cluster(BASE, name, path.parent / name)}")
    chain = (*above, path)
    if any(found.samefile(one) for one in chain):
        circle = " -> ".join(one.name for one in (*chain, found))
        raise RequestError(
            f"{path}: {BASE} '{name}' leads back to itself ({circle}); name another {BASE} in one of them"
        )
    return _merged(_with_base(found, chain), given)


def _merged(base: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of both; those of `own` count, its sources come first, and tables are merged key by key.

    The numbers of the GPU of the base do not describe another GPU, so they are left out where `own` names one.
    """
    if own.get("gpu", base.get("gpu")) != base.get("gpu"):
        base = {key: value for key, value in base.items() if key not in OF_GPU}
    merged = {**base, **own}
    for key, value in own.items():
        of_base = base.get(key)
        if isinstance(value, dict) and isinstance(of_base, dict):
            merged[key] = {**of_base, **value}
        if key == "sources" and isinstance(value, list) and isinstance(of_base, list):
            merged[key] = list(dict.fromkeys([*value, *of_base]))
    return merged


def _read(path: Path) -> dict[str, Any]:
    """Return what a TOML file holds. Raises `RequestError` where it cannot be read."""
    try:
        return read_toml(path)
    except ValueError as error:  # not TOML, or not UTF-8
        raise RequestError(f"cluster {path} is not valid TOML: {error}") from error
    except OSError as error:
        raise RequestError(f"cluster {path} cannot be read: {error.strerror or error}") from error


def check_sites(where: Cluster, devices: int) -> None:
    """Raise `RequestError` for a number of devices that fills some sites and a part of another one."""
    each = where.per_site
    if where.sites(devices) > 1 and devices % each:
        near = " or ".join(map(str, multiples(each, devices)))
        raise RequestError(
            f"{devices} devices do not fill sites of {each}, as those of {where.name} are; ask for {near}"
        )


def calibrated(candidate: Cluster) -> bool:
    """Return whether predicted times on this cluster are meaningful.

    The shipped cluster of CPUs describes one machine, and other machines differ from it.
    """
    shipped = cluster("cpu")
    if candidate.efficiency:
        return True
    return (candidate.gpu, candidate.peak, candidate.inside) != (shipped.gpu, shipped.peak, shipped.inside)


def how_to_calibrate(devices: int) -> str:
    """Return the note of a plan for CPUs without measurements: the commands that measure them.

    `devices` is the number of devices of the plan.
    """
    # One device has no links to measure.
    count = min(8, max(2, devices))
    return (
        f"CPU times are not calibrated: measure this machine with python -m jaxdist.bench collectives --mesh "
        f"{count}x1x1 --fit here.toml, then python -m jaxdist.plan --cluster here.toml"
    )


def _known_of_gpu(name: Any) -> dict[str, float]:
    """Return what a file may leave out, because it is known of this GPU."""
    if not isinstance(name, str) or name not in GPUS:
        return {}
    gpu = GPUS[name]
    return {"memory": GPU_SHARE * gpu.memory, "peak": gpu.peak, "bandwidth": gpu.bandwidth, "watts": gpu.watts}


BASE = "base"
"""The key that names the cluster, or the file beside this one, from which a file takes what it does not say."""

EFFICIENCY = "efficiency"
"""The table of constants that are fitted to steps of a cluster's own (`refit`)."""

OF_GPU = ("memory", "peak", "bandwidth", "watts", EFFICIENCY)
"""The keys whose values are those of the GPU."""

BETWEEN = "between"
"""The link that only a cluster of several sites has."""

LINKS = ("inside", "across", BETWEEN)

PER_SITE = "hosts_per_site"
"""The other key that only a cluster of several sites has."""

KEYS = {
    "": tuple(field.name for field in fields(Cluster) if field.name != "name"),
    **dict.fromkeys(LINKS, ("bandwidth", "latency")),
    "inside": ("bandwidth", "latency", "pair"),
    EFFICIENCY: tuple(field.name for field in fields(Rates)),
}
"""The keys of a file, and of each of its tables."""

FORMS = {
    **dict.fromkeys(LINKS, "must be a table; write [{}] with bandwidth and latency"),
    EFFICIENCY: "must be a table; write [{}] with a line for each constant",
    "gpu": "must be the name of a GPU, in quotes",
    "sources": 'must be a list of texts, such as ["measured on our machine"]',
}
"""How what is no number is written."""

UNITS = {
    "memory": "bytes",
    "peak": "FLOP/s",
    "matmul": "a share of the peak",
    "bandwidth": "bytes per second",
    "pair": "bytes per second",
    "latency": "seconds",
    "watts": "watts",
}
"""A wrong unit, such as GB for bytes, may give a number that is possible: messages name the right one."""


def _unknown(given: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence for each key of a file that is not known."""
    for name, known in KEYS.items():
        held = given.get(name) if name else given
        unknown = [key for key in held if key not in known] if isinstance(held, dict) else []
        prefix = f"{name}." if name else ""
        sentences = (f"unknown key '{prefix}{key}'; {nearest(key, known)}" for key in unknown)
        yield from listed(sentences, len(unknown), "unknown keys")


def _half_of_sites(given: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence where a file has one of the two keys of several sites."""
    if BETWEEN in given and PER_SITE not in given:
        yield f"[{BETWEEN}] is given, but {PER_SITE} is missing; set it to the number of hosts of a site"
    if PER_SITE in given and BETWEEN not in given:
        yield (
            f"{PER_SITE} is given, but the link between sites is missing; write [{BETWEEN}] with bandwidth and latency"
        )


def _read_as(kind: Any, given: Any, *table: str) -> tuple[Any, list[str]]:
    """Return what a file says, or its `table`, as a value of `kind`; and a sentence for each key that is wrong."""
    try:
        # As JSON, where pydantic takes a list for a tuple, but neither text nor true for a number.
        return TypeAdapter(kind).validate_json(json.dumps(given, default=str), strict=True), []
    except ValidationError as invalid:
        return None, [_sentence(error, given, table) for error in invalid.errors()]


def _sentence(error: ErrorDetails, given: Any, table: Sequence[str]) -> str:
    """Return one of pydantic's errors in a sentence, with the unit of the number."""
    path = [part for part in error["loc"] if isinstance(part, str)]
    key = (*table, *path)[-1]
    name = ".".join((*table, *path))
    unit = f", in {UNITS[key]}" if key in UNITS else ""
    if error["type"] == "missing":
        return f"{name} is missing; set it{unit}"
    value = reduce(getitem, path, given)
    if key in FORMS:
        return f"{name} is {shown(value)}: {FORMS[key].format(key)}"
    return sentence(name, value, error, None) + unit


def to_toml(cluster: Cluster, comments: Sequence[str]) -> str:
    """Return TOML from which `cluster` reads an equal cluster, except for the name; `comments` come first."""
    values = asdict(cluster)
    links = {side: values.pop(side) for side in LINKS}
    efficiency = values.pop(EFFICIENCY)
    if cluster.between is None:
        del links[BETWEEN], values[PER_SITE]
    if not cluster.watts:
        # 0 is not in its range.
        del values["watts"]
    lines = [f"# {line}".rstrip() for line in comments]
    lines += [f"{key} = {json.dumps(value)}" for key, value in values.items() if key != "name"]
    for side, link in links.items():
        lines += ["", f"[{side}]"]
        # Without a value, `pair` is left out: 0 is not in its range.
        lines += [f"{key} = {value!r}" for key, value in link.items() if key != "pair" or value]
    if efficiency:
        lines += ["", *efficiency_lines(efficiency)]
    return "\n".join(lines) + "\n"


def efficiency_lines(efficiency: Sequence[tuple[str, float]], comments: Mapping[str, str] | None = None) -> list[str]:
    """Return the table of a cluster file that has these constants, with a comment on each."""
    notes = {name: f"  # {comment}" for name, comment in (comments or {}).items()}
    return [f"[{EFFICIENCY}]", *(f"{name} = {value:.4g}{notes.get(name, '')}" for name, value in efficiency)]
