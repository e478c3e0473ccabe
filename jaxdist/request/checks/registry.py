"""The list of checks of a configuration, to which the other modules of this folder add theirs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import NamedTuple

from jaxdist.config import Config
from jaxdist.request.knobs import KNOBS

Find = Callable[[Config], Iterator[str]]


class Check(NamedTuple):
    """A check. `find` yields a sentence for each problem among the knobs that it `reads`.

    It is skipped if one of these knobs is invalid already.
    """

    reads: tuple[str, ...]
    find: Find


CHECKS: list[Check] = []


def check(*reads: str) -> Callable[[Find], Find]:
    """Return a decorator that adds a function to `CHECKS`."""
    assert all(name in KNOBS for name in reads), reads

    def add(find: Find) -> Find:
        CHECKS.append(Check(reads, find))
        return find

    return add


def problems(config: Config, good: Collection[str]) -> list[str]:
    """Return a sentence for each problem found by the checks that read only knobs in `good`."""
    good = set(good)
    return [problem for reads, find in CHECKS if good.issuperset(reads) for problem in find(config)]
