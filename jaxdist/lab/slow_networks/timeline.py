"""When workers compute, cross and wait: synchronous steps, local steps, late gradients. A model of time, in fractions.

One rule makes all three. A worker makes the steps of a round, the round's result crosses the network when the last
worker has finished it, and the worker begins a round only when the result of `delay` + 1 rounds before is there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple


class Bar(NamedTuple):
    """A worker's step, or a crossing of the network."""

    start: Fraction
    end: Fraction
    round: int


@dataclass(frozen=True)
class Timeline:
    """What happens when, in units of a fast worker's step."""

    steps: tuple[tuple[Bar, ...], ...]
    """For each worker, its steps."""
    crossings: tuple[Bar, ...]
    """The crossing of each round; of no length if crossing takes no time."""

    @property
    def time(self) -> Fraction:
        """When the last result has crossed."""
        return self.crossings[-1].end

    @property
    def idle(self) -> Fraction:
        """The share of the time in which a worker waits, on average."""
        busy = sum((bar.end - bar.start for worker in self.steps for bar in worker), Fraction(0))
        return 1 - busy / (len(self.steps) * self.time)


def simulate(
    durations: Sequence[Fraction],
    steps: Sequence[int],
    rounds: int,
    crossing: Fraction = Fraction(0),
    delay: int = 0,
) -> Timeline:
    """Return the timeline of some rounds.

    Worker w makes `steps[w]` steps of `durations[w]` in each round. `delay` 0: the next round waits for the result of
    this one; 1: for that of the round before, so that crossing and computing overlap.
    """
    free = [Fraction(0)] * len(durations)
    made: list[list[Bar]] = [[] for _ in durations]
    crossings: list[Bar] = []
    for round in range(rounds):
        wanted = round - 1 - delay
        released = crossings[wanted].end if wanted >= 0 else Fraction(0)
        for worker, duration in enumerate(durations):
            start = max(free[worker], released)
            for _ in range(steps[worker]):
                made[worker].append(Bar(start, start + duration, round))
                start += duration
            free[worker] = start
        # One network: a crossing also waits for the one before.
        begin = max([*free, *(bar.end for bar in crossings[-1:])])
        crossings.append(Bar(begin, begin + crossing, round))
    return Timeline(tuple(map(tuple, made)), tuple(crossings))
