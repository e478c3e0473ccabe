"""The reader of compiled programs, as tests of communication use it."""

from collections import Counter
from collections.abc import Iterable

from jax.sharding import Mesh

from jaxdist.programs import hlo


def collectives(program: str, mesh: Mesh) -> list[hlo.Collective]:
    """Refuses collectives in a branch, which some devices may not take: how often they run is not known."""
    found = hlo.collectives(program, mesh)
    assert not [one for one in found if one.branch], "a collective in a branch"
    return found


def summary(found: Iterable[hlo.Collective]) -> dict[tuple[str, tuple[str, ...]], tuple[int, int]]:
    """Return (kind, axes) -> (calls, elements) of one execution."""
    calls: Counter[tuple[str, tuple[str, ...]]] = Counter()
    elements: Counter[tuple[str, tuple[str, ...]]] = Counter()
    for one in found:
        calls[one.kind, one.axes] += one.count
        elements[one.kind, one.axes] += one.count * one.elements
    return {key: (calls[key], elements[key]) for key in calls}
