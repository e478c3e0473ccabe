"""Read the messages of a compiled program: who sends how many bytes to whom, after which others, and how long it takes.

A collective-permute is one message for each of its pairs. A message waits for the messages that its source has received
and that its data is made of; what other nodes do with the same instruction does not delay it. Its round is one more
than the last round of those messages. So several collective-permutes can form one round, although each of them allows
a target only one source.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from jax.sharding import AbstractMesh, Mesh

from jaxdist.planning.predicted_collectives import PERMUTE
from jaxdist.programs.hlo import collectives
from jaxdist.programs.hlo_text import CALLS, NAME, Instruction, bytes_of, pairs, parse, results

LABEL = re.compile(r'op_name="([^"]*)"')


class Message(NamedTuple):
    """One message between two devices, which are counted by their place in the mesh."""

    source: int
    target: int
    bytes: int
    after: tuple[int, ...]
    """The messages that it waits for, by their place in the program."""
    round: int
    """Counted from 1."""
    label: str
    """What JAX calls the operation, with the scopes that it is in."""

    @property
    def send(self) -> int:
        """The number of the call of `Network.send` that it is of."""
        return int(re.search(r"\bsend(\d+)", self.label)[1])


def messages(program: str, mesh: Mesh | AbstractMesh) -> Traffic:
    """Return the messages of one execution of a compiled program, in the order of the program.

    Raises `ValueError` if the program communicates in another way, or in a loop, which would not be counted.
    """
    found: list[Message] = []
    # (permute, target) -> the message that it brought.
    arrived: dict[tuple[str, int], int] = {}
    # Instruction -> the permutes whose results it can contain.
    made_of: dict[str, set[str]] = {}
    parsed = parse(program)
    permutes = 0
    for instruction in parsed.computations[parsed.entry]:
        # What an instruction is made of, by data flow: the permutes that its operands are made of.
        parts = set().union(*(made_of[name] for name in _operands(instruction, made_of)))
        if instruction.opcode.removesuffix("-start") == PERMUTE:
            permutes += 1
            size, label = _carried(instruction)
            for source, target in pairs(instruction.rest).tolist():
                after = tuple(sorted(arrived[part, source] for part in parts if (part, source) in arrived))
                round = 1 + max((found[one].round for one in after), default=0)
                arrived[instruction.name, target] = len(found)
                found.append(Message(source, target, size, after, round, label))
            # The result is made of this permute alone: a node that it brings nothing to has zeros there, whatever that
            # node has received before.
            parts = {instruction.name}
        made_of[instruction.name] = parts
    # `collectives` counts what loops repeat, and every other kind: nothing may be missing from the messages.
    others = collectives(program, mesh)
    if {one.kind for one in others} - {PERMUTE} or sum(one.count for one in others) != permutes:
        runs = ", ".join(f"{one.count} x {one.kind}" for one in others)
        raise ValueError(f"{permutes} {PERMUTE}s can be read as messages, but the program runs {runs}")
    return Traffic(tuple(found))


def _operands(instruction: Instruction, known: Mapping[str, object]) -> list[str]:
    """Return the operands that are `known`; an instruction that only has to run first is no operand."""
    return [name for name in NAME.findall(CALLS.sub("", instruction.rest)) if name in known]


def _carried(permute: Instruction) -> tuple[int, str]:
    """Return the bytes of each message of a permute, and its label."""
    size = sum(math.prod(shape) * bytes_of(dtype) for dtype, shape in results(permute))
    label = LABEL.search(permute.rest)
    return size, "" if label is None else label[1]


@dataclass(frozen=True)
class Traffic:
    """All messages of a program, and what is counted of them."""

    messages: tuple[Message, ...]

    @property
    def rounds(self) -> int:
        """The rounds that the messages take."""
        return max(message.round for message in self.messages)

    @property
    def peak(self) -> int:
        """The most messages into one node in one round."""
        return max(Counter((message.target, message.round) for message in self.messages).values())

    @property
    def bytes(self) -> int:
        """The bytes of all messages."""
        return sum(message.bytes for message in self.messages)

    @cached_property
    def sent(self) -> Counter[int]:
        """Node -> bytes that it sends."""
        count = Counter()
        for message in self.messages:
            count[message.source] += message.bytes
        return count

    @cached_property
    def received(self) -> Counter[int]:
        """Node -> bytes that it receives."""
        count = Counter()
        for message in self.messages:
            count[message.target] += message.bytes
        return count

    def seconds(self, alpha: float, beta: float) -> float:
        """Return when the last message arrives, in the alpha-beta model (Hockney 1994; Thakur et al. 2005).

        `alpha` is the latency of a message in seconds, `beta` the seconds of a byte. Adding up costs nothing.
        """
        # A node can send and receive at the same time, but only one message each way. Messages that leave in one round
        # share its port, one after the other; their latencies pass together.
        sends = defaultdict(float)
        receives = defaultdict(float)
        arrivals = []
        for message in self.messages:
            ready = max((arrivals[one] for one in message.after), default=0.0)
            start = max(ready, sends[message.source], receives[message.target])
            end = start + beta * message.bytes
            sends[message.source] = end
            receives[message.target] = end
            arrivals.append(start + alpha + beta * message.bytes)
        return max(arrivals)
