"""Search for the best way to train a model on a cluster, and keep why the other candidates were rejected."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from jaxdist.config import FAMILIES, Config, RequestError
from jaxdist.config.stacks import forms_of
from jaxdist.mesh import FAST, MODEL, PIPELINE, REPLICA, crossing, describe
from jaxdist.models import Model, build_decoder
from jaxdist.planning.clusters import Cluster, check_sites
from jaxdist.planning.search import advice
from jaxdist.planning.search.candidates import REMATS, Columns, candidate_config, candidates, meshes, row_of
from jaxdist.planning.search.estimate import Estimate, estimate
from jaxdist.planning.search.screen import Screen, best
from jaxdist.planning.transfer_time import misplaced

TIE = 0.05
"""Times that differ by less count as equal: the model of time is no better than that."""

BLOCK = 64
"""Candidates that are predicted exactly before the search looks again whether enough of them fit."""

ENOUGH_FIT = 12
"""Candidates that fit, after which no more are predicted."""

MOST_PREDICTED = 512
"""Candidates that are predicted exactly, at most."""

ROOM = 1.1
"""The rough memory over that of a device, up to which a candidate may still be predicted exactly."""

ZERO_ORDER = (0, 2, 1, 3)
"""ZeRO's stages, simplest first: with micro-batches inside the layers, stage 2 moves no more than stages 0 and 1, and
holds less than stage 1."""

MOST_ROWS = 2**18
"""Rows of a global batch at most: the tables of pipelines grow with the micro-batches, and take 10 seconds here."""


@dataclass(frozen=True)
class Plan:
    """The candidates of a search with their rough figures, and the exact predictions of the best ones."""

    config: Config
    devices: int
    cluster: Cluster
    model: Model
    columns: Columns
    rough_memory: np.ndarray
    rough_seconds: np.ndarray
    """Infinite for candidates that the rough memory rejects."""
    looked_at: tuple[Estimate, ...] = ()
    """The candidates that were predicted exactly: the fastest in the rough estimate, whether they fit or not."""

    @cached_property
    def exact(self) -> Plan:
        """The plan with the loss of one device: this one, where the user asks for nothing that changes it."""
        if not crossing.asked(self.config).name:
            return self
        return search(crossing.exact(self.config), self.devices, self.cluster)

    def predicted(self, row: int) -> Estimate:
        """Return the exact prediction of a candidate."""
        return estimate(candidate_config(self.config, row_of(self.columns, row)), self.model, self.cluster)

    @cached_property
    def ranked(self) -> list[Estimate]:
        """The candidates that fit: ties for the fastest by simplicity, then the others by time.

        Each mesh and ZeRO stage appears once.
        """
        tied = [candidate for candidate in self.fitting if self.tied(candidate)]
        others = [candidate for candidate in self.fitting if not self.tied(candidate)]
        return _first_of_each_kind([*sorted(tied, key=complexity), *others])

    @cached_property
    def fitting(self) -> list[Estimate]:
        """The predicted candidates that fit, fastest first."""
        fitting = (candidate for candidate in self.looked_at if candidate.fits)
        return sorted(fitting, key=lambda candidate: candidate.seconds)

    def slower(self, candidate: Estimate) -> float:
        """Return the time of a candidate over that of the fastest."""
        return candidate.seconds / self.fitting[0].seconds

    def tied(self, candidate: Estimate) -> bool:
        """Return whether a candidate is as fast as the fastest, within what the model can distinguish."""
        return self.slower(candidate) <= 1 + TIE

    @property
    def rejected(self) -> Counter[str]:
        """The number of rejected candidates by reason: `memory`, or `slower`."""
        # Candidates that were predicted and fit are not rejected, though not all of them are ranked.
        may_fit = int(np.isfinite(self.rough_seconds).sum())
        too_large = len(self.rough_seconds) - may_fit
        slower = may_fit - len(self.looked_at)
        unfit = sum(not candidate.fits for candidate in self.looked_at)
        return Counter({"memory": too_large + unfit, "slower": slower})


def search(config: Config, devices: int, cluster: Cluster) -> Plan:
    """Rank the ways to train `config` on a number of devices of `cluster`.

    Raises `RequestError` for options that the predictions do not cover, and where nothing fits, with what would.
    """
    check_covered(config)
    check_sites(cluster, devices)
    config = config.with_precision(cpu=cluster.gpu == "cpu")
    model = build_decoder(config.model)
    shapes = meshes(config, devices)
    if not shapes:
        raise RequestError(advice.no_mesh(config, devices, cluster))
    columns = candidates(config, shapes, cluster.sites(devices))
    screen = Screen(config, model, cluster, columns)
    memory = screen.memory()
    may_fit = np.flatnonzero(memory <= ROOM * cluster.memory)
    seconds = np.full(len(memory), np.inf)
    seconds[may_fit] = screen.of(may_fit).seconds()
    plan = Plan(config, devices, cluster, model, columns, memory, seconds)
    plan = replace(plan, looked_at=tuple(_predict_best(plan)))
    if not plan.ranked:
        refused = [candidate.refused for candidate in plan.looked_at if candidate.refused]
        if refused:
            raise RequestError(refused[0])
        smallest = min(plan.looked_at, key=lambda candidate: candidate.memory.total)
        raise RequestError(advice.nothing_fits(config, devices, cluster, smallest))
    return plan


def check_covered(config: Config) -> None:
    """Raise `RequestError` for options that the predictions do not cover."""
    if config.model.images:
        decoders = ", ".join(name for name, traits in FAMILIES.items() if traits.text)
        raise RequestError(
            f"plan knows models of text, and model.family is {config.model.family}; use one of {decoders}"
        )
    if forms := forms_of(config.model):
        raise RequestError(
            f"plan knows layers of one form, and those of model.family {config.model.family} are {forms}; name a mesh, "
            f"and --dry-run predicts it"
        )
    rows = config.train.global_batch_size
    if rows > MOST_ROWS:
        raise RequestError(f"plan takes {MOST_ROWS:,} rows per step at most; lower train.global_batch_size {rows:,}")
    other = [f"parallel.rules.{dim} '{axis}'" for dim, axis in config.parallel.rules if axis != MODEL]
    if other:
        raise RequestError(f"plan splits tensors by the default rules, but {', '.join(other)} is set; leave it out")


def _predict_best(plan: Plan) -> list[Estimate]:
    """Predict the fastest candidates of the rough estimate until enough fit; if none does, the smallest ones too."""
    found: list[Estimate] = []
    order = best(plan.rough_seconds, MOST_PREDICTED)
    for start in range(0, len(order), BLOCK):
        found += [plan.predicted(row) for row in order[start : start + BLOCK]]
        if sum(candidate.fits for candidate in found) >= ENOUGH_FIT:
            break
    if not any(candidate.fits for candidate in found):
        # The rough estimate may be wrong about the smallest ones; the error message also needs them.
        smallest = np.argsort(plan.rough_memory, kind="stable")[:BLOCK]
        found += [plan.predicted(int(row)) for row in smallest]
    return found


def complexity(candidate: Estimate) -> tuple[int, ...]:
    """Return a sort key, simplest first in the order of the lecture.

    Data parallelism comes before ZeRO 2, then expert, context and tensor parallelism, then a pipeline. A
    mesh that crosses sites by `replica` alone comes before all others, and only the loss of one device comes before
    that. Where replicas change the loss, fewer of them come first.
    """
    config = candidate.config
    shape = candidate.shape
    staged = shape[PIPELINE] > 1
    changing = shape[REPLICA] if crossing.in_force(config, shape) else 0
    return (
        changing,
        len(misplaced(shape, candidate.cluster)),
        int(staged),
        *(int(shape[axis] > 1) for axis in reversed(FAST)),
        int(shape[REPLICA] > 1),
        ZERO_ORDER.index(config.parallel.zero),
        REMATS.index(config.model.remat),
        int(config.parallel.sequence),
        config.pipeline.virtual if staged else 1,
        candidate.micro,
    )


def _first_of_each_kind(found: list[Estimate]) -> list[Estimate]:
    """Return the first candidate of each mesh and ZeRO stage."""
    kinds: dict[tuple, Estimate] = {}
    for candidate in found:
        kinds.setdefault((describe(candidate.shape), candidate.config.parallel.zero), candidate)
    return list(kinds.values())
