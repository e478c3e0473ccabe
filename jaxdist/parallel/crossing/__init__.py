"""What crosses the replicas, how and when: one rule of a run (`Crossing`), made of what the request asks for."""

from __future__ import annotations

from jaxdist.config import Config
from jaxdist.parallel.crossing.base import Alone, Crossing
from jaxdist.parallel.crossing.compressed import Compressed, compression
from jaxdist.parallel.crossing.delayed import Delayed
from jaxdist.parallel.crossing.outer import Outer


def crossing_of(config: Config, replicas: int) -> Crossing:
    """Return the rule of a run on so many replicas; without them gradients are neither compressed nor late."""
    sums = _sums(config, replicas)
    if config.train.local_steps:
        optimizer = config.optimizer
        return Outer(sums, config.train.local_steps, optimizer.outer_rate, optimizer.outer_momentum)
    if config.parallel.delayed_gradients and replicas > 1:
        return Delayed(sums)
    return sums


def _sums(config: Config, replicas: int) -> Crossing:
    """Return how the replicas' parts are added up."""
    rule = compression(config.parallel)
    if replicas == 1:
        return Alone()
    return Compressed(rule, replicas) if rule else Crossing(replicas)
