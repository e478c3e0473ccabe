"""The text of a compiled program (HLO), as `jax.stages.Compiled.as_text()` of jaxlib 0.10 to 0.12 gives it.

What is written there, not what it means: computations, their instructions, who calls whom and how often, types, and
the groups of devices in each notation. What cannot be read raises `ValueError`: nothing is guessed.
"""

import math
import re
from typing import NamedTuple

import numpy as np

COMPUTATION = re.compile(r"(ENTRY )?(%[\w.\-]+) .*\{$")
INSTRUCTION = re.compile(r" +(?:ROOT )?(%[\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*)")
NAME = re.compile(r"%[\w.\-]+")
CALLS = re.compile(r"([\w\-]+)=\{?(%[\w.\-]+(?:, ?%[\w.\-]+)*)")
TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
COMMENT = re.compile(r"/\*.*?\*/")
ARRAY = re.compile(r"([a-z]\w*)\[([\d,]*)\](?:\{[^{}]*\})?")

PAIRS = re.compile(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}")
LISTED = re.compile(r"\{((?:\{[\d,]*\},?)*)\}(?=, |$)")
IOTA = r"\[([\d,]+)\](?:T\(([\d,]+)\))?"
SHAPED = re.compile(rf"\[([\d,]+)\]<={IOTA}(?=, |$)")
NAMED = re.compile(r"mesh\[([^\]]*)\](?:, device_ids=\(([\d,]+|\[.*?\].*?)\))? \{([^}]*)\}(?=, |$)")
AXIS = re.compile(r"'?([^',=:]+)'?(?:=(\d+)|:\((\d+)\)(\d+))?(?:,|$)")

BYTES = {f"{kind}{8 * size}": size for kind in "suf" for size in (1, 2, 4, 8)}
BYTES |= {"pred": 1, "bf16": 2, "c64": 8, "c128": 16}


class Instruction(NamedTuple):
    name: str
    type: str
    opcode: str
    rest: str
    """Operands and attributes."""


Computations = dict[str, list[Instruction]]


class Program(NamedTuple):
    computations: Computations
    entry: str
    devices: int
    scheduled: bool
    """The instructions of a computation stand in the order in which they run."""


def parse(text: str) -> Program:
    """Raises where a line is not understood, where there is not one ENTRY, and for programs of several replicas."""
    header = text.partition("\n")[0]
    if (re.search(r"replica_count=(\d+)", header) or [0, "1"])[1] != "1":
        raise ValueError(f"the program is for several replicas, which jax.jit does not make: {header[:100]!r}")
    computations, entries = {}, []
    for line in text.splitlines():
        if opening := COMPUTATION.match(line):
            current = computations[opening[2]] = []
            entries += [opening[2]] if opening[1] else []
        elif instruction := INSTRUCTION.match(line):
            current.append(Instruction(*instruction.groups()))
        elif line.startswith(" "):
            raise ValueError(f"an instruction that cannot be read: {line[:300]}")
    if len(entries) != 1:
        raise ValueError(f"{entries or 'no'} ENTRY computation in the program, which begins {text[:100]!r}")
    devices = int((re.search(r"num_partitions=(\d+)", header) or [0, 1])[1])
    return Program(computations, entries[0], devices, "is_scheduled=true" in header)


def called(computations: Computations, caller: Instruction) -> list[tuple[str, str]]:
    """(attribute, computation), whatever the attribute, so that no call is missed for its name."""
    pairs = [(role, name) for role, names in CALLS.findall(caller.rest) for name in re.split(", ?", names)]
    return [(role, name) for role, name in pairs if name in computations and role != "control-predecessors"]


def trips(computations: Computations, loop: Instruction) -> int | None:
    """What XLA knows; else the bound of a condition that is `counter < constant` alone, counted from 0 by ones.

    None where neither tells.
    """
    if known := TRIPS.search(loop.rest):
        return int(known[1])
    condition = list(computations[dict(called(computations, loop))["condition"]])
    for instruction in condition:  # grows by what its fusions hold
        condition += [inner for _, name in called(computations, instruction) for inner in computations[name]]
    steps = sorted(one.opcode for one in condition if one.opcode not in ("parameter", "get-tuple-element", "fusion"))
    bounds = [re.match(r"\d+(?=\))", one.rest) for one in condition if one.opcode == "constant"]
    less = any("direction=LT" in one.rest for one in condition)
    return int(bounds[0][0]) if steps == ["compare", "constant"] and less and None not in bounds else None


def first_operand(instruction: Instruction) -> str | None:
    """Its name."""
    name = NAME.search(instruction.rest)
    return name[0] if name else None


def results(instruction: Instruction) -> list[tuple[str, int]]:
    """(dtype, elements) of each array that a collective makes.

    A `-start` has the type (operands, results, ...), but all-reduce of jaxlib 0.10 only results. There is a result for
    each operand: what breaks this has been read wrong, and raises.
    """
    made, members = instruction.type, _parts(instruction.type.removeprefix("("))
    plain = instruction.opcode == "all-reduce-start" and not members[0].startswith("(")
    if instruction.opcode.endswith("-start") and not plain:
        made = members[1] if len(members) > 1 else ""
    found = arrays(made)
    if len(found) != len(operands(instruction)):
        raise ValueError(f"a collective of a form that is not known here: {_shown(instruction)}")
    return [(dtype, math.prod(shape)) for dtype, shape in found]


def _shown(instruction: Instruction) -> str:
    return f"{instruction.type[:150]} {instruction.opcode}({instruction.rest[:150]}"


def operands(instruction: Instruction) -> list[str]:
    """Their names; of a parameter, its number."""
    return _parts(instruction.rest)


def arrays(made: str) -> list[tuple[str, tuple[int, ...]]]:
    """`(f32[2,3]{1,0}, (s32[], s32[]))` -> [("f32", (2, 3)), ("s32", ()), ("s32", ())]."""
    if made.startswith("("):
        return [array for member in _parts(made[1:]) for array in arrays(member)]
    if match := ARRAY.fullmatch(made):
        return [(match[1], tuple(_numbers(match[2])))]
    raise ValueError(f"the type of an array that cannot be read: {made[:300]!r}")


def _parts(text: str) -> list[str]:
    """What stands between the commas of `text`, up to the bracket that closes more than `text` opens."""
    parts, depth = [""], 0
    for character in COMMENT.sub("", text):
        depth += (character in "([{") - (character in ")]}")
        if depth < 0:
            break
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts if part.strip()]


def bytes_of(dtype: str) -> int:
    """Of one element. Those of less than a byte have two ways to lie in memory: they raise, as unknown ones do."""
    if dtype in BYTES or dtype.startswith("f8e"):
        return BYTES.get(dtype, 1)
    raise ValueError(f"a collective moves {dtype}, whose size is not known here")


def pairs(attributes: str) -> np.ndarray:
    """[pairs, 2]: source and target."""
    if match := PAIRS.search(attributes):
        return np.asarray(_numbers(match[1]), int).reshape(-1, 2)
    raise ValueError(f"no source_target_pairs that can be read: {attributes[:300]}")


def groups(attributes: str, devices: int) -> np.ndarray:
    """[groups, devices of a group], from any of the notations of HLO."""
    notation = attributes.partition("replica_groups=")[2]
    if notation.startswith("{}") and "channel_id=" not in attributes:
        raise ValueError(
            f"a collective of all replicas of one partition, which jax.jit does not make: {attributes[:300]}"
        )
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
