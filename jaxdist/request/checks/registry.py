"""The list of checks of a configuration, to which the other modules of this folder add theirs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import NamedTuple

from jaxdist.config import Config, RequestError
from jaxdist.mesh import AXES, FILL, requested
from jaxdist.mesh.split import Split
from jaxdist.request.knobs import KNOBS

Find = Callable[[Config], Iterator[str]]

Fit = Callable[[Split], Iterator[str]]


class Check(NamedTuple):
    """A check. `find` yields a sentence for each problem among the knobs that it `reads`.

    It is skipped if one of these knobs is invalid already.
    """

    reads: tuple[str, ...]
    find: Fit


CHECKS: list[Check] = []


def check(*reads: str) -> Callable[[Find], Find]:
    """Return a decorator that adds a function to `CHECKS`."""
    assert all(name in KNOBS for name in reads), reads

    def add(find: Find) -> Find:
        CHECKS.append(Check(reads, lambda split: find(split.config)))
        return find

    return add


def problems(config: Config, good: Collection[str]) -> list[str]:
    """Return a sentence for each problem found by the checks that read only knobs in `good`."""
    good = set(good)
    shape = _requested_shape(config.mesh) if "mesh" in good else dict.fromkeys(AXES, 1)
    split = Split(config, shape)
    return [problem for reads, find in CHECKS if good.issuperset(reads) for problem in find(split)]


def _requested_shape(mesh: str) -> dict[str, int]:
    """Return a mesh as far as the request determines it: 1 for the axis to fill, or for all if the text is wrong."""
    try:
        shape = requested(mesh)
    except RequestError:
        return dict.fromkeys(AXES, 1)
    return {axis: 1 if size == FILL else size for axis, size in shape.items()}
