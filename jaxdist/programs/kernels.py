"""Count what one execution of a compiled program computes, reads and writes, kernel by kernel.

Reads the text of `jax.stages.Compiled.as_text()`, as `hlo` does. A loop's kernels count as often as the loop turns, or
not at all where that is not known, as in further rounds of experts; of a conditional, every branch counts.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property

from jaxdist.programs.hlo_text import (
    PRODUCTS,
    Instruction,
    Program,
    arrays,
    bytes_of,
    called,
    operands,
    parse,
    trips,
)

FLASH = re.compile(r'custom_call_target="__cudnn\$fmha\w*?(Backward)?"')
LIBRARY_PRODUCT = re.compile(r'custom_call_target="(__cublas\$|__triton_gemm|__cudnn\$conv)')

AROUND = ("while", "call", "conditional", "async-start")
"""Operations that run other computations; their own operands and results stay where they are."""

NOTHING = ("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id")
"""Operations that read and write no memory."""

PIECES = ("dynamic-slice", "slice", "gather")
"""Operations that read no more of their first operand than they return."""

IN_PLACE = ("dynamic-update-slice", "scatter")
"""Operations that write pieces into their first operand, of which they read nothing."""

STACKS = ("dynamic-slice", "dynamic-update-slice")
"""Operations that cut a layer's piece out of a stack, or put it into one."""

COPIES = ("copy", "transpose")

SIZELESS = ("token", "opaque")
"""Types without data."""

Array = tuple[str, tuple[int, ...]]
"""(dtype, shape)"""


@dataclass(frozen=True)
class Kernels:
    """The kernels of one device in one execution."""

    flash_forward: int
    """Calls of cuDNN's attention."""
    flash_backward: int
    products: dict[str, int]
    """Matmuls and convolutions by the dtypes of their operands: `bf16`, or `bf16 x f32`."""
    bytes: int
    """Bytes that all kernels read and write."""
    copied: int
    """The part of `bytes` that copies and transposes take. A fusion without a matmul that has one in it counts whole;
    `stacked` is not included."""
    stacked: int
    """The part of `bytes` of kernels that only cut a layer's piece out of a stack or put it into one."""
    largest: str
    """The largest array that is held in memory, arguments included: `bf16[16,8,4096,2,8192]`."""
    largest_bytes: int

    def json(self) -> dict[str, object]:
        """Return the schema of `docs/reference/json.md`."""
        return asdict(self)


def kernels(program: str) -> Kernels:
    """Count the kernels of a program. Raises `ValueError` for a text that cannot be read."""
    reader = Reader(parse(program))
    flash: Counter[str | None] = Counter()
    products: Counter[str] = Counter()
    moved: Counter[str] = Counter()
    for instruction, times in reader.run():
        moved[reader.purpose(instruction)] += times * reader.moved_bytes(instruction)
        attention = FLASH.search(instruction.rest)
        if attention:
            flash[attention[1]] += times
        for dtypes in reader.products(instruction):
            products[dtypes] += times
    largest = max(reader.held(), key=_size_of)
    dtype, shape = largest
    return Kernels(
        flash_forward=flash[None],
        flash_backward=flash["Backward"],
        products=dict(products),
        bytes=moved.total(),
        copied=moved["copy"],
        stacked=moved["stack"],
        largest=f"{dtype}[{','.join(map(str, shape))}]",
        largest_bytes=_size_of(largest),
    )


def held(program: str) -> set[Array]:
    """Return every array that is held in memory: arguments, and the results of kernels."""
    return set(Reader(parse(program)).held())


