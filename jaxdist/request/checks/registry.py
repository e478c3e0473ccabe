"""The list of checks, and the words that they share."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
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
