"""Counts the arithmetic of a compiled program's matmuls, attention by cuDNN left out."""

import json
import math
import re

from jaxdist.programs.hlo_text import Instruction, Program, arrays, called, operands, parse, trips

CONTRACTED = re.compile(r"lhs_contracting_dims=\{([\d,]*)\}")
IN_LIBRARY = re.compile(r'"lhs_contracting_dimensions":(\[[^\]]*\])')


def product_flops(program: str) -> int:
    """FLOPs of one device in one execution: two for each number of a result and each place contracted."""
    parsed = parse(program)
    return _of_computation(parsed, parsed.entry)


def _of_computation(program: Program, name: str) -> int:
    body = program.computations[name]
    types = {one.name: one.type for one in body}
    total = 0
    for one in body:
        total += _of_product(one, types)
        turns = trips(program.computations, one) if one.opcode == "while" else 1
        for _, callee in called(program.computations, one):
            inside = _of_computation(program, callee)
            assert turns is not None or not inside, "a matmul in a loop of unknown length"
            total += inside * (turns or 0)
    return total


def _of_product(one: Instruction, types: dict[str, str]) -> int:
    listed = CONTRACTED.search(one.rest) if one.opcode == "dot" else None
    in_library = IN_LIBRARY.search(one.rest) if "__cublas$" in one.rest else None
    if listed:
        dims = [int(dim) for dim in listed[1].split(",")]
    elif in_library:
        dims = [int(dim) for dim in json.loads(in_library[1])]
    else:
        return 0
    _, left = arrays(types[operands(one)[0]])[0]
    _, made = arrays(one.type)[0]
    return 2 * math.prod(made) * math.prod(left[dim] for dim in dims)
