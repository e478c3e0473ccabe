"""The phases of a run's mixture: from which row on which weights hold. Nothing here imports numpy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from jaxdist.config.mixture import MixtureConfig

MILLION = 10**6


@dataclass(frozen=True)
class Phase:
    """Weights that hold from a row on."""

    start: int
    """The first row; 0 for the first phase."""
    weights: Mapping[str, float]
    """By the names of sources; they need not add up to 1. A source that is not named has none."""


def phases_of(mixture: MixtureConfig, steps: int, batch: int) -> list[Phase]:
    """Return the phases in a run of so many steps, with `batch` rows each."""
    return [Phase(mixture.steps_before(phase, steps) * batch, mixture.weights(phase)) for phase in mixture.phases]


def same_phases(one: Sequence[Phase], other: Sequence[Phase]) -> bool:
    """Return whether two lists of phases give the same rows: weights count by their shares."""
    return [(phase.start, _shares(phase)) for phase in one] == [(phase.start, _shares(phase)) for phase in other]


def continued(before: Sequence[Phase], asked: Sequence[Phase], row: int) -> list[Phase]:
    """Return the phases of a run that had those `before`, and has those that are `asked` for from a row on.

    A phase whose shares stay the same goes on as it is.
    """
    kept = [phase for phase in before if phase.start < row]
    now = next(phase for phase in reversed(asked) if phase.start <= row)
    if not kept or _shares(kept[-1]) != _shares(now):
        kept.append(Phase(row, now.weights))
    return [*kept, *(phase for phase in asked if phase.start > row)]


def _shares(phase: Phase) -> dict[str, int]:
    """Return the share of each source that has one, in millionths."""
    names = sorted(name for name, weight in phase.weights.items() if weight)
    return dict(zip(names, millionths([Fraction(str(phase.weights[name])) for name in names]), strict=True))


def millionths(weights: Sequence[Fraction]) -> list[int]:
    """Return whole millionths of the sum of the weights, which add up to a million: the method of largest remainders.

    Of equal remainders the first ones are rounded up.
    """
    total = sum(weights)
    assert total > 0, "a phase without weights"
    exact = [weight * MILLION / total for weight in weights]
    parts = [int(part) for part in exact]
    by_remainder = sorted(range(len(parts)), key=lambda i: (parts[i] - exact[i], i))
    for i in by_remainder[: MILLION - sum(parts)]:
        parts[i] += 1
    return parts
