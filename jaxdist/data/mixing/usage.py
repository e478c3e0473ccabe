"""How much of each source of a mixture a run reads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from jaxdist.data.mixing.mixture import Mixture

MOST_EPOCHS = 4
"""Epochs of a source above which a warning is due: repeated data teach less and less (Muennighoff et al. 2023)."""


LISTED = 20
"""Sources that have a line in the summary at most."""

WARNED = 3
"""Sources that have a warning at most."""


class Usage(NamedTuple):
    """What a run reads of a source."""

    name: str
    share: float
    """Part of all rows of the run."""
    epochs: float

    def __str__(self) -> str:
        return f"{100 * self.share:.4g} % of the rows, {self.epochs:.2f} epochs"


def usages_of(mixture: Mixture, rows: int) -> list[Usage]:
    """Return what a run of so many rows reads of each source."""
    read = mixture.rows_before(rows).tolist()
    return [
        Usage(name, count / max(rows, 1), count / size)
        for name, count, size in zip(mixture.names, read, mixture.sizes.tolist(), strict=True)
    ]


def largest(usages: Sequence[Usage]) -> list[Usage]:
    """Return the sources that have a line of their own: the `LISTED` with the most rows, in their order."""
    most = sorted(usages, key=lambda usage: -usage.share)[:LISTED]
    return [usage for usage in usages if usage in most]


def warnings_of(usages: Sequence[Usage]) -> Iterator[str]:
    """Yield what to do about sources that are read too often, the worst first."""
    often = sorted((usage for usage in usages if usage.epochs > MOST_EPOCHS), key=lambda usage: -usage.epochs)
    for usage in often[:WARNED]:
        yield (
            f"'{usage.name}' is read {usage.epochs:.1f} times in this run, and repeated data teach less and less above "
            f"{MOST_EPOCHS} times; lower its weight, or give more of it"
        )
    if len(often) > WARNED:
        yield f"{len(often) - WARNED:,} more sources are read more than {MOST_EPOCHS} times"
