"""What crosses the replicas, how and when: one rule of a run (`Crossing`), made of what the request asks for."""

from __future__ import annotations

from collections.abc import Callable

from jaxdist.config import Config
from jaxdist.mesh.crossing import CrossingTraits, Late, Rounds, asked
from jaxdist.parallel.crossing.base import Alone, Crossing
from jaxdist.parallel.crossing.codes import compression
from jaxdist.parallel.crossing.compressed import Compressed
from jaxdist.parallel.crossing.delayed import Delayed
from jaxdist.parallel.crossing.outer import Outer


def crossing_of(config: Config, replicas: int) -> Crossing:
    """Return the rule of a run on `replicas` replicas; without them gradients are neither compressed nor late."""
    rule = compression(config.parallel)
    sums = Crossing(replicas)
    if replicas == 1:
        sums = Alone()
    elif rule:
        sums = Compressed(rule, replicas)
    return TIMES[type(asked(config))](sums, config)


def with_replicas(config: Config) -> Crossing:
    """Return the rule of a mesh with replicas, for questions whose answer does not depend on how many."""
    return crossing_of(config, 2)


def _on_time(sums: Crossing, config: Config) -> Crossing:
    return sums


def _late(sums: Crossing, config: Config) -> Crossing:
    return Delayed(sums) if sums.replicas > 1 else sums


def _in_rounds(sums: Crossing, config: Config) -> Crossing:
    rule = config.optimizer
    return Outer(sums, config.train.local_steps, rule.outer_rate, rule.outer_momentum)


TIMES: dict[type[CrossingTraits], Callable[[Crossing, Config], Crossing]] = {
    CrossingTraits: _on_time,
    Late: _late,
    Rounds: _in_rounds,
}
"""When gradients cross, by what is asked for."""
