"""What is done every so many steps, and the rounds of steps after which it is looked at.

With local steps a round ends where replicas meet; otherwise it is one step.
"""

from __future__ import annotations

from collections.abc import Iterator


def due(steps: range, every: int) -> bool:
    """Return whether what is done `every` so many steps, 0 for never, is due after the round of `steps`."""
    return every > 0 and any(step % every == 0 for step in steps)


def rounds(first: int, last: int, every: int) -> Iterator[range]:
    """Yield the steps after `first` up to `last`, in rounds that end with the multiples of `every`, and `last`."""
    while first < last:
        end = min(last, first - first % every + every)
        yield range(first + 1, end + 1)
        first = end


def round_until(step: int, every: int) -> range:
    """Return the steps of the round that ends with `step`."""
    return range(step - (step - 1) % every, step + 1)
