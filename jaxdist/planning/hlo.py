"""Every collective that one execution of a compiled program runs: over which mesh axes, of what size, how often.

And whether it runs beside the compute: what XLA has scheduled between its start and its done. Reads the text of
`jax.stages.Compiled.as_text()` as jaxlib 0.10 to 0.12 print it, for CPU and for GPU (`hlo_text` says how that is
written). What it does not know raises `ValueError`: a collective that is left out would let a test of communication
pass. It cannot see what a hand-written kernel sends.
"""

import math
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
from jax.sharding import AbstractMesh, Mesh

from jaxdist.planning.hlo_text import (
    Instruction,
    Program,
    bytes_of,
    called,
    first_operand,
    groups,
    pairs,
    parse,
    results,
    trips,
)

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
COMMUNICATION = re.compile(r"all-|reduce-scatter|collective|ragged-all|send|recv")
"""Operations that move data between devices; those that are not in `KINDS` raise."""

SYNCHRONOUS = '"is_sync":true'
PRODUCTS = ("dot", "convolution")
LIBRARY = re.compile(
    r'custom_call_target="(__cublas\$(gemm|lt\$matmul|lt\$groupedMatmul)|__cudnn\$(fmha|conv)|__triton_gemm)'
)
FUSED = re.compile(r'"kind":"__(triton_\w*gemm\w*|cudnn\$fusion)"')


class Work(NamedTuple):
    """Compute: kernels that one pass over a piece of program starts."""

    matmuls: int = 0
    """Matrix products, convolutions and fused attentions, in a kernel of their own or with what is fused to them."""
    others: int = 0
    """Other fusions and library calls."""


NO_WORK = Work()


@dataclass(frozen=True)
class Collective:
    """One place in the text that runs: so the number of places is the number of these."""

    kind: str
    axes: tuple[str, ...]
    """The mesh axes that it runs over, outermost first."""
    devices: int
    """In one group: the product of the sizes of `axes`."""
    sizes: tuple[tuple[str, int], ...]
    """(dtype, elements) of one call, a row for each dtype: what all-gather makes, and what the others are given."""
    scalars: tuple[str, ...] = ()
    """The dtypes of those of its arrays that have one element."""
    count: int = 1
    """Calls in one execution of the program: the product of the trip counts of the loops around it."""
    depth: int = 0
    """How many loops are around it."""
    branch: bool = False
    """In a branch of a conditional, which some devices may not take; counted as if all of them did."""
    sync: bool = True
    """The device waits for it. One that is not waited for may still have no compute to run beside."""
    overlapped: Work = NO_WORK
    """The compute that is scheduled between the start and the done of one call; that in a loop of unknown length counts
    once, and of a conditional, the branch with the least."""

    @property
    def dtypes(self) -> tuple[str, ...]:
        return tuple(dtype for dtype, _ in self.sizes)

    @property
    def elements(self) -> int:
        """Of one call."""
        return sum(elements for _, elements in self.sizes)

    @property
    def array_elements(self) -> int:
        """Of one call, scalars left out."""
        return self.elements - len(self.scalars)

    @property
    def payload_bytes(self) -> int:
        """Of one call."""
        return sum(elements * bytes_of(dtype) for dtype, elements in self.sizes)

    @property
    def array_bytes(self) -> int:
        """Of one call, scalars left out."""
        return self.payload_bytes - sum(map(bytes_of, self.scalars))

    @property
    def wire(self) -> float:
        """Elements that one device sends in one execution of the program, by the ring algorithms."""
        return self._share * self.elements * self.count

    @property
    def wire_bytes(self) -> float:
        """Bytes that one device sends in one execution of the program, by the ring algorithms."""
        return self._share * self.payload_bytes * self.count

    @property
    def _share(self) -> float:
        others = (self.devices - 1) / self.devices
        return {"all-reduce": 2 * others, "collective-permute": 1}.get(self.kind, others)


def collectives(program: str, mesh: Mesh | AbstractMesh) -> list[Collective]:
    """One for each place in the text that runs, callees in the place of the call; none over a single device.

    Raises `ValueError` for a program of another number of devices than `mesh`, for communication that is not known
    here, and for a collective in a loop of unknown length.
    """
    parsed = parse(program)
    if parsed.devices != mesh.size:
        raise ValueError(f"the program is for {parsed.devices} device(s), the mesh has {mesh.size}")
    return _Reader(parsed, mesh).run(parsed.entry)


def summary(found: Iterable[Collective]) -> dict[tuple[str, tuple[str, ...]], tuple[int, int]]:
    """(kind, axes) -> (calls, elements) of one execution."""
    calls, elements = Counter(), Counter()
    for one in found:
        calls[one.kind, one.axes] += one.count
        elements[one.kind, one.axes] += one.count * one.elements
    return {key: (calls[key], elements[key]) for key in calls}


