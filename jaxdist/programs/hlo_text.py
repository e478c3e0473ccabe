"""Parse the text of a compiled program (HLO), as `jax.stages.Compiled.as_text()` of jaxlib 0.10 to 0.12 prints it.

This module knows the notation, not its meaning: computations, their instructions, which calls which and how often,
types, and the groups of devices in each of their notations. Text that cannot be read raises `ValueError`: nothing is
guessed.
"""

import math
import re
from typing import NamedTuple

import numpy as np

COMPUTATION = re.compile(r"(ENTRY )?(%[\w.\-]+) .*\{$")
"""The first line of a computation: whether it is the entry, and its name."""

INSTRUCTION = re.compile(r" +(?:ROOT )?(%[\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*)")
NAME = re.compile(r"%[\w.\-]+")
CALLS = re.compile(r"([\w\-]+)=\{?(%[\w.\-]+(?:, ?%[\w.\-]+)*)")
"""An attribute that names one computation or several: `body=%loop`, `branch_computations={%a, %b}`."""

TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
COMMENT = re.compile(r"/\*.*?\*/")
ARRAY = re.compile(r"([a-z]\w*)\[([\d,]*)\](?:\{[^{}]*\})?")
"""The type of an array: `f32[2,3]{1,0}`."""

PAIRS = re.compile(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}")
LISTED = re.compile(r"\{((?:\{[\d,]*\},?)*)\}(?=, |$)")
"""Groups as lists: `{{0,1},{2,3}}`."""

IOTA = r"\[([\d,]+)\](?:T\(([\d,]+)\))?"
SHAPED = re.compile(rf"\[([\d,]+)\]<={IOTA}(?=, |$)")
"""Groups as a reshaped range: `[4,2]<=[2,4]T(1,0)`."""

NAMED = re.compile(r"mesh\[([^\]]*)\](?:, device_ids=\(([\d,]+|\[.*?\].*?)\))? \{([^}]*)\}(?=, |$)")
"""Groups as axes of a mesh: `mesh['a'=2,'b'=8] {'a'}`."""

AXIS = re.compile(r"'?([^',=:]+)'?(?:=(\d+)|:\((\d+)\)(\d+))?(?:,|$)")
"""An axis of such a mesh with its size, or the part of it that a group has."""

PRODUCTS = ("dot", "convolution")
"""Operations that are matmuls or convolutions of XLA's own."""

BYTES = {f"{kind}{8 * size}": size for kind in "suf" for size in (1, 2, 4, 8)}
BYTES |= {"pred": 1, "bf16": 2, "c64": 8, "c128": 16}
"""Bytes of an element of each dtype."""


class Instruction(NamedTuple):
    """One line of a computation: `name = type opcode(rest`."""

    name: str
    type: str
    opcode: str
    rest: str
    """Operands and attributes."""


Computations = dict[str, list[Instruction]]
"""The instructions of each computation, by its name."""


class Program(NamedTuple):
    """A compiled program."""

    computations: Computations
    entry: str
    devices: int
    scheduled: bool
    """Whether the instructions of a computation stand in the order in which they run."""


def parse(text: str) -> Program:
    """Parse a program.

    Raises `ValueError` for a line that cannot be read, unless there is exactly one ENTRY computation, and for programs
    of several replicas.
    """
    header = text.partition("\n")[0]
    if _number_after("replica_count=", header) != 1:
        raise ValueError(f"the program is for several replicas, which jax.jit does not make: {header[:100]!r}")
    computations: Computations = {}
    entries = []
    for line in text.splitlines():
        opening = COMPUTATION.match(line)
        instruction = INSTRUCTION.match(line)
        if opening:
            entry, name = opening.groups()
            current = computations[name] = []
            if entry:
                entries.append(name)
        elif instruction:
            current.append(Instruction(*instruction.groups()))
        elif line.startswith(" "):
            raise ValueError(f"an instruction that cannot be read: {line[:300]}")
    if len(entries) != 1:
        raise ValueError(f"{entries or 'no'} ENTRY computation in the program, which begins {text[:100]!r}")
    return Program(computations, entries[0], _number_after("num_partitions=", header), "is_scheduled=true" in header)


