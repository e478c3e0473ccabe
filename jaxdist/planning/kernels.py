"""What one execution of a compiled program computes, and what it reads and writes for it, kernel by kernel.

Reads the text of `jax.stages.Compiled.as_text()` as `hlo` does. Counts are dynamic: a loop's kernels count as often as
it turns, once where its length is not known; of a conditional, every branch counts.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property

from jaxdist.planning.hlo_text import (
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
PRODUCTS = ("dot", "convolution")

AROUND = ("while", "call", "conditional", "async-start")
"""What runs other computations; its own operands and results stay where they are."""

NOTHING = ("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id")
"""What reads and writes no memory."""

PIECES = ("dynamic-slice", "slice", "gather")
"""What reads no more of its first operand than it makes."""

STACKS = ("dynamic-slice", "dynamic-update-slice")
COPIES = ("copy", "transpose")

SIZELESS = ("token", "opaque")


@dataclass(frozen=True)
class Kernels:
    """Of one device, in one execution."""

    flash_forward: int
    """Calls of cuDNN's attention."""
    flash_backward: int
    products: dict[str, int]
    """Matrix products and convolutions by the dtypes of their operands: `bf16`, or `bf16 x f32`."""
    bytes: int
    """What all kernels read and write."""
    copied: int
    """The part of it that is of copies and transposes: of those that are a kernel, and of fusions without a product
    that have one in them, which count whole; but for what is `stacked`."""
    stacked: int
    """The part of it that is of kernels that do nothing but cut a layer's piece out of a stack or put it into one."""
    largest: str
    """The largest array that is held in memory, arguments included: `bf16[16,8,4096,2,8192]`."""
    largest_bytes: int

    def json(self) -> dict[str, object]:
        return asdict(self)


def kernels(program: str) -> Kernels:
    """Raises `ValueError` for a text that cannot be read."""
    found = _Reader(parse(program))
    flash, products, moved = Counter(), Counter(), Counter()
    for instruction, times in found.run():
        moved[found.purpose(instruction)] += times * found.touched(instruction)
        if kind := FLASH.search(instruction.rest):
            flash[kind[1]] += times
        for dtypes in found.products(instruction):
            products[dtypes] += times
    largest = max(found.held(), key=_size_of)
    return Kernels(
        flash_forward=flash[None],
        flash_backward=flash["Backward"],
        products=dict(products),
        bytes=moved.total(),
        copied=moved["copy"],
        stacked=moved["stack"],
        largest=_told(largest),
        largest_bytes=_size_of(largest),
    )


def held(program: str) -> set[tuple[str, tuple[int, ...]]]:
    """(dtype, shape) of every array that is held in memory: arguments, and what kernels make."""
    return set(_Reader(parse(program)).held())


