"""The list of checks, and the words that they share."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import NamedTuple

from jaxdist.config import Config
from jaxdist.request.knobs import KNOBS, value_of

Find = Callable[[Config], Iterator[str]]


class Check(NamedTuple):
    """`find` yields a sentence for each mistake that `reads` make; left out when one of these is wrong already."""

    reads: tuple[str, ...]
    find: Find


CHECKS: list[Check] = []


def check(*reads: str) -> Callable[[Find], Find]:
    """Add a function to `CHECKS`."""
    assert all(name in KNOBS for name in reads), reads

    def add(find: Find) -> Find:
        CHECKS.append(Check(reads, find))
        return find

    return add


def problems(config: Config, good: Collection[str]) -> list[str]:
    """A sentence for each mistake among the knobs in `good`."""
    return [problem for reads, find in CHECKS if set(reads) <= set(good) for problem in find(config)]


def unused(config: Config, name: str, because: str) -> Iterator[str]:
    """Refuses a value of the knob `name` that is not its default."""
    value, default = value_of(config, name), KNOBS[name].default
    if value != default:
        yield f"{name} is {value}, but {because} makes no use of it; leave it out (its default is {default})"


def remedy(*options: str) -> str:
    """`set a to 4 or 8, or b to 6`; options that are empty are left out."""
    return "set " + ", or ".join(option for option in options if option)


def to(name: str, sizes: Iterable[int]) -> str:
    """`model.heads to 4 or 8`; empty without sizes."""
    text = " or ".join(map(str, sizes))
    return text and f"{name} to {text}"


def multiples(unit: int, near: int) -> list[int]:
    """The multiples of `unit` next to `near`."""
    below = near // unit * unit
    return [multiple for multiple in (below, below + unit) if multiple]


def divisors(number: int) -> list[int]:
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def closest(sizes: Iterable[int], size: int) -> list[int]:
    """The neighbours of `size` among `sizes`, which ascend."""
    sizes = list(sizes)
    return [*[n for n in sizes if n < size][-1:], *[n for n in sizes if n > size][:1]]
