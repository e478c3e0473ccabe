"""The ways to train a model on a cluster, best first, and why the others are not among them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from jaxdist.config import Config, RequestError
from jaxdist.mesh import MODEL, PIPELINE, REPLICA, describe
from jaxdist.models import Model, build
from jaxdist.planning.clusters import Cluster
from jaxdist.planning.search import advice
from jaxdist.planning.search.candidates import REMATS, Columns, asked, candidates, meshes, row_of
from jaxdist.planning.search.estimate import Estimate, estimate
from jaxdist.planning.search.screen import Screen, best

TIE = 0.05
"""Times that differ by less are equal: the model is no better than that."""

LOOKED_AT, ENOUGH, MOST = 64, 12, 512
"""Candidates that are predicted parameter by parameter at a time; how many of them have to fit, before no more are; and
the most of all."""

ROOM = 1.1
"""How far beyond the memory a first look may be, and the candidate be looked at all the same."""

ZERO_ORDER = (0, 2, 1, 3)
"""ZeRO's stages, the one to try first before the others: with micro-batches inside the layers, stage 2 moves no more
than stages 0 and 1, and holds less than stage 1."""

MOST_ROWS = 2**18
"""Of a step: the tables of pipelines grow with their micro-batches, and with these they take 10 seconds."""


@dataclass(frozen=True)
class Plan:
    config: Config
    devices: int
    cluster: Cluster
    model: Model
    columns: Columns
    rough_memory: np.ndarray
    rough_seconds: np.ndarray
    looked_at: tuple[Estimate, ...] = ()
    """Of the candidates that are the fastest at first sight; those that fit, and those that do not."""

    def predicted(self, row: int) -> Estimate:
        """A candidate, parameter by parameter."""
        return estimate(asked(self.config, row_of(self.columns, row)), self.model, self.cluster)

    @cached_property
    def ranked(self) -> list[Estimate]:
        """Those that fit: the ties for the best by simplicity, then the others by time; one of each mesh and stage."""
        tied = [one for one in self.fitting if self.tied(one)]
        rest = [one for one in self.fitting if not self.tied(one)]
        return _one_of_each([*sorted(tied, key=complexity), *rest])

    @cached_property
    def fitting(self) -> list[Estimate]:
        """Those that were looked at and fit, the fastest first."""
        return sorted((one for one in self.looked_at if one.fits), key=lambda one: one.seconds)

    def slower(self, one: Estimate) -> float:
        """Times as long as the fastest."""
        return one.seconds / self.fitting[0].seconds

    def tied(self, one: Estimate) -> bool:
        """Whether it is as fast as the fastest, as far as can be told."""
        return self.slower(one) <= 1 + TIE

    @property
    def rejected(self) -> Counter[str]:
        """How many candidates were not looked at, by reason."""
        over = int(np.sum(self.rough_memory > ROOM * self.cluster.memory))
        slower = len(self.rough_memory) - over - len(self.looked_at)
        return Counter({"memory": over + sum(not one.fits for one in self.looked_at), "slower": slower})


def search(config: Config, devices: int, cluster: Cluster) -> Plan:
    """Raises `RequestError` for what the predictions leave out, and where nothing fits, with what would."""
    check_known(config)
    config = settled(config, cluster.gpu)
    model = build(config.model)
    shapes = meshes(config, devices)
    if not shapes:
        raise RequestError(advice.no_mesh(config, devices, cluster))
    columns = candidates(config, shapes)
    screen = Screen(config, model, cluster, columns)
    plan = Plan(config, devices, cluster, model, columns, screen.memory(), screen.seconds())
    plan = replace(plan, looked_at=tuple(_look(plan)))
    if not plan.ranked:
        raise RequestError(advice.nothing_fits(config, devices, cluster, nearest_to_fit(plan)))
    return plan


def check_known(config: Config) -> None:
    if config.model.images:
        raise RequestError(f"plan knows models of text, and model.family is {config.model.family}; use gpt or llama")
    if (rows := config.train.global_batch_size) > MOST_ROWS:
        raise RequestError(f"plan looks at {MOST_ROWS:,} rows a step at most; lower train.global_batch_size {rows:,}")
    if other := [f"parallel.rules.{dim} '{axis}'" for dim, axis in config.parallel.rules if axis != MODEL]:
        raise RequestError(f"plan splits tensors by the usual rules, and here {', '.join(other)} is set; leave it out")


def settled(config: Config, gpu: str) -> Config:
    """With the precision that `auto` means there."""
    if config.precision != "auto":
        return config
    return config.model_copy(update={"precision": "float32" if gpu == "cpu" else "bfloat16"})


def _look(plan: Plan) -> list[Estimate]:
    """The fastest at first sight, until enough of them fit; where none does, those that need the least memory."""
    found: list[Estimate] = []
    order = best(plan.rough_seconds, plan.rough_memory <= ROOM * plan.cluster.memory, MOST)
    while order and sum(one.fits for one in found) < ENOUGH:
        block, order = order[:LOOKED_AT], order[LOOKED_AT:]
        found += [plan.predicted(row) for row in block]
    if not any(one.fits for one in found):
        smallest = np.argsort(plan.rough_memory, kind="stable")[:LOOKED_AT]
        found += [plan.predicted(int(row)) for row in smallest]
    return found


def complexity(one: Estimate) -> tuple[int, ...]:
    """What is simplest first, as the lecture advises: data parallelism; ZeRO 2; tensors inside a node; a pipeline."""
    config, shape = one.config, one.shape
    zero = ZERO_ORDER.index(config.parallel.zero)
    remat = REMATS.index(config.model.remat)
    return (
        int(shape[PIPELINE] > 1),
        int(shape[MODEL] > 1),
        int(shape[REPLICA] > 1),
        zero,
        remat,
        int(config.parallel.sequence),
        config.pipeline.virtual if shape[PIPELINE] > 1 else 1,
        one.micro,
    )


def _one_of_each(found: list[Estimate]) -> list[Estimate]:
    seen: dict[tuple, Estimate] = {}
    for one in found:
        seen.setdefault((describe(one.shape), one.config.parallel.zero), one)
    return list(seen.values())


def nearest_to_fit(plan: Plan) -> Estimate:
    """The candidate that needs the least memory."""
    return min(plan.looked_at, key=lambda one: one.memory.total)
