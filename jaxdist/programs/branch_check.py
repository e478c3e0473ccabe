"""Find collectives in branches that not all pipeline ranks take: a deadlock, or silently wrong numbers.

In zero-bubble schedules (Qi et al. 2024) each rank of a pipeline takes branches of its own. There a collective is legal
only if each of its groups lies within one rank. A collective-permute never is: in one process, XLA:CPU makes all
devices meet for it, whatever its pairs are, and on GPUs it may be one clique of all of them.

This reads the compiled program, because XLA adds permutes of its own and moves operations into branches, which the
traced program does not show.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from jax.sharding import AbstractMesh, Mesh

from jaxdist.mesh import PIPELINE
from jaxdist.parallel.pipeline.executor import SHARED
from jaxdist.programs.hlo_text import Instruction, Program, called, groups, parse

PERMUTES = ("collective-permute", "send", "recv")
GROUPED = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-broadcast")


def across_ranks(program: str, mesh: Mesh | AbstractMesh) -> list[str]:
    """Return a sentence for each collective that breaks the rule in `program`, the text of a compiled one.

    Ranks may take the branches of a conditional differently, unless the executor has marked it as shared.
    """
    parsed = parse(program)
    coordinates = np.unravel_index(np.arange(mesh.size), tuple(mesh.shape.values()))
    ranks = coordinates[mesh.axis_names.index(PIPELINE)]
    problems = {one.name: _problem(one, ranks) for one in _in_branches(parsed)}
    return sorted(problem for problem in problems.values() if problem)


def _in_branches(program: Program) -> Iterator[Instruction]:
    """Yield all instructions in branches of conditionals that ranks may take differently."""
    waiting = []
    for body in program.computations.values():
        for one in body:
            if one.opcode == "conditional" and f'{SHARED}/cond"' not in one.rest:
                waiting += _callees(program, one)
    seen = set()
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        for one in program.computations[name]:
            yield one
            waiting += _callees(program, one)


def _callees(program: Program, caller: Instruction) -> list[str]:
    return [name for _, name in called(program.computations, caller)]


def _problem(one: Instruction, ranks: np.ndarray) -> str:
    """Return what is wrong with an instruction in such a branch, or an empty string."""
    kind = one.opcode.removesuffix("-start")
    if kind in PERMUTES:
        return f"{one.name} is a {kind} in a branch that pipeline ranks take differently: all devices meet there"
    if kind not in GROUPED:
        return ""
    # [groups, devices of a group]: the pipeline rank of each device
    members = ranks[groups(one.rest, len(ranks))]
    differs = (members != members[:, :1]).any(1)
    if not differs.any():
        return ""
    return (
        f"{one.name} is an {kind} in a branch that pipeline ranks take differently, between devices of ranks "
        f"{np.unique(members[differs][0]).tolist()}"
    )
