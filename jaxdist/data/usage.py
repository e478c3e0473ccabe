"""How much of each source of a mixture a run reads."""

from __future__ import annotations

from typing import NamedTuple

from jaxdist.data.mixture import Mixture

MOST_EPOCHS = 4
"""Epochs of a source above which a warning is due: repeated data teach less and less (Muennighoff et al. 2023)."""


class Usage(NamedTuple):
    """What a run reads of a source."""

    name: str
    share: float
    """Part of all rows of the run."""
    epochs: float

    @property
    def warning(self) -> str:
        """What to do about a source that is read too often; empty for none."""
        if self.epochs <= MOST_EPOCHS:
            return ""
        return (
            f"'{self.name}' is read {self.epochs:.1f} times in this run, and repeated data teach less and less above "
            f"{MOST_EPOCHS} times; lower its weight, or give more of it"
        )

    def __str__(self) -> str:
        return f"{100 * self.share:.4g} % of the rows, {self.epochs:.2f} epochs"


def usages_of(mixture: Mixture, rows: int) -> list[Usage]:
    """Return what a run of so many rows reads of each source."""
    read = mixture.rows_before(rows).tolist()
    return [
        Usage(name, count / max(rows, 1), count / size)
        for name, count, size in zip(mixture.names, read, mixture.sizes.tolist(), strict=True)
    ]
