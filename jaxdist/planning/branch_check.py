"""What waits for other pipeline ranks in a branch that not all of them take: a deadlock, or silently wrong numbers.

Where each rank of a pipeline goes its own way (zero-bubble schedules: Qi et al. 2024), a collective in a branch is
legal only if its groups lie within one rank. A collective-permute never is: in one process, XLA:CPU has all devices
meet for it, whatever its pairs are, and on GPUs it may be one clique of all of them. What jax has traced does not tell,
as XLA makes permutes of its own and moves operations into branches: so this reads the compiled program.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from jax.sharding import AbstractMesh, Mesh

from jaxdist.mesh import PIPELINE
from jaxdist.parallel.pipeline.executor import SHARED
from jaxdist.planning.hlo_text import Instruction, Program, called, groups, parse

PERMUTES = ("collective-permute", "send", "recv")
GROUPED = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-broadcast")


def across_ranks(program: str, mesh: Mesh | AbstractMesh) -> list[str]:
    """A sentence for each collective of `program`, the text of a compiled one, that breaks the rule.

    A conditional counts as taken differently unless the executor has named it as one that all take alike.
    """
    parsed = parse(program)
    ranks = np.unravel_index(np.arange(mesh.size), tuple(mesh.shape.values()))[mesh.axis_names.index(PIPELINE)]
    found = {one.name: told for one in _inside(parsed) if (told := _wrong(one, ranks))}
    return sorted(found.values())


def _inside(program: Program) -> Iterator[Instruction]:
    """All instructions that run in branches of conditionals that may be taken differently."""
    waiting = [
        name
        for body in program.computations.values()
        for one in body
        if one.opcode == "conditional" and f'{SHARED}/cond"' not in one.rest
        for _, name in called(program.computations, one)
    ]
    seen = set()
    while waiting:
        name = waiting.pop()
        if name not in seen:
            seen.add(name)
            yield from program.computations[name]
            waiting += [callee for one in program.computations[name] for _, callee in called(program.computations, one)]


def _wrong(one: Instruction, ranks: np.ndarray) -> str:
    """What is wrong with an instruction in such a branch, or nothing."""
    kind = one.opcode.removesuffix("-start")
    if kind in PERMUTES:
        return f"{one.name} is a {kind} in a branch that pipeline ranks take differently: all devices meet there"
    if kind in GROUPED:
        of = ranks[groups(one.rest, len(ranks))]
        if (of != of[:, :1]).any():
            return (
                f"{one.name} is an {kind} in a branch that pipeline ranks take differently, between devices of ranks "
                f"{np.unique(of[(of != of[:, :1]).any(1)][0]).tolist()}"
            )
    return ""
