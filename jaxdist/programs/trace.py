"""Read a profiler trace: the longest kernels, and the communication that no computation hides.

The trace is the one that JAX's profiler writes: JSON in the Trace Event Format, times in microseconds. On GPUs each
device is a process in it, `/device:GPU:0`, and its streams are threads, `Stream #13(Compute)`; the other threads (`XLA
Ops`, `Steps`) report the same time again. On CPUs operations are on threads of the host and name their device.
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

from jaxdist.programs.hlo import COMMUNICATION
from jaxdist.programs.hlo_text import Instruction, called, parse

COMPUTE = "compute"
COLLECTIVE = "collective"
COPY = "copy"
"""The purposes of a kernel. A copy keeps a device busy, but hides no communication."""

CALLERS = ("while", "conditional", "call")
"""Operations whose time on a CPU is that of other operations, which are in the trace too."""

LONGEST = 10
"""Kernels that a summary has at most."""

LONGEST_NAME = 70
"""Characters of a kernel's name that a table shows."""

Event = Mapping[str, Any]


class Program(NamedTuple):
    """The program that ran, as far as a trace does not describe it."""

    module: str
    operations: Mapping[str, str]
    """Instruction -> the kind of its collective, also where that is inside a fusion; for the others the opcode."""

    @classmethod
    def of(cls, text: str) -> Program:
        """Read the text of a compiled program. Raises `ValueError` where it cannot be read."""
        computations = parse(text).computations

        @cache
        def collective_in(computation: str) -> str:
            """Return the kind of the first collective in a computation; empty where it has none."""
            for instruction in computations[computation]:
                operation = kind(instruction)
                if COMMUNICATION.match(operation):
                    return operation
            return ""

        def kind(instruction: Instruction) -> str:
            if COMMUNICATION.match(instruction.opcode):
                return re.sub("-(start|done)$", "", instruction.opcode)
            # What a loop calls has events of its own.
            if instruction.opcode in CALLERS:
                return instruction.opcode
            for _, computation in called(computations, instruction):
                collective = collective_in(computation)
                if collective:
                    return collective
            return instruction.opcode

        header = re.match(r"HloModule ([^\s,]+)", text)
        if header is None:
            raise ValueError(f"the program has no name: {text[:100]!r}")
        operations = {}
        for instructions in computations.values():
            for instruction in instructions:
                operations[instruction.name[1:]] = kind(instruction)
        return cls(header[1], operations)


class Kernel(NamedTuple):
    """A piece of work of a device; times in microseconds."""

    device: str
    name: str
    use: str
    """One of `COMPUTE`, `COLLECTIVE` and `COPY`."""
    start: float
    end: float


class Longest(NamedTuple):
    """All calls of one kernel, averaged over devices."""

    name: str
    calls: float
    milliseconds: float
    share: float
    """The share of the time in which the device is busy; shares add up to more than 1 where kernels overlap."""


class Summary(NamedTuple):
    """Figures of a trace, averaged over devices."""

    devices: int
    longest: list[Longest]
    collectives: float
    """The share of the busy time in which a collective runs."""
    exposed: float
    """The share of the collectives' time that no computation overlaps; 0 where there are no collectives."""


def read(path: Path) -> list[Event]:
    """Return the events of a trace."""
    with gzip.open(path) as file:
        return json.load(file)["traceEvents"]


def kernels(events: Iterable[Event], program: Program) -> Iterator[Kernel]:
    """Yield the kernels of `program`, and those that do not name their program."""
    names = {(event["pid"], event.get("tid")): event["args"]["name"] for event in events if _gives_name(event)}
    # Without any GPU, the operations of CPUs are what ran.
    gpus = {pid for (pid, thread), name in names.items() if thread is None and "/device:GPU" in name}
    for event in events:
        details = event.get("args", {})
        module = details.get("hlo_module", program.module).split("(")[0]
        if event.get("ph") != "X" or module != program.module:
            continue
        operation = program.operations.get(details.get("hlo_op"), "")
        if event["pid"] in gpus and names.get((event["pid"], event["tid"]), "").startswith("Stream"):
            device = names[event["pid"], None]
        elif not gpus and "hlo_op" in details and operation not in CALLERS:
            device = details["device_ordinal"]
        else:
            continue
        name = event["name"]
        use = _use(name, operation)
        if use == COLLECTIVE and operation and operation not in name:
            # The event has JAX's name for the collective, or the name of a fusion.
            name += f" ({operation})"
        yield Kernel(device, name, use, event["ts"], event["ts"] + event["dur"])


def _gives_name(event: Event) -> bool:
    """Return whether an event names a process or a thread."""
    return event.get("ph") == "M" and event["name"] in ("process_name", "thread_name")


def _use(name: str, operation: str) -> str:
    if COMMUNICATION.match(operation) or "nccl" in name.lower():
        return COLLECTIVE
    return COPY if name.startswith(("Memcpy", "Memset")) else COMPUTE


def covered(kernels: Iterable[Kernel]) -> float:
    """Return the microseconds in which at least one of the kernels runs.

    Kernels of several streams may overlap; the time in which they do counts once.
    """
    spans = np.array(sorted((kernel.start, kernel.end) for kernel in kernels)).reshape(-1, 2)
    reached = np.maximum.accumulate(spans[:, 1])
    # Of each span, only the part after the end of all earlier ones counts.
    before = np.concatenate([[-np.inf], reached[:-1]])[: len(spans)]
    return float(np.maximum(reached - np.maximum(spans[:, 0], before), 0).sum())


def summarize(kernels: Iterable[Kernel]) -> Summary:
    """Return the figures of a trace with the `LONGEST` kernels. Raises `ValueError` where there are no kernels."""
    devices: dict[str, list[Kernel]] = defaultdict(list)
    calls: dict[str, list[float]] = defaultdict(list)
    for kernel in kernels:
        devices[kernel.device].append(kernel)
        calls[kernel.name].append(kernel.end - kernel.start)
    if not devices:
        raise ValueError("the trace holds no kernels of the devices")
    count = len(devices)
    busy = {device: covered(ran) for device, ran in devices.items()}
    # Averaged over all devices, also those on which a kernel did not run.
    rows = [
        Longest(name, len(times) / count, sum(times) / count / 1e3, sum(times) / sum(busy.values()))
        for name, times in calls.items()
    ]
    rows.sort(key=lambda row: row.milliseconds, reverse=True)

    shares = []
    exposed = []
    for device, ran in devices.items():
        computing = [kernel for kernel in ran if kernel.use == COMPUTE]
        collectives = [kernel for kernel in ran if kernel.use == COLLECTIVE]
        communicating = covered(collectives)
        shares.append(communicating / busy[device])
        if communicating:
            exposed.append((covered(computing + collectives) - covered(computing)) / communicating)
    return Summary(count, rows[:LONGEST], float(np.mean(shares)), float(np.mean(exposed or [0.0])))


def table(found: Summary) -> list[str]:
    """Return the lines that report a trace."""
    lines = ["      total  of busy   calls  kernel"]
    for row in found.longest:
        name = row.name
        if len(name) > LONGEST_NAME:
            name = name[: LONGEST_NAME - 3] + "..."
        lines.append(f"{row.milliseconds:8.2f} ms  {row.share:6.1%}  {row.calls:6g}  {name}")
    if not found.collectives:
        return [*lines, "no collectives"]
    share = f"collectives in {found.collectives:.1%} of the busy time"
    return [*lines, f"{share}, {found.exposed:.1%} of it exposed: no computation overlaps it"]