class Reader:
    """Reads what each kernel of a program is for, reads and writes."""

    def __init__(self, program: Program):
        self.program = program

    @cached_property
    def named(self) -> dict[str, Instruction]:
        """All instructions, by name."""
        return {one.name: one for body in self.program.computations.values() for one in body}

    def run(self, name: str | None = None, times: int = 1) -> Iterator[tuple[Instruction, int]]:
        """Yield every instruction that may be a kernel, with how often it runs, from the entry or from `name` on."""
        for instruction in self.program.computations[name or self.program.entry]:
            if instruction.opcode in AROUND:
                turns = 1
                if instruction.opcode == "while":
                    turns = trips(self.program.computations, instruction) or 0
                for callee in self._callees(instruction) if turns else []:
                    yield from self.run(callee, times * turns)
            elif instruction.opcode not in NOTHING and not instruction.opcode.endswith(("-done", "-update")):
                yield instruction, times

    def _callees(self, caller: Instruction) -> list[str]:
        return [name for _, name in called(self.program.computations, caller)]

    def held(self) -> Iterator[Array]:
        """Yield every array that is held in memory."""
        made = [one for one, _ in self.run()]
        made += [one for one in self.program.computations[self.program.entry] if one.opcode == "parameter"]
        for instruction in made:
            yield from arrays(instruction.type)

    def purpose(self, instruction: Instruction) -> str:
        """Return `copy`, `stack`, or an empty string for a kernel that computes."""
        # Scalars, such as the place in a stack, and what only fills an array with a number do not count.
        parts = [one for one in [instruction, *self.inside(instruction)] if "[]" not in one.type]
        done = {one.opcode for one in parts if not self._fills(one)} - {"fusion", "fusion-start", *NOTHING}
        if done & {*STACKS} and done <= {*STACKS, "copy"}:
            return "stack"
        if done & {*COPIES, "copy-start"} and not done & {*PRODUCTS}:
            return "copy"
        return ""

    def _fills(self, instruction: Instruction) -> bool:
        """Return whether an instruction copies one number into a whole array."""
        return instruction.opcode == "copy" and self.named[operands(instruction)[0]].opcode == "broadcast"

    def inside(self, fusion: Instruction) -> list[Instruction]:
        """Return the instructions of a fusion, and of the fusions in it."""
        if fusion.opcode.removesuffix("-start") != "fusion":
            return []
        own = [one for name in self._callees(fusion) for one in self.program.computations[name]]
        return own + [inner for one in own for inner in self.inside(one)]

    def products(self, instruction: Instruction) -> list[str]:
        """Return the dtypes of the operands of each matmul in a kernel."""
        if instruction.opcode == "custom-call" and LIBRARY_PRODUCT.search(instruction.rest):
            found = [instruction]
        else:
            found = [one for one in [instruction, *self.inside(instruction)] if one.opcode in PRODUCTS]
        return [" x ".join(dict.fromkeys(self._dtype(name) for name in operands(one)[:2])) for one in found]

    def _dtype(self, name: str) -> str:
        dtype, _ = arrays(self.named[name].type)[0]
        return dtype

    def moved_bytes(self, instruction: Instruction) -> int:
        """Return the bytes that a kernel reads and writes.

        Of a stack that is cut, or written into in place, only the piece counts.
        """
        given = operands(instruction)
        if instruction.opcode.removesuffix("-start") == "fusion":
            body = self.program.computations[dict(called(self.program.computations, instruction))["calls"]]
            return self._read(body, given) + self._written(body, body[-1])
        if instruction.opcode in PIECES:
            return 2 * self._bytes(instruction.name)
        if instruction.opcode in IN_PLACE:
            return 2 * self._pieces(instruction)
        if instruction.opcode.endswith("-start"):
            # The type of a start has both its operands and its results.
            return self._bytes(instruction.name)
        return self._bytes(instruction.name) + sum(map(self._bytes, given))

    def _read(self, body: list[Instruction], given: list[str]) -> int:
        """Return the bytes that a fusion reads of its operands, `given`."""
        users: dict[str, list[tuple[Instruction, int]]] = {}
        for one in body:
            for place, name in enumerate(operands(one)):
                users.setdefault(name, []).append((one, place))
        total = 0
        for one in body:
            if one.opcode == "parameter":
                number = int(operands(one)[0])
                total += min(self._bytes(given[number]), self._used(one.name, users))
        return total

    def _used(self, name: str, users: dict[str, list[tuple[Instruction, int]]]) -> int:
        """Return the bytes of a value in a fusion that its users read; `users` has the place of the operand too."""
        total = 0
        for one, place in users.get(name, []):
            if one.opcode in ("bitcast", "convert") and one.name in users:
                # Of what is converted, only what is needed of the result.
                total += self._used(one.name, users) * self._bytes(name) // self._bytes(one.name)
            elif place == 0 and one.opcode in PIECES:
                total += self._bytes(one.name)
            elif place == 0 and one.opcode in IN_PLACE:
                continue
            else:
                return self._bytes(name)
        return total

    def _written(self, body: list[Instruction], root: Instruction) -> int:
        """Return the bytes that a fusion writes."""
        by_name = {one.name: one for one in body}
        if root.opcode == "tuple":
            return sum(self._written(body, by_name[name]) for name in operands(root))
        if root.opcode == "bitcast" and operands(root)[0] in by_name:
            return self._written(body, by_name[operands(root)[0]])
        if root.opcode in IN_PLACE:
            return self._pieces(root)
        return self._bytes(root.name)

    def _pieces(self, writer: Instruction) -> int:
        """Return the bytes of what an operation of `IN_PLACE` writes into its first operand."""
        given = operands(writer)
        # A scatter may write into several arrays: it has them first, then the places, then the pieces.
        return sum(map(self._bytes, given[-(len(given) // 2) :] if writer.opcode == "scatter" else given[1:2]))

    def _bytes(self, name: str) -> int:
        return sum(map(_size_of, arrays(self.named[name].type)))


def _size_of(array: Array) -> int:
    """Return the bytes of an array."""
    dtype, shape = array
    if dtype in SIZELESS:
        return 0
    return bytes_of(dtype) * math.prod(shape)