@dataclass
class _Reader:
    """Walks a program from its entry; remembers what each computation runs."""

    program: Program
    mesh: Mesh | AbstractMesh
    known: dict[str, list[Collective]] = field(default_factory=dict)

    def run(self, name: str) -> list[Collective]:
        """What one execution of a computation runs."""
        if name not in self.known:
            body = self.program.computations[name]
            self.known[name] = [one for place in range(len(body)) for one in self._at(body, place)]
        return self.known[name]

    def _at(self, body: list[Instruction], place: int) -> list[Collective]:
        """What one execution of one instruction runs."""
        instruction = body[place]
        operation = instruction.opcode.removesuffix("-start")
        if operation.endswith(("-update", "-done")):  # they name what their -start has run
            return []
        if operation in KINDS:
            found = _collective(operation, instruction, self.mesh)
        elif COMMUNICATION.match(operation):
            raise ValueError(f"{operation} is communication that is not counted here: {instruction.rest[:300]}")
        else:
            found = self._callees(instruction)
        if found and operation != instruction.opcode and SYNCHRONOUS not in instruction.rest:
            under = self._under(body, place)
            found = [replace(one, sync=False, overlapped=under) for one in found]
        return found

    def _callees(self, caller: Instruction) -> list[Collective]:
        """What the computations that an instruction calls run: of a loop, a fusion, a call, an async wrapper."""
        loop, found = caller.opcode == "while", []
        for role, name in called(self.program.computations, caller):
            times = 1
            if loop and self.run(name):  # a loop without collectives may be of any length
                times = trips(self.program.computations, caller)
                if times is None:
                    raise ValueError(f"a collective in a loop of unknown length: {caller.rest[:300]}")
                times += role == "condition"
            branch = caller.opcode == "conditional"
            for one in self.run(name):
                around = dict(count=one.count * times, depth=one.depth + loop, branch=one.branch or branch)
                found.append(replace(one, **around))
        return found

    def _under(self, body: list[Instruction], place: int) -> Work:
        """The compute between a start and its done."""
        if not self.program.scheduled:
            raise ValueError("the program is not scheduled (no is_scheduled=true in its first line)")
        started, matmuls, others = body[place].name, 0, 0
        for instruction in body[place + 1 :]:
            if first_operand(instruction) == started and instruction.opcode.endswith("-done"):
                return Work(matmuls, others)
            if first_operand(instruction) == started and instruction.opcode.endswith("-update"):
                started = instruction.name
            work = self._work(instruction)
            matmuls, others = matmuls + work.matmuls, others + work.others
        raise ValueError(
            f"a collective that is started and not waited for in its computation: {body[place].rest[:300]}"
        )

    def _work(self, instruction: Instruction) -> Work:
        """The compute of one instruction, as `Collective.overlapped` counts it."""
        operation = instruction.opcode.removesuffix("-start")
        if operation in PRODUCTS:
            return Work(1, 0)
        names = [name for _, name in called(self.program.computations, instruction)]
        if operation == "fusion" and any(map(self.run, names)):  # a collective with the slicing of its operand
            return NO_WORK
        if operation == "fusion":
            return Work(1, 0) if self._multiplies(instruction) else Work(0, 1)
        if operation == "custom-call":
            return Work(1, 0) if LIBRARY.search(instruction.rest) else Work(0, 1)
        if operation not in ("while", "call", "async", "conditional"):  # what others call is done for each element
            return NO_WORK
        callees = [self._all_work(name) for name in names]
        if operation == "conditional":
            return min(callees, key=sum)
        times = trips(self.program.computations, instruction) if operation == "while" else 1
        times = 1 if times is None else times
        return Work(*(times * sum(part) for part in zip(*callees, strict=True)))

    def _all_work(self, name: str) -> Work:
        """Of one execution of a computation."""
        return Work(*map(sum, zip(*map(self._work, self.program.computations[name]), strict=True)))

    def _multiplies(self, fusion: Instruction) -> bool:
        """Whether a matrix product is in a fusion, or in those inside it."""
        inside = [name for _, name in called(self.program.computations, fusion)]
        return bool(FUSED.search(fusion.rest)) or any(
            one.opcode in PRODUCTS or self._multiplies(one)
            for name in inside
            for one in self.program.computations[name]
        )


def _collective(kind: str, instruction: Instruction, mesh: Mesh | AbstractMesh) -> list[Collective]:
    """The collective, unless every device is a group of its own."""
    axes = _axes(kind, instruction.rest, mesh)
    if not axes:
        return []
    devices = math.prod(mesh.shape[axis] for axis in axes)
    sizes, scalars = Counter(), []
    for dtype, elements in results(instruction):
        bytes_of(dtype)  # raises now, not where the bytes are asked for
        elements *= devices if kind == "reduce-scatter" else 1
        sizes[dtype] += elements
        scalars += [dtype] * (elements == 1)
    return [Collective(kind, axes, devices, tuple(sorted(sizes.items())), tuple(scalars))]


def _axes(kind: str, attributes: str, mesh: Mesh | AbstractMesh) -> tuple[str, ...]:
    """The mesh axes along which the devices of a group differ; raises unless every group is all of them.

    HLO numbers the devices by their place in the mesh, row by row, whatever their ids are.
    """
    permute = kind == "collective-permute"  # its pairs may leave devices out
    grouped = pairs(attributes) if permute else groups(attributes, mesh.size)
    coordinates = np.stack(np.unravel_index(grouped, tuple(mesh.shape.values())), -1)
    differ = (coordinates != coordinates[:, :1]).any((0, 1))
    axes = tuple(axis for axis, along in zip(mesh.axis_names, differ, strict=True) if along)
    whole = math.prod(mesh.shape[axis] for axis in axes) == grouped.shape[1]
    if not permute and not (whole and sorted(grouped.flat) == list(range(mesh.size))):
        raise ValueError(f"the groups {grouped.tolist()} are not whole axes of the mesh {dict(mesh.shape)}")
    return axes
