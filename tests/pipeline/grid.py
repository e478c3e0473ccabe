"""All schedules that the tests look at."""

from itertools import product

from jaxdist.config.pipeline import SCHEDULES

STAGES, MICRO_BATCHES, VIRTUAL = (1, 2, 3, 4, 8), (1, 2, 3, 5, 8, 11), (1, 2, 3)


def exists(name: str, v: int) -> bool:
    traits = SCHEDULES[name]
    return v >= traits.chunks and (v == 1 or traits.several)


NAMES = [(name, v) for name, v in product(SCHEDULES, VIRTUAL) if exists(name, v)]

GRID = [(name, S, M, v) for (name, v), S, M in product(NAMES, STAGES, MICRO_BATCHES)]
"""(name, S, M, v)."""
