"""Whether what follows a loop waits for its end, which XLA:CPU does not see to by itself.

XLA:CPU starts the collectives of a program in the order of its text, and a loop counts as started before it has ended:
a collective behind it may run between those in the loop. Those of the same devices then wait for each other, or take
each other's messages for their own. `parallel.region.after` makes the one wait for the other.
"""

from collections.abc import Callable, Iterator

from jaxdist.programs.hlo import COMMUNICATION
from jaxdist.programs.hlo_text import Instruction, Program, called, groups, operands, parse

LOOPS = ("while", "conditional", "call")

Sent = frozenset[bytes]
"""The groups of devices that communicate."""


def not_awaited(text: str) -> list[str]:
    """A sentence for each loop, and what communicates behind it in the same groups and does not wait for its end."""
    program = parse(text)
    sent = finder(program)
    found = []
    for body in program.computations.values():
        found += [f"{later.name} does not wait for {loop.name}" for loop, later in pairs(body, sent)]
    return found


def finder(program: Program) -> Callable[[Instruction], Sent]:
    """The groups in which an instruction, or what it calls, communicates."""
    known: dict[str, Sent] = {}

    def in_computation(name: str) -> Sent:
        if name not in known:
            known[name] = frozenset().union(*map(sent, program.computations[name]))
        return known[name]

    def sent(one: Instruction) -> Sent:
        if one.opcode in LOOPS:
            return frozenset().union(*(in_computation(name) for _, name in called(program.computations, one)))
        if not COMMUNICATION.match(one.opcode):
            return frozenset()
        # All devices meet for a permute, whatever its pairs are.
        if one.opcode == "collective-permute":
            return frozenset({b"all"})
        return frozenset({groups(one.rest, program.devices).tobytes()})

    return sent


def pairs(body: list[Instruction], sent: Callable[[Instruction], Sent]) -> Iterator[tuple[Instruction, Instruction]]:
    """The loops of a computation, and what is behind each, has groups in common, and does not depend on it."""
    awaits: dict[str, set[str]] = {}
    """The loops on whose results an instruction depends."""
    loops: dict[str, tuple[Instruction, Sent]] = {}
    for one in body:
        depends = set()
        for name in operands(one):
            depends |= awaits.get(name, set())
        own = sent(one)
        yield from ((loop, one) for name, (loop, before) in loops.items() if own & before and name not in depends)
        if own and one.opcode in LOOPS:
            loops[one.name] = one, own
            depends.add(one.name)
        awaits[one.name] = depends