def _number_after(key: str, header: str) -> int:
    """Return the number after `key` in a header; XLA leaves out a number of 1."""
    found = re.search(rf"{key}(\d+)", header)
    if found is None:
        return 1
    return int(found[1])


def called(computations: Computations, caller: Instruction) -> list[tuple[str, str]]:
    """Return (attribute, computation) for each computation that an instruction calls."""
    found = []
    # Every attribute counts that names a computation, so that no call is missed because of an unknown attribute.
    for role, names in CALLS.findall(caller.rest):
        # Control predecessors are instructions, which may be named as a computation is.
        if role == "control-predecessors":
            continue
        found += [(role, name) for name in re.split(", ?", names) if name in computations]
    return found


def trips(computations: Computations, loop: Instruction) -> int | None:
    """Return how often a loop turns, or None where that is not known.

    XLA notes the number if it knows it. Otherwise a condition that is only `counter < constant` has the number as its
    bound, since loops count from 0 by ones.
    """
    known = TRIPS.search(loop.rest)
    if known:
        return int(known[1])
    name = dict(called(computations, loop))["condition"]
    condition = _with_callees(computations, name)
    # Leave out instructions that only pass values on.
    steps = sorted(one.opcode for one in condition if one.opcode not in ("parameter", "get-tuple-element", "fusion"))
    less = any("direction=LT" in one.rest for one in condition)
    if steps != ["compare", "constant"] or not less:
        return None
    (constant,) = (one for one in condition if one.opcode == "constant")
    bound = re.match(r"\d+(?=\))", constant.rest)
    if bound is None:
        return None
    return int(bound[0])


def _with_callees(computations: Computations, name: str) -> list[Instruction]:
    """Return the instructions of a computation and of its callees, such as the bodies of fusions."""
    found = []
    for instruction in computations[name]:
        found.append(instruction)
        for _, callee in called(computations, instruction):
            found += _with_callees(computations, callee)
    return found


def first_operand(instruction: Instruction) -> str | None:
    """Return the name of the first operand, or None without operands.

    The name keeps the `%` in front, as in the text of the program.
    """
    name = NAME.search(instruction.rest)
    if name is None:
        return None
    return name[0]


def results(instruction: Instruction) -> list[tuple[str, tuple[int, ...]]]:
    """Return (dtype, shape) of each array that a collective makes.

    Raises `ValueError` unless there is one result for each operand: anything else has been read wrong.
    """
    made = instruction.type
    members = _parts(instruction.type.removeprefix("("))
    # A `-start` has the type (operands, results, ...), except that all-reduce of jaxlib 0.10 has only results.
    only_results = instruction.opcode == "all-reduce-start" and not members[0].startswith("(")
    if instruction.opcode.endswith("-start") and not only_results:
        made = members[1] if len(members) > 1 else ""
    found = arrays(made)
    if len(found) != len(operands(instruction)):
        shown = f"{instruction.type[:150]} {instruction.opcode}({instruction.rest[:150]}"
        raise ValueError(f"a collective of a form that is not known here: {shown}")
    return found


def operands(instruction: Instruction) -> list[str]:
    """Return the names of the operands; of a parameter, its number."""
    return _parts(instruction.rest)


def arrays(made: str) -> list[tuple[str, tuple[int, ...]]]:
    """Return the arrays of a type: `(f32[2,3]{1,0}, (s32[], s32[]))` -> [("f32", (2, 3)), ("s32", ()), ("s32", ())]."""
    if made.startswith("("):
        return [array for member in _parts(made[1:]) for array in arrays(member)]
    match = ARRAY.fullmatch(made)
    if match is None:
        raise ValueError(f"the type of an array that cannot be read: {made[:300]!r}")
    dtype, shape = match.groups()
    return [(dtype, tuple(_numbers(shape)))]


