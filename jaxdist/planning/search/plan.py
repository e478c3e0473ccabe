"""Search for the best way to train a model on a cluster, and keep why the other candidates were rejected."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from jaxdist.config import FAMILIES, Config, RequestError, scaled_loss
from jaxdist.mesh import CONTEXT, DATA, EXPERT, MODEL, PIPELINE, REPLICA, crossing, describe
from jaxdist.models import Model, build_decoder
from jaxdist.planning.certainty import tie
from jaxdist.planning.clusters import Cluster, check_sites
from jaxdist.planning.hardware import capability_of
from jaxdist.planning.search import advice
from jaxdist.planning.search.candidates import Columns, candidate_config, candidates, meshes, row_of
from jaxdist.planning.search.estimate import Estimate, estimate
from jaxdist.planning.search.risk import risk
from jaxdist.planning.search.screen import best, screen_of

BLOCK = 64
"""Candidates that are predicted exactly before the search looks again whether enough of them fit."""

VARIED = 32
"""Candidates of different meshes, ZeRO stages and recomputation that are predicted exactly in any case."""

ENOUGH_FIT = 12
"""Candidates that fit, after which no more are predicted."""

MOST_PREDICTED = 512
"""Candidates that are predicted exactly, at most."""

ROOM = 1.1
"""The rough memory over that of a device, up to which a candidate may still be predicted exactly."""

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
        """The candidates that fit: ties for the fastest by their risk, then the others by time.

        Each mesh and ZeRO stage appears once, whatever part of its data ranks are replicas.
        """
        tied = [candidate for candidate in self.fitting if self.tied(candidate)]
        others = [candidate for candidate in self.fitting if not self.tied(candidate)]
        return _first_of_each_kind([*sorted(tied, key=risk), *others])

    @cached_property
    def fitting(self) -> list[Estimate]:
        """The predicted candidates that fit, fastest first at the pessimistic price."""
        fitting = (candidate for candidate in self.looked_at if candidate.fits)
        return sorted(fitting, key=lambda candidate: candidate.pessimistic)

    def slower(self, candidate: Estimate) -> float:
        """Return the time of a candidate over that of the fastest, both at the pessimistic price."""
        return candidate.pessimistic / self.fitting[0].pessimistic

    def tied(self, candidate: Estimate) -> bool:
        """Return whether a candidate is as fast as the fastest, within what predictions can tell apart."""
        return self.slower(candidate) <= 1 + tie(candidate.kind, self.fitting[0].kind)

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

    Raises `RequestError` for options that the predictions do not cover, or these GPUs cannot compute, and where nothing
    fits, with what would.
    """
    check_covered(config)
    check_sites(cluster, devices)
    config = config.with_precision(cpu=cluster.gpu == "cpu", capability=capability_of(cluster.gpu))
    scaled_loss.check(config)
    model = build_decoder(config.model)
    shapes = meshes(config, devices)
    if not shapes:
        raise RequestError(advice.no_mesh(config, devices, cluster))
    columns = candidates(config, shapes, cluster.sites(devices))
    screen = screen_of(config, model, cluster, columns)
    memory = screen.memory()
    may_fit = np.flatnonzero(memory <= ROOM * cluster.memory)
    seconds = np.full(len(memory), np.inf)
    if len(may_fit):
        seconds[may_fit] = screen.of(may_fit).seconds(needed=memory[may_fit])
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
    rows = config.train.global_batch_size
    if rows > MOST_ROWS:
        raise RequestError(f"plan takes {MOST_ROWS:,} rows per step at most; lower train.global_batch_size {rows:,}")
    other = [f"parallel.rules.{dim} '{axis}'" for dim, axis in config.parallel.rules if axis != MODEL]
    if other:
        raise RequestError(f"plan splits tensors by the default rules, but {', '.join(other)} is set; leave it out")


def _varied(plan: Plan, order: list[int]) -> list[int]:
    """Return the candidates of these that differ most: the fastest of each mesh, ZeRO stage and recomputation.

    Beside the fastest of all, the choice is made among them.
    """
    columns = plan.columns
    names = (EXPERT, CONTEXT, MODEL, PIPELINE, "zero", "remat")
    # Where the loss depends on replicas, those without any are other plans.
    changing = bool(crossing.asked(plan.config).name)
    first: dict[tuple[int, ...], int] = {}
    for row in order:
        kind = tuple(int(columns[name][row]) for name in names)
        first.setdefault((*kind, int(changing and columns[REPLICA][row] > 1)), row)
    return list(first.values())[:VARIED]


def _predict_best(plan: Plan) -> list[Estimate]:
    """Predict the fastest candidates of the rough estimate until enough fit; if none does, the smallest ones too."""
    found: list[Estimate] = []
    order = best(plan.rough_seconds, MOST_PREDICTED)
    predicted = 0
    for start in range(0, len(order), BLOCK):
        found += [plan.predicted(row) for row in order[start : start + BLOCK]]
        predicted = start + BLOCK
        if sum(candidate.fits for candidate in found) >= ENOUGH_FIT:
            break
    looked_at = set(order[:predicted])
    found += [plan.predicted(row) for row in _varied(plan, order) if row not in looked_at]
    if not any(candidate.fits for candidate in found):
        # The rough estimate may be wrong about the smallest ones; the error message also needs them.
        smallest = np.argsort(plan.rough_memory, kind="stable")[:BLOCK]
        found += [plan.predicted(int(row)) for row in smallest]
    return found


def _first_of_each_kind(found: list[Estimate]) -> list[Estimate]:
    """Return the first candidate of each mesh and ZeRO stage.

    Meshes that differ in their replicas alone are one, unless the loss depends on replicas.
    """
    kinds: dict[tuple, Estimate] = {}
    for candidate in found:
        shape = candidate.shape
        if not candidate.in_force:
            shape = shape | {DATA: shape[DATA] * shape[REPLICA], REPLICA: 1}
        kinds.setdefault((describe(shape), candidate.in_force, candidate.config.parallel.zero), candidate)
    return list(kinds.values())
