"""Whether what follows a loop waits for its end, which XLA:CPU does not see to by itself.

XLA:CPU starts the collectives of a program in the order of its text, and a loop counts as started before it has ended:
a collective behind it may run between those in the loop. `parallel.region.after` makes the one wait for the other.
"""

from collections.abc import Callable, Iterator

from jaxdist.programs.hlo import COMMUNICATION
from jaxdist.programs.hlo_text import Instruction, Program, called, operands, parse

CONDITIONAL = "conditional"
LOOPS = ("while", CONDITIONAL, "call")


def not_awaited(text: str) -> list[str]:
    """A sentence for each loop with collectives, and collective or such loop behind it, that does not wait for it."""
    program = parse(text)
    communicates = finder(program)
    found = []
    for body in program.computations.values():
        found += [f"{later.name} does not wait for {loop.name}" for loop, later in pairs(body, communicates)]
    return found


def finder(program: Program) -> Callable[[Instruction], bool]:
    """Whether an instruction, or what it calls, is a collective."""
    known: dict[str, bool] = {}

    def in_computation(name: str) -> bool:
        if name not in known:
            known[name] = any(map(communicates, program.computations[name]))
        return known[name]

    def communicates(one: Instruction) -> bool:
        if one.opcode in LOOPS:
            return any(in_computation(name) for _, name in called(program.computations, one))
        return bool(COMMUNICATION.match(one.opcode))

    return communicates


def pairs(
    body: list[Instruction], communicates: Callable[[Instruction], bool]
) -> Iterator[tuple[Instruction, Instruction]]:
    """The loops of a computation, and what communicates behind each without depending on it."""
    awaits: dict[str, set[str]] = {}
    """The loops on whose results an instruction depends."""
    loops: list[Instruction] = []
    for one in body:
        depends = set()
        for name in operands(one):
            depends |= awaits.get(name, set())
        if communicates(one):
            yield from ((loop, one) for loop in loops if loop.name not in depends)
            if one.opcode in LOOPS:
                loops.append(one)
                depends.add(one.name)
        awaits[one.name] = depends
