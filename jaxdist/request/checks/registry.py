"""The list of checks of a configuration, to which the other modules of this folder add theirs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import NamedTuple

from jaxdist.config import Config
from jaxdist.request.knobs import KNOBS, value_of

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


def unused(config: Config, name: str, because: str) -> Iterator[str]:
    """Refuse a value of the knob `name` that differs from its default; `because` is what does not use it.

    Yields one sentence, or none.
    """
    value = value_of(config, name)
    default = KNOBS[name].default
    if value != default:
        yield (
            f"{name} is {_written(value)}, but {because} does not use it; leave it out "
            f"(its default is {_written(default)})"
        )


def _written(value: object) -> str:
    """Return a value as a user writes it, or `empty`."""
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) or "empty"