def _parts(text: str) -> list[str]:
    """Split `text` at its commas, up to the bracket that closes more than `text` opens; brackets keep theirs."""
    parts = [""]
    depth = 0
    for character in COMMENT.sub("", text):
        if character in "([{":
            depth += 1
        elif character in ")]}":
            depth -= 1
        if depth < 0:
            break
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts if part.strip()]


def bytes_of(dtype: str) -> int:
    """Return the bytes of one element.

    Raises `ValueError` for an unknown dtype, and for one of less than a byte, which has two ways to lie in memory.
    """
    if dtype.startswith("f8e"):
        return 1
    if dtype in BYTES:
        return BYTES[dtype]
    raise ValueError(f"a collective moves {dtype}, whose size is not known here")


def pairs(attributes: str) -> np.ndarray:
    """Return [pairs, 2]: the source and the target of each message.

    `attributes` belong to a collective-permute. Raises `ValueError` where its pairs cannot be read.
    """
    match = PAIRS.search(attributes)
    if match is None:
        raise ValueError(f"no source_target_pairs that can be read: {attributes[:300]}")
    return np.asarray(_numbers(match[1]), int).reshape(-1, 2)


def groups(attributes: str, devices: int) -> np.ndarray:
    """Return [groups, devices of a group], from any of the notations of HLO."""
    notation = attributes.partition("replica_groups=")[2]
    if notation.startswith("{}") and "channel_id=" not in attributes:
        raise ValueError(
            f"a collective of all replicas of one partition, which jax.jit does not make: {attributes[:300]}"
        )
    listed = LISTED.match(notation)
    if listed:
        found = [_numbers(group) for group in re.findall(r"\{([\d,]*)\}", listed[1])]
        # An empty list is one group of all devices.
        return np.asarray(found or [list(range(devices))])
    shaped = SHAPED.match(notation)
    if shaped:
        shape, counted, order = shaped.groups()
        return _iota(counted, order).reshape(_numbers(shape))
    named = NAMED.match(notation)
    if named:
        return _named(*named.groups())
    raise ValueError(f"replica_groups in a notation that is not known here: {notation[:300] or attributes[:300]}")


def _iota(shape: str, order: str | None) -> np.ndarray:
    """Return `[2,4]T(1,0)`: 0, 1, 2 ... of shape (2, 4), transposed, flat."""
    counted = np.arange(math.prod(_numbers(shape))).reshape(_numbers(shape))
    if order:
        counted = counted.transpose(_numbers(order))
    return counted.reshape(-1)


def _named(axes: str, ids: str | None, grouped: str) -> np.ndarray:
    """Return the groups of `mesh['a'=2,'b'=8], device_ids=(...) {'a','b':(2)4}`.

    The mesh is XLA's own, whose axis names need not be ours. `'b':(2)4` is the part of axis b, seen as 2 x 4 x the
    rest, that has size 4.
    """
    names, texts, _, _ = zip(*AXIS.findall(axes), strict=True)
    sizes = [int(size) for size in texts]
    # Coordinates of each device outside its group: along an axis of the group, only the part that the group leaves.
    outside = np.indices(sizes).reshape(len(sizes), -1)
    members = 1
    for name, _, before, part in AXIS.findall(grouped):
        axis = names.index(name)
        part = int(part or sizes[axis])
        stride = sizes[axis] // (int(before or 1) * part)
        outside[axis] -= outside[axis] // stride % part * stride
        members *= part
    return _device_ids(ids, math.prod(sizes))[np.lexsort(outside)].reshape(-1, members)


def _device_ids(ids: str | None, devices: int) -> np.ndarray:
    """Return the numbers of a mesh's devices, listed as `0,1,2` or as `[2,4]T(1,0)`; without `ids`, in order."""
    if ids is None:
        return np.arange(devices)
    iota = re.fullmatch(IOTA, ids)
    if iota:
        return _iota(*iota.groups())
    return np.asarray([int(device) for device in ids.split(",")])


def _numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]
