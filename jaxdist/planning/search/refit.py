"""Fit the constants of a step's time to steps that a user has measured on his own cluster.

Published steps say what machines like it reached (`rates`), and how far they leave each constant open. From there each
is drawn to what the user's steps say, by that spread: of a constant that none of them depends on, the published value
stays. A constant belongs to one kind of work, of which it is the factor.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jaxdist.config import RequestError
from jaxdist.models import build_decoder
from jaxdist.output.tables import table
from jaxdist.output.units import counted
from jaxdist.planning import rates
from jaxdist.planning.clusters import Cluster, efficiency_lines
from jaxdist.planning.hardware import GPUS, capability_of
from jaxdist.planning.least_squares import Problem
from jaxdist.planning.search.estimate import Estimate, estimate
from jaxdist.planning.search.plan import check_covered
from jaxdist.request.measured import Measured

WORK = {
    "matmul": "matmuls",
    "attention": "attention",
    "values": "all other kernels",
    "tensor": "collectives over `model`",
    "network": "weights and gradients",
    "messages": "messages between stages",
    "update": "the optimizer",
    "step": "every step",
}
"""Constant -> the kind of work of which it is the factor."""

NOISE = 0.03
"""The spread of the logarithm of a measured time around a model that is right for this cluster."""

OF_MACHINES = 0.3
"""How far a machine may be from published ones, relative, beside how far these leave a constant open."""

OF_CPUS = 1.5
"""The same of CPUs, of which nothing is published."""

LARGE = 1.0
"""The error of a logarithm from which on a measured step counts linearly: no printed time, which may be misread."""


@dataclass(frozen=True)
class Constant:
    """A constant that was fitted."""

    name: str
    published: float
    value: float
    spread: float
    """How far the steps leave it open, relative."""
    was_open: float
    """How far it was without them. Where the steps do not depend on it, it stays as open, and where it was."""


@dataclass(frozen=True)
class Refit:
    """A cluster with constants of its own, and what they come from."""

    cluster: Cluster
    constants: list[Constant]
    steps: list[Measured]
    before: np.ndarray
    """Predicted over measured of each step, by the published constants."""
    after: np.ndarray
    """By those of this cluster."""


def refit(cluster: Cluster, steps: Sequence[Measured]) -> Refit:
    """Fit the constants of a cluster. Raises `RequestError` for steps of other devices, or that no plan covers."""
    check_steps(cluster, steps)
    found = [_estimate(one, cluster) for one in steps]
    base = {name: getattr(rates.published_rates(cluster.gpu), name) for name in WORK}
    # On CPUs, of which nothing is published, some are 0: not there.
    names = [name for name, value in base.items() if value]
    mean = np.log([base[name] for name in names])
    machine = OF_CPUS if cluster.gpu == "cpu" else OF_MACHINES
    spread = np.hypot([_spread(name) for name in names], machine)
    took = np.log([one.seconds for one in steps])

    def residuals(theta: np.ndarray) -> np.ndarray:
        own = _with(cluster, dict(zip(names, np.exp(theta).tolist(), strict=True)))
        return np.log([one.seconds_on(own) for one in found]) - took

    problem = Problem(residuals, np.full(len(steps), NOISE**-2), mean, spread, LARGE)
    theta = problem.solve()
    each = zip(names, np.exp(theta).tolist(), problem.open(theta).tolist(), spread.tolist(), strict=True)
    constants = [Constant(name, base[name], value, now, was) for name, value, now, was in each]
    fitted = _with(cluster, {one.name: one.value for one in constants})
    measured = np.exp(took)
    before, after = ([one.seconds_on(where) for one in found] for where in (_with(cluster, {}), fitted))
    return Refit(fitted, constants, list(steps), np.array(before) / measured, np.array(after) / measured)


def lines(found: Refit) -> Iterator[str]:
    """Yield what was fitted for people, and the lines of a cluster file."""
    rows = [("constant", "of", "published", "spread", "fitted", "spread")]
    for one in found.constants:
        before = (f"{one.published:.3g}", f"{one.was_open:.0%}")
        rows.append((one.name, WORK[one.name], *before, f"{one.value:.3g}", f"{one.spread:.0%}"))
    yield from table(rows)
    yield ""
    count = counted(len(found.steps), "step")
    yield (
        f"fitted      to {count} of your own: {_error(found.before):.1%} off on average before, "
        f"{_error(found.after):.1%} after; the intervals are those of published steps"
    )
    yield ""
    yield from file_lines(found)


def file_lines(found: Refit) -> list[str]:
    """Return the table of a cluster file that has the constants, with their spread."""
    return efficiency_lines(found.cluster.efficiency, {one.name: f"spread {one.spread:.0%}" for one in found.constants})


def file_text(found: Refit, base: str) -> str:
    """Return a cluster file: what differs from `base`, a shipped cluster or another file."""
    source = f"fitted by python -m jaxdist.plan --fit to {counted(len(found.steps), 'step')}"
    named = [f"base = {json.dumps(base)}", f"sources = {json.dumps([source])}"]
    return "\n".join([*named, "", *file_lines(found)]) + "\n"


def as_json(found: Refit) -> dict[str, Any]:
    """Return the object that `docs/reference/json.md` describes."""
    return {
        "constants": [
            {"name": one.name, "published": one.published, "value": one.value, "spread": one.spread}
            for one in found.constants
        ],
        "steps": [
            {"name": one.name, "seconds": one.seconds, "before": before, "after": after}
            for one, before, after in zip(found.steps, found.before.tolist(), found.after.tolist(), strict=True)
        ],
    }


def _error(ratios: np.ndarray) -> float:
    return float(np.abs(ratios - 1).mean())


def check_steps(cluster: Cluster, steps: Sequence[Measured]) -> None:
    """Raise `RequestError` for steps that did not run on the devices of this cluster, or that no plan covers."""
    known = GPUS.get(cluster.gpu)
    kind = known.kind if known else cluster.gpu
    problems = []
    for one in steps:
        if kind.lower() not in one.device.lower():
            problems.append(
                f"{one.name} was measured on '{one.device}', and the devices of {cluster.name} are '{kind}'; leave it "
                f"out, or name with --cluster what it was measured on"
            )
            continue
        try:
            check_covered(one.config)
        except RequestError as error:
            problems += [f"{one.name}: {problem}" for problem in error.problems]
    if problems:
        raise RequestError(*problems)


def _estimate(one: Measured, cluster: Cluster) -> Estimate:
    config = one.config.with_precision(cpu=cluster.gpu == "cpu", capability=capability_of(cluster.gpu))
    return estimate(config, build_decoder(config.model), cluster)


def _with(cluster: Cluster, constants: dict[str, float]) -> Cluster:
    """Return the cluster with these constants, and no others of its own."""
    return replace(cluster, efficiency=tuple(constants.items()))


def _spread(name: str) -> float:
    """Return how far published steps leave a constant open: of several GPUs, that of which least is known."""
    found = rates.table()[name]["spread"]
    return max(found.values()) if isinstance(found, dict) else found
