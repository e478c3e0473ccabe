"""What a trace of the devices tells: the longest kernels, and the communication that no computing hides.

The trace is the one that JAX's profiler writes: JSON in the Trace Event Format, times in microseconds. On GPUs each
device is a process in it, `/device:GPU:0`, and its streams are threads, `Stream #13(Compute)`; what lies beside them
(`XLA Ops`, `Steps`) tells the same time again. On CPUs operations lie on threads of the host and tell their device.
"""

from __future__ import annotations

import gzip
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxdist.planning.hlo import COMMUNICATION
from jaxdist.planning.hlo_text import Instruction, called, parse

COMPUTE, COLLECTIVE, COPY = "compute", "collective", "copy"
"""What a kernel is for. A copy keeps a device busy; it hides no communication."""

CALLERS = ("while", "conditional", "call")
"""Operations whose time on a CPU is that of others, which are in the trace too."""

Event = Mapping[str, Any]


class Program(NamedTuple):
    """What a trace does not tell of the program that ran."""

    module: str
    operations: Mapping[str, str]
    """What each instruction is: the kind of its collective, though it stands in a fusion; of others the opcode."""

    @classmethod
    def of(cls, text: str) -> Program:
        """Of a compiled program's text. Raises `ValueError` where it cannot be read."""
        computations = parse(text).computations

        @cache
        def inside(computation: str) -> str:
            return next(filter(COMMUNICATION.match, map(kind, computations[computation])), "")

        def kind(one: Instruction) -> str:
            if COMMUNICATION.match(one.opcode):
                return re.sub("-(start|done)$", "", one.opcode)
            within = () if one.opcode in CALLERS else (name for _, name in called(computations, one))
            return next(filter(None, map(inside, within)), one.opcode)

        module = re.match(r"HloModule ([^\s,]+)", text)[1]
        return cls(module, {one.name[1:]: kind(one) for body in computations.values() for one in body})


class Kernel(NamedTuple):
    """A piece of work of a device, in microseconds."""

    device: str
    name: str
    use: str
    start: float
    end: float


class Longest(NamedTuple):
    """All calls of one kernel, of a device on average."""

    name: str
    calls: float
    milliseconds: float
    share: float
    """Of the time in which the device is busy: together more than 1 where kernels run side by side."""


class Summary(NamedTuple):
    """Of the devices of a trace, on average."""

    devices: int
    longest: list[Longest]
    collectives: float
    """Share of the busy time in which a collective runs."""
    exposed: float
    """Share of the collectives' time in which nothing is computed beside them; 0 where there are none."""


def read(path: Path) -> list[Event]:
    """The events of a trace."""
    with gzip.open(path) as file:
        return json.load(file)["traceEvents"]


def kernels(events: Iterable[Event], program: Program) -> Iterator[Kernel]:
    """What the devices ran of `program`, and what does not say of which program it is."""
    names = {(one["pid"], one.get("tid")): one["args"]["name"] for one in events if _names(one)}
    gpus = {pid for (pid, thread), name in names.items() if thread is None and "/device:GPU" in name}
    for one in events:
        told = one.get("args", {})
        if one.get("ph") != "X" or told.get("hlo_module", program.module).split("(")[0] != program.module:
            continue
        operation = program.operations.get(told.get("hlo_op"), "")
        if one["pid"] in gpus and names.get((one["pid"], one["tid"]), "").startswith("Stream"):
            device = names[one["pid"], None]
        elif not gpus and "hlo_op" in told and operation not in CALLERS:
            device = told["device_ordinal"]
        else:
            continue
        use = _use(one["name"], operation)
        shown = one["name"]
        if use == COLLECTIVE and operation and operation not in shown:
            shown += f" ({operation})"  # JAX's name for it, or that of a fusion
        yield Kernel(device, shown, use, one["ts"], one["ts"] + one["dur"])


def _names(event: Event) -> bool:
    return event.get("ph") == "M" and event["name"] in ("process_name", "thread_name")


def _use(name: str, operation: str) -> str:
    if COMMUNICATION.match(operation) or "nccl" in name.lower():
        return COLLECTIVE
    return COPY if name.startswith(("Memcpy", "Memset")) else COMPUTE


def covered(kernels: Iterable[Kernel]) -> float:
    """Microseconds in which at least one of them runs."""
    spans = np.array(sorted((one.start, one.end) for one in kernels)).reshape(-1, 2)
    reached = np.maximum.accumulate(spans[:, 1])
    before = np.concatenate([[-np.inf], reached[:-1]])[: len(spans)]
    return float(np.maximum(reached - np.maximum(spans[:, 0], before), 0).sum())


def summarize(kernels: Iterable[Kernel], longest: int = 10) -> Summary:
    """Raises `ValueError` where there are no kernels."""
    devices: dict[str, list[Kernel]] = defaultdict(list)
    calls: dict[str, list[float]] = defaultdict(list)
    for one in kernels:
        devices[one.device].append(one)
        calls[one.name].append(one.end - one.start)
    if not devices:
        raise ValueError("the trace holds no kernels of the devices")
    busy, count = {device: covered(ran) for device, ran in devices.items()}, len(devices)
    rows = [
        Longest(name, len(times) / count, sum(times) / count / 1e3, sum(times) / sum(busy.values()))
        for name, times in calls.items()
    ]
    shares, exposed = [], []
    for device, ran in devices.items():
        computing = [one for one in ran if one.use == COMPUTE]
        collectives = [one for one in ran if one.use == COLLECTIVE]
        time = covered(collectives)
        shares.append(time / busy[device])
        if time:
            exposed.append((covered(computing + collectives) - covered(computing)) / time)
    rows.sort(key=lambda row: row.milliseconds, reverse=True)
    return Summary(count, rows[:longest], float(np.mean(shares)), float(np.mean(exposed or [0.0])))


def table(found: Summary) -> list[str]:
    """Lines for people."""
    lines = ["      total  of busy   calls  kernel"]
    for row in found.longest:
        name = row.name if len(row.name) <= 70 else row.name[:67] + "..."
        lines.append(f"{row.milliseconds:8.2f} ms  {row.share:6.1%}  {row.calls:6g}  {name}")
    if not found.collectives:
        return [*lines, "no collectives"]
    told = f"collectives in {found.collectives:.1%} of the busy time, {found.exposed:.1%} of it exposed"
    return [*lines, f"{told}: nothing is computed beside them"]
