"""The messages of a compiled program: who sends how much to whom, after which others, and how long that takes.

A collective-permute is one message for each of its pairs. A message waits for those that its source has received and
that it is made of; what other nodes do with the same instruction does not hold it up. Its round is one more than the
last of those: so several collective-permutes, each of which allows a target one source only, can make one round.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from jax.sharding import AbstractMesh, Mesh

from jaxdist.planning.hlo import collectives
from jaxdist.planning.hlo_text import CALLS, NAME, Instruction, bytes_of, pairs, parse, results
from jaxdist.planning.predicted_collectives import PERMUTE

LABEL = re.compile(r'op_name="([^"]*)"')


class Message(NamedTuple):
    source: int
    """Of the devices, by their place in the mesh."""
    target: int
    bytes: int
    after: tuple[int, ...]
    """The messages that it waits for, by their place in the program."""
    round: int
    """From 1."""
    label: str
    """What JAX calls the operation, with the scopes that it is in."""


def messages(program: str, mesh: Mesh | AbstractMesh) -> Traffic:
    """Of one execution, in the order of the program.

    Raises `ValueError` where there is communication of another kind, or in a loop: it would be left out.
    """
    found: list[Message] = []
    arrived: dict[tuple[str, int], int] = {}  # (permute, target) -> message
    made_of: dict[str, set[str]] = {}  # instruction -> the permutes whose results it can contain
    parsed = parse(program)
    permutes = 0
    for instruction in parsed.computations[parsed.entry]:
        parts = set().union(*(made_of[name] for name in _operands(instruction, made_of)))
        if instruction.opcode.removesuffix("-start") == PERMUTE:
            permutes += 1
            size, label = _carried(instruction)
            for source, target in pairs(instruction.rest).tolist():
                after = tuple(sorted(arrived[part, source] for part in parts if (part, source) in arrived))
                turn = 1 + max((found[one].round for one in after), default=0)
                arrived[instruction.name, target] = len(found)
                found.append(Message(source, target, size, after, turn, label))
            parts = {instruction.name}
        made_of[instruction.name] = parts
    there = collectives(program, mesh)
    if {one.kind for one in there} - {PERMUTE} or sum(one.count for one in there) != permutes:
        told = ", ".join(f"{one.count} x {one.kind}" for one in there)
        raise ValueError(f"{permutes} {PERMUTE}s can be told in messages, but the program runs {told}")
    return Traffic(tuple(found))


def _operands(instruction: Instruction, known: Mapping[str, object]) -> list[str]:
    """Those in the same computation; what only must come first is none."""
    return [name for name in NAME.findall(CALLS.sub("", instruction.rest)) if name in known]


def _carried(permute: Instruction) -> tuple[int, str]:
    """Bytes of each of its messages, and its label."""
    label = LABEL.search(permute.rest)
    return sum(elements * bytes_of(dtype) for dtype, elements in results(permute)), label[1] if label else ""


@dataclass(frozen=True)
class Traffic:
    """All messages of a program, counted."""

    messages: tuple[Message, ...]

    @property
    def rounds(self) -> int:
        return max(message.round for message in self.messages)

    @property
    def peak(self) -> int:
        """Most messages into one node in one round."""
        return max(Counter((message.target, message.round) for message in self.messages).values())

    @property
    def bytes(self) -> int:
        return sum(message.bytes for message in self.messages)

    @cached_property
    def sent(self) -> Counter[int]:
        """Node -> bytes."""
        return self._bytes("source")

    @cached_property
    def received(self) -> Counter[int]:
        """Node -> bytes."""
        return self._bytes("target")

    def _bytes(self, end: str) -> Counter[int]:
        count = Counter()
        for message in self.messages:
            count[getattr(message, end)] += message.bytes
        return count

    def seconds(self, alpha: float, beta: float) -> float:
        """Until the last message has arrived, in the alpha-beta model (Hockney 1994; Thakur et al. 2005).

        `alpha` is the latency in seconds, `beta` the seconds of a byte. A node can send and receive at the same time,
        but only one message each way: those of a round share its port, not their latency. Adding costs nothing.
        """
        sends, receives, there = defaultdict(float), defaultdict(float), []
        for message in self.messages:
            ready = max((there[one] for one in message.after), default=0.0)
            start = max(ready, sends[message.source], receives[message.target])
            sends[message.source] = receives[message.target] = start + beta * message.bytes
            there.append(start + alpha + beta * message.bytes)
        return max(there)
