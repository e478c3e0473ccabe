"""Every collective that one execution of a compiled program runs: over which mesh axes, of what size, how often.

Reads the text of `jax.stages.Compiled.as_text()` as jaxlib 0.10 to 0.12 print it, for CPU and for GPU. What it does
not know raises `ValueError`: a collective that is left out would let a test of communication pass.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from jax.sharding import Mesh

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
UNREAD = ("collective-broadcast", "ragged-all-to-all", "send", "recv")

COMPUTATION = re.compile(r"(ENTRY )?(%[\w.\-]+) .*\{$")
INSTRUCTION = re.compile(r" +(?:ROOT )?%[\w.\-]+ = (.*?) ([a-z][\w\-]*)\((.*)")
CALLS = re.compile(r"([\w\-]+)=\{?(%[\w.\-]+(?:, ?%[\w.\-]+)*)")
TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,]*)\]")

PAIRS = re.compile(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}")
LISTED = re.compile(r"\{((?:\{[\d,]*\},?)*)\}(?=, |$)")
IOTA = r"\[([\d,]+)\](?:T\(([\d,]+)\))?"
SHAPED = re.compile(rf"\[([\d,]+)\]<={IOTA}(?=, |$)")
NAMED = re.compile(r"mesh\[([^\]]*)\](?:, device_ids=\(([\d,]+|\[.*?\].*?)\))? \{([^}]*)\}(?=, |$)")
AXIS = re.compile(r"'?([^',=:]+)'?(?:=(\d+)|:\((\d+)\)(\d+))?(?:,|$)")


@dataclass(frozen=True)
class Collective:
    kind: str
    axes: tuple[str, ...]
    """The mesh axes that it runs over, outermost first."""
    devices: int
    """In one group: the product of the sizes of `axes`."""
    elements: int
    """Of one call, summed over a tuple: what all-gather makes, and what the others are given."""
    dtypes: tuple[str, ...]
    count: int = 1
    """Calls in one execution of the program: the product of the trip counts of the loops around it."""

    @property
    def wire(self) -> float:
        """Elements that one device sends in one execution, by the ring algorithms."""
        others = (self.devices - 1) / self.devices
        share = {"all-reduce": 2 * others, "collective-permute": 1}.get(self.kind, others)
        return share * self.elements * self.count


class Instruction(NamedTuple):
    type: str
    opcode: str
    rest: str
    """Operands and attributes."""


Computations = dict[str, list[Instruction]]


def collectives(program: str, mesh: Mesh) -> list[Collective]:
    """One for each place in the text that runs, callees in the place of the call; none over a single device."""
    partitions = int((re.search(r"num_partitions=(\d+)", program) or [0, 1])[1])
    if partitions != mesh.size:
        raise ValueError(f"the program is for {partitions} device(s), the mesh has {mesh.size}")
    computations, entry = _parse(program)
    return list(_run(computations, entry, mesh))


def summary(found: list[Collective]) -> dict[tuple[str, tuple[str, ...]], tuple[int, int]]:
    """(kind, axes) -> (calls, elements) of one execution."""
    calls, elements = Counter(), Counter()
    for one in found:
        calls[one.kind, one.axes] += one.count
        elements[one.kind, one.axes] += one.count * one.elements
    return {key: (calls[key], elements[key]) for key in calls}


def _parse(program: str) -> tuple[Computations, str]:
    computations, entry = {}, None
    for line in program.splitlines():
        if header := COMPUTATION.match(line):
            current = computations[header[2]] = []
            entry = header[2] if header[1] else entry
        elif instruction := INSTRUCTION.match(line):
            current.append(Instruction(*instruction.groups()))
        elif line.startswith(" "):
            raise ValueError(f"an instruction that cannot be read: {line[:300]}")
    if entry is None:
        raise ValueError(f"no ENTRY computation in the program, which begins {program[:100]!r}")
    return computations, entry


def _run(computations: Computations, name: str, mesh: Mesh) -> Iterator[Collective]:
    """What one execution of a computation runs."""
    for instruction in computations[name]:
        operation = instruction.opcode.removesuffix("-start")
        if operation in UNREAD:
            raise ValueError(f"{operation} is communication that is not counted here: {instruction.rest[:300]}")
        if operation in KINDS:
            yield from _collective(operation, instruction, mesh)
        elif not operation.endswith(("-update", "-done")):  # they name what their -start has run
            yield from _callees(computations, instruction, mesh)


def _callees(computations: Computations, caller: Instruction, mesh: Mesh) -> Iterator[Collective]:
    """What the computations that an instruction calls run: of a loop, a fusion, a call, an async wrapper."""
    for role, name in _called(computations, caller):
        found = list(_run(computations, name, mesh))
        if found and caller.opcode == "conditional":
            raise ValueError(f"collectives in a branch, which some devices may not take: {found}")
        times = 1
        if found and caller.opcode == "while":  # a loop without collectives may be of any length
            times = _trips(computations, caller) + (role == "condition")
        yield from (replace(one, count=one.count * times) for one in found)


def _called(computations: Computations, caller: Instruction) -> list[tuple[str, str]]:
    """(attribute, computation), whatever the attribute, so that no call is missed for its name."""
    pairs = [(role, name) for role, names in CALLS.findall(caller.rest) for name in re.split(", ?", names)]
    return [(role, name) for role, name in pairs if name in computations and role != "control-predecessors"]


def _trips(computations: Computations, loop: Instruction) -> int:
    """What XLA knows; else the bound of a condition that is `counter < constant` alone, counted from 0 by ones."""
    if known := TRIPS.search(loop.rest):
        return int(known[1])
    condition = list(computations[dict(_called(computations, loop))["condition"]])
    for instruction in condition:  # grows by what its fusions hold
        condition += [inner for _, name in _called(computations, instruction) for inner in computations[name]]
    steps = sorted(one.opcode for one in condition if one.opcode not in ("parameter", "get-tuple-element", "fusion"))
    bounds = [re.match(r"\d+(?=\))", one.rest) for one in condition if one.opcode == "constant"]
    less = any("direction=LT" in one.rest for one in condition)
    if steps != ["compare", "constant"] or not less or None in bounds:
        raise ValueError(f"a collective in a loop of unknown length: {loop.rest[:300]}")
    return int(bounds[0][0])


def _collective(kind: str, instruction: Instruction, mesh: Mesh) -> Iterator[Collective]:
    """The collective, unless every device is a group of its own."""
    if axes := _axes(kind, instruction.rest, mesh):
        devices = math.prod(mesh.shape[axis] for axis in axes)
        arrays = ARRAY.findall(_made(instruction))
        elements = sum(math.prod(_numbers(shape)) for _, shape in arrays)
        whole = elements * devices if kind == "reduce-scatter" else elements
        yield Collective(kind, axes, devices, whole, tuple(sorted({dtype for dtype, _ in arrays})))


def _made(instruction: Instruction) -> str:
    """The type of the results: a `-start` has (operands, results, ...), but all-reduce of jaxlib 0.10 only results."""
    parts = _members(instruction.type)
    plain = instruction.opcode == "all-reduce-start" and not parts[0].startswith("(")
    return parts[1] if instruction.opcode.endswith("-start") and not plain else instruction.type


def _members(tuple_type: str) -> list[str]:
    """`(f32[2,3]{1,0}, (s32[], s32[]))` -> [`f32[2,3]{1,0}`, `(s32[], s32[])`]."""
    parts, depth = [""], 0
    for character in tuple_type[1:-1]:
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts]


def _axes(kind: str, attributes: str, mesh: Mesh) -> tuple[str, ...]:
    """The mesh axes along which the devices of a group differ; raises unless every group is all of them.

    HLO numbers the devices by their place in the mesh, row by row, whatever their ids are.
    """
    permute = kind == "collective-permute"  # its pairs may leave devices out
    groups = _pairs(attributes) if permute else _groups(attributes, mesh.size)
    coordinates = np.stack(np.unravel_index(groups, mesh.devices.shape), -1)
    differ = (coordinates != coordinates[:, :1]).any((0, 1))
    axes = tuple(axis for axis, along in zip(mesh.axis_names, differ, strict=True) if along)
    whole = math.prod(mesh.shape[axis] for axis in axes) == groups.shape[1]
    if not permute and not (whole and sorted(groups.flat) == list(range(mesh.size))):
        raise ValueError(f"the groups {groups.tolist()} are not whole axes of the mesh {dict(mesh.shape)}")
    return axes


def _pairs(attributes: str) -> np.ndarray:
    """[pairs, 2]: source and target."""
    if match := PAIRS.search(attributes):
        return np.asarray(_numbers(match[1]), int).reshape(-1, 2)
    raise ValueError(f"no source_target_pairs that can be read: {attributes[:300]}")


def _groups(attributes: str, devices: int) -> np.ndarray:
    """[groups, devices of a group], from any of the notations of HLO."""
    notation = attributes.partition("replica_groups=")[2]
    if match := LISTED.match(notation):
        return np.asarray([_numbers(group) for group in re.findall(r"\{([\d,]*)\}", match[1])] or [range(devices)])
    if match := SHAPED.match(notation):
        return _iota(match[2], match[3]).reshape(_numbers(match[1]))
    if match := NAMED.match(notation):
        return _named(*match.groups())
    raise ValueError(f"replica_groups in a notation that is not known here: {notation[:300] or attributes[:300]}")


def _iota(shape: str, order: str | None) -> np.ndarray:
    """`[2,4]T(1,0)`: 0, 1, 2 ... of shape (2, 4), transposed, flat."""
    counted = np.arange(math.prod(_numbers(shape))).reshape(_numbers(shape))
    return (counted.transpose(_numbers(order)) if order else counted).reshape(-1)


def _named(axes: str, ids: str | None, grouped: str) -> np.ndarray:
    """`mesh['a'=2,'b'=8], device_ids=(...) {'a','b':(2)4}`: XLA's own mesh, whose axis names need not be ours.

    `'b':(2)4` is the part of axis b, seen as 2 x 4 x the rest, that has size 4.
    """
    names, sizes, _, _ = zip(*AXIS.findall(axes), strict=True)
    sizes = [int(size) for size in sizes]
    outside = np.indices(sizes).reshape(len(sizes), -1)  # becomes the coordinates of a group
    members = 1
    for name, _, before, part in AXIS.findall(grouped):
        axis = names.index(name)
        part = int(part or sizes[axis])
        stride = sizes[axis] // (int(before or 1) * part)
        outside[axis] -= outside[axis] // stride % part * stride
        members *= part
    return _device_ids(ids, math.prod(sizes))[np.lexsort(outside)].reshape(-1, members)


def _device_ids(ids: str | None, devices: int) -> np.ndarray:
    if ids is None:
        return np.arange(devices)
    iota = re.fullmatch(IOTA, ids)
    return _iota(*iota.groups()) if iota else np.asarray([int(device) for device in ids.split(",")])


def _numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]