class _Reader:
    def __init__(self, program: Program):
        self.program = program

    @cached_property
    def named(self) -> dict[str, Instruction]:
        return {one.name: one for body in self.program.computations.values() for one in body}

    def run(self, name: str | None = None, times: int = 1) -> Iterator[tuple[Instruction, int]]:
        """Every instruction that is a kernel, or may be, with how often it runs."""
        for instruction in self.program.computations[name or self.program.entry]:
            if instruction.opcode in AROUND:
                turns = trips(self.program.computations, instruction) or 1 if instruction.opcode == "while" else 1
                for _, callee in called(self.program.computations, instruction):
                    yield from self.run(callee, times * turns)
            elif instruction.opcode not in NOTHING and not instruction.opcode.endswith(("-done", "-update")):
                yield instruction, times

    def held(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        made = [one for one, _ in self.run()]
        made += [one for one in self.program.computations[self.program.entry] if one.opcode == "parameter"]
        for instruction in made:
            yield from arrays(instruction.type)

    def purpose(self, instruction: Instruction) -> str:
        """`copy`, `stack`, or nothing of the two."""
        whole = [one for one in [instruction, *self.inside(instruction)] if "[]" not in one.type]
        done = {one.opcode for one in whole if not self._fills(one)} - {"fusion", "fusion-start", *NOTHING}
        if done & {*STACKS} and done <= {*STACKS, "copy"}:
            return "stack"
        return "copy" if done & {*COPIES, "copy-start"} and not done & {*PRODUCTS} else ""

    def _fills(self, instruction: Instruction) -> bool:
        """Whether it copies one number."""
        return instruction.opcode == "copy" and self.named[operands(instruction)[0]].opcode == "broadcast"

    def inside(self, fusion: Instruction) -> list[Instruction]:
        """The instructions of a fusion, those of fusions in it included."""
        if fusion.opcode.removesuffix("-start") != "fusion":
            return []
        own = [one for _, name in called(self.program.computations, fusion) for one in self.program.computations[name]]
        return own + [inner for one in own for inner in self.inside(one)]

    def products(self, instruction: Instruction) -> list[str]:
        """The dtypes of the operands of each product in a kernel."""
        if instruction.opcode == "custom-call" and LIBRARY_PRODUCT.search(instruction.rest):
            found = [instruction]
        else:
            found = [one for one in [instruction, *self.inside(instruction)] if one.opcode in PRODUCTS]
        return [" x ".join(dict.fromkeys(self._dtype(name) for name in operands(one)[:2])) for one in found]

    def _dtype(self, name: str) -> str:
        return arrays(self.named[name].type)[0][0]

    def touched(self, instruction: Instruction) -> int:
        """Bytes read and written. Of a stack that is cut, or written into in place, only the piece counts."""
        given = operands(instruction)
        if instruction.opcode.removesuffix("-start") == "fusion":
            body = self.program.computations[dict(called(self.program.computations, instruction))["calls"]]
            return self._read(body, given) + self._written(body, body[-1])
        if instruction.opcode in PIECES:
            return 2 * self._bytes(instruction.name)
        if instruction.opcode == "dynamic-update-slice":
            return 2 * self._bytes(given[1])
        if instruction.opcode.endswith("-start"):  # its type has its operands and its results
            return self._bytes(instruction.name)
        return self._bytes(instruction.name) + sum(map(self._bytes, given))

    def _read(self, body: list[Instruction], given: list[str]) -> int:
        """Bytes that a fusion reads of what it is given."""
        users, total = {}, 0
        for one in body:
            for place, name in enumerate(operands(one)):
                users.setdefault(name, []).append((one, place))
        for one in body:
            if one.opcode == "parameter":
                total += min(self._bytes(given[int(operands(one)[0])]), self._used(one.name, users))
        return total

    def _used(self, name: str, users: dict[str, list[tuple[Instruction, int]]]) -> int:
        """Bytes of a value in a fusion that its users read."""
        total = 0
        for one, place in users.get(name, []):
            if one.opcode == "bitcast":
                total += self._used(one.name, users)
            elif place == 0 and one.opcode in PIECES:
                total += self._bytes(one.name)
            elif place or one.opcode != "dynamic-update-slice":
                return self._bytes(name)
        return total

    def _written(self, body: list[Instruction], root: Instruction) -> int:
        """Bytes that a fusion writes."""
        by_name = {one.name: one for one in body}
        if root.opcode == "tuple":
            return sum(self._written(body, by_name[name]) for name in operands(root))
        if root.opcode == "bitcast" and operands(root)[0] in by_name:
            return self._written(body, by_name[operands(root)[0]])
        return self._bytes(operands(root)[1] if root.opcode == "dynamic-update-slice" else root.name)

    def _bytes(self, name: str) -> int:
        return sum(map(_size_of, arrays(self.named[name].type)))


def _size_of(array: tuple[str, tuple[int, ...]]) -> int:
    dtype, shape = array
    total = 0 if dtype in SIZELESS else bytes_of(dtype)
    for size in shape:
        total *= size
    return total


def _told(array: tuple[str, tuple[int, ...]]) -> str:
    return f"{array[0]}[{','.join(map(str, array[1]))}]"
