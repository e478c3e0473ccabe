"""Read the collectives of a compiled program: over which mesh axes they run, of what size, and how often.

Also read whether they overlap compute: which kernels XLA has scheduled between the start and the done of each. The
input is the text of `jax.stages.Compiled.as_text()` as jaxlib 0.10 to 0.12 print it, for CPU and for GPU (`hlo_text`
describes its form). Anything unknown raises `ValueError`: a collective that is left out would let a test of
communication pass. The text does not show the communication of hand-written kernels.
"""

import math
import re
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
from jax.sharding import AbstractMesh, Mesh

from jaxdist.output.units import counted
from jaxdist.programs.hlo_text import (
    PRODUCTS,
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
"""Operations that move data between devices; one that is not in `KINDS` raises `ValueError`."""

SYNCHRONOUS = '"is_sync":true'
LIBRARY = re.compile(
    r'custom_call_target="(__cublas\$(gemm|lt\$matmul|lt\$groupedMatmul)|__cudnn\$(fmha|conv)|__triton_gemm)'
)
"""Library calls that are matmuls, convolutions or fused attention."""

FUSED = re.compile(r'"kind":"__(triton_\w*gemm\w*|cudnn\$fusion)"')
"""Fusions around a matmul or fused attention."""


class Work(NamedTuple):
    """Compute: the kernels that one pass over a piece of program starts."""

    matmuls: int = 0
    """Matmuls, convolutions and fused attentions, as kernels of their own or inside fusions."""
    others: int = 0
    """Other fusions and library calls."""


NO_WORK = Work()


@dataclass(frozen=True)
class Collective:
    """One collective that the program runs, for each place in its text."""

    kind: str
    axes: tuple[str, ...]
    """The mesh axes that it runs over, outermost first."""
    devices: int
    """Devices in one group: the product of the sizes of `axes`."""
    sizes: tuple[tuple[str, int], ...]
    """(dtype, elements) of one call, one row for each dtype: the results of an all-gather, the operands of all other
    kinds."""
    scalars: tuple[str, ...] = ()
    """The dtypes of its arrays of rank 0."""
    count: int = 1
    """Calls in one execution of the program: the product of the trip counts of the loops around it. It is 0 where the
    length of one of them is unknown, as nothing of it is certain."""
    repeated: bool = False
    """Whether it is in a loop of unknown length, and runs 0 or more times: an all-to-all of further rounds of experts.
    """
    depth: int = 0
    """How many loops are around it."""
    branch: bool = False
    """Whether it is in a branch of a conditional, which some devices may not take; counted as if all of them did."""
    sync: bool = True
    """Whether the device waits for it. An asynchronous one may still have no compute to overlap."""
    overlapped: Work = NO_WORK
    """The compute that is scheduled between the start and the done of one call. Compute in a loop of unknown length
    counts once; of a conditional, the branch with the least compute counts."""

    @property
    def dtypes(self) -> tuple[str, ...]:
        """The dtypes of its arrays, each once."""
        return tuple(dtype for dtype, _ in self.sizes)

    @property
    def elements(self) -> int:
        """The elements of one call."""
        return sum(elements for _, elements in self.sizes)

    @property
    def array_elements(self) -> int:
        """The elements of one call, without scalars."""
        return self.elements - len(self.scalars)

    @property
    def payload_bytes(self) -> int:
        """The bytes of one call."""
        return sum(elements * bytes_of(dtype) for dtype, elements in self.sizes)

    @property
    def array_bytes(self) -> int:
        """The bytes of one call, without scalars."""
        return self.payload_bytes - sum(map(bytes_of, self.scalars))

    @property
    def wire(self) -> float:
        """The elements that one device sends in one execution of the program, by the ring algorithms."""
        return self._share * self.elements * self.count

    @property
    def wire_bytes(self) -> float:
        """The bytes that one device sends in one execution of the program, by the ring algorithms."""
        return self._share * self.payload_bytes * self.count

    @property
    def _share(self) -> float:
        """The part of the payload that one device sends."""
        if self.kind == "collective-permute":
            return 1
        others = (self.devices - 1) / self.devices
        if self.kind == "all-reduce":
            return 2 * others
        return others


def collectives(program: str, mesh: Mesh | AbstractMesh) -> list[Collective]:
    """Return one collective for each place in the text that runs; none over a single device.

    The collectives of a callee stand where it is called. Raises `ValueError` for a program of another number of devices
    than `mesh`, for unknown communication, and for a collective other than an all-to-all in a loop of unknown length.
    """
    parsed = parse(program)
    if parsed.devices != mesh.size:
        raise ValueError(f"the program is for {counted(parsed.devices, 'device')}, the mesh has {mesh.size}")
    return Reader(parsed, mesh).run(parsed.entry)


@dataclass
class Reader:
    """Walks a program from its entry, and remembers what each computation runs."""

    program: Program
    mesh: Mesh | AbstractMesh
    known: dict[str, list[Collective]] = field(default_factory=dict)

    def run(self, name: str) -> list[Collective]:
        """Return the collectives of one execution of a computation."""
        if name not in self.known:
            body = self.program.computations[name]
            self.known[name] = [one for place in range(len(body)) for one in self.at(body, place)]
        return self.known[name]

    def at(self, body: list[Instruction], place: int) -> list[Collective]:
        """Return the collectives of one execution of the instruction at this place, none for the end of one."""
        instruction = body[place]
        operation = instruction.opcode.removesuffix("-start")
        if operation.endswith(("-update", "-done")):
            # Their -start has been counted.
            return []
        if operation in KINDS:
            found = _collective(operation, instruction, self.mesh)
        elif COMMUNICATION.match(operation):
            raise ValueError(f"{operation} is communication that is not counted here: {instruction.rest[:300]}")
        else:
            found = self._callees(instruction)
        if found and operation != instruction.opcode and SYNCHRONOUS not in instruction.rest:
            overlapped = self._overlapped(body, place)
            found = [replace(one, sync=False, overlapped=overlapped) for one in found]
        return found

    def _callees(self, caller: Instruction) -> list[Collective]:
        """Return the collectives of the computations that a loop, fusion, call or async wrapper calls."""
        loop = caller.opcode == "while"
        in_branch = caller.opcode == "conditional"
        found = []
        for role, name in called(self.program.computations, caller):
            inside = self.run(name)
            if not inside:
                # A loop without collectives may be of any length.
                continue
            times: int | None = 1
            if loop:
                times = self._times(caller, role, inside)
            for one in inside:
                found.append(
                    replace(
                        one,
                        count=one.count * (times or 0),
                        repeated=one.repeated or times is None,
                        depth=one.depth + int(loop),
                        branch=one.branch or in_branch,
                    )
                )
        return found

    def _times(self, loop: Instruction, role: str, inside: list[Collective]) -> int | None:
        """Return how often a loop runs its body or condition, `role`, with the collectives `inside`.

        It is None where that is not known, which only all-to-alls may leave open.
        """
        turns = trips(self.program.computations, loop)
        if turns is None:
            if any(one.kind != "all-to-all" for one in inside):
                raise ValueError(f"a collective in a loop of unknown length: {loop.rest[:300]}")
            return None
        if role == "condition":
            # The condition also runs once more, at the end.
            return turns + 1
        return turns

    def _overlapped(self, body: list[Instruction], place: int) -> Work:
        """Return the compute between the start of a collective and its done."""
        if not self.program.scheduled:
            raise ValueError("the program is not scheduled (no is_scheduled=true in its first line)")
        started = body[place].name
        matmuls = 0
        others = 0
        for instruction in body[place + 1 :]:
            if first_operand(instruction) == started and instruction.opcode.endswith("-done"):
                return Work(matmuls, others)
            if first_operand(instruction) == started and instruction.opcode.endswith("-update"):
                # The done names the last update instead of the start.
                started = instruction.name
            work = self._work(instruction)
            matmuls += work.matmuls
            others += work.others
        raise ValueError(
            f"a collective that is started and not waited for in its computation: {body[place].rest[:300]}"
        )

    def _work(self, instruction: Instruction) -> Work:
        """Return the compute of one instruction, as `Collective.overlapped` counts it."""
        operation = instruction.opcode.removesuffix("-start")
        if operation in PRODUCTS:
            return Work(matmuls=1)
        names = [name for _, name in called(self.program.computations, instruction)]
        if operation == "fusion":
            return self._fusion_work(instruction, names)
        if operation == "custom-call":
            if LIBRARY.search(instruction.rest):
                return Work(matmuls=1)
            return Work(others=1)
        if operation not in ("while", "call", "async", "conditional"):
            # Other operations call a computation for each element, such as the sum of a reduction: no kernel.
            return NO_WORK
        callees = [self._computation_work(name) for name in names]
        if operation == "conditional":
            return min(callees, key=sum)
        times = None
        if operation == "while":
            times = trips(self.program.computations, instruction)
        if times is None:
            times = 1
        return Work(*(times * sum(part) for part in zip(*callees, strict=True)))

    def _fusion_work(self, fusion: Instruction, names: list[str]) -> Work:
        """Return the compute of a fusion that calls the computations `names`."""
        if any(map(self.run, names)):
            # A collective, fused with the slicing of its operand.
            return NO_WORK
        if self._multiplies(fusion):
            return Work(matmuls=1)
        return Work(others=1)

    def _computation_work(self, name: str) -> Work:
        """Return the compute of one execution of a computation."""
        return Work(*map(sum, zip(*map(self._work, self.program.computations[name]), strict=True)))

    def _multiplies(self, fusion: Instruction) -> bool:
        """Return whether a matmul is in a fusion, or in the fusions inside it."""
        if FUSED.search(fusion.rest):
            return True
        inside = [name for _, name in called(self.program.computations, fusion)]
        return any(
            one.opcode in PRODUCTS or self._multiplies(one)
            for name in inside
            for one in self.program.computations[name]
        )


def _collective(kind: str, instruction: Instruction, mesh: Mesh | AbstractMesh) -> list[Collective]:
    """Return the collective in a list, which is empty where every device is a group of its own."""
    axes = _axes(kind, instruction.rest, mesh)
    if not axes:
        return []
    devices = math.prod(mesh.shape[axis] for axis in axes)
    sizes: Counter[str] = Counter()
    scalars = []
    for dtype, shape in results(instruction):
        # An unknown dtype raises here, and not later, when somebody asks for the bytes.
        bytes_of(dtype)
        elements = math.prod(shape)
        if kind == "reduce-scatter":
            # The operand is as large as the results of all devices.
            elements *= devices
        sizes[dtype] += elements
        # An array with one element, such as a number of a single layer, is predicted as others are.
        if not shape:
            scalars.append(dtype)
    return [Collective(kind, axes, devices, tuple(sorted(sizes.items())), tuple(scalars))]


def _axes(kind: str, attributes: str, mesh: Mesh | AbstractMesh) -> tuple[str, ...]:
    """Return the mesh axes along which the devices of a group differ.

    Raises `ValueError` unless every group has all devices along these axes; the pairs of a permute may leave some out.
    """
    permute = kind == "collective-permute"
    # [groups, devices of a group]; HLO numbers the devices by their place in the mesh, row by row, whatever their ids.
    if permute:
        grouped = pairs(attributes)
    else:
        grouped = groups(attributes, mesh.size)
    coordinates = np.stack(np.unravel_index(grouped, tuple(mesh.shape.values())), -1)
    differ = (coordinates != coordinates[:, :1]).any((0, 1))
    axes = tuple(axis for axis, along in zip(mesh.axis_names, differ, strict=True) if along)
    whole = math.prod(mesh.shape[axis] for axis in axes) == grouped.shape[1]
    if not permute and not (whole and sorted(grouped.flat) == list(range(mesh.size))):
        raise ValueError(f"the groups {grouped.tolist()} are not whole axes of the mesh {dict(mesh.shape)}")
    return axes
