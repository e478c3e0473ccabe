"""Answers of a plan: why a mesh is not the first, and what one axis alone would do."""

from __future__ import annotations

import math

import numpy as np

from jaxdist.mesh import BATCH_AXES, DATA, PIPELINE, REPLICA, SEQUENCE_AXES, MeshShape, describe, fill, parse_mesh
from jaxdist.mesh.split import Split
from jaxdist.output import units
from jaxdist.planning.certainty import tie
from jaxdist.planning.search.candidates import MESH, problems, why_not_planned
from jaxdist.planning.search.estimate import Estimate, label
from jaxdist.planning.search.plan import BLOCK, Plan
from jaxdist.planning.search.risk import difference, risk
from jaxdist.planning.step_time import PESSIMISTIC

LEAST = 4
"""Candidates that are predicted exactly to find the least memory of a mesh."""


def why_not(plan: Plan, mesh: str) -> str:
    """Return why a mesh is not the first, whatever else is chosen with it.

    Raises `RequestError` for text that is no mesh of the plan's devices.
    """
    shape = fill(parse_mesh(mesh), plan.devices)
    found = problems(plan.config.with_knobs({"mesh": mesh}), shape)
    if found:
        return f"{mesh} is not possible: " + "; ".join(found)
    rows = rows_of(plan, shape)
    ranks = math.prod(shape[axis] for axis in BATCH_AXES)
    if not len(rows) and ranks == shape[REPLICA] > 1:
        plain = f"{DATA}={shape[REPLICA]}"
        return f"{mesh} is not possible: with nothing sharded, replicas are plain data parallelism; ask for {plain}"
    not_planned = why_not_planned(Split(plan.config, shape))
    if not len(rows) and not_planned:
        return f"{mesh} is not planned: {not_planned}"
    if not len(rows):
        batch = plan.config.train.global_batch_size
        return f"{mesh} is not possible: {ranks} data ranks do not share {batch} rows evenly"
    # Predicted anew: the search may have predicted none of this mesh.
    candidate = _fastest(plan, rows)
    if candidate is None:
        least = smallest(plan, rows)
        if least.refused:
            return f"{mesh} is not possible: {least.refused}"
        return f"{mesh} does not fit: at least {units.size(least.memory.total)} ({label(least)}): {_held(least)}"
    if describe(candidate.shape) == describe(plan.ranked[0].shape):
        return f"{mesh} is the first: {label(candidate)}"
    return _why_second(plan, mesh, candidate)


def _why_second(plan: Plan, mesh: str, candidate: Estimate) -> str:
    """Return why the best candidate of a mesh that fits is not the first."""
    first = plan.ranked[0]
    if not plan.tied(candidate):
        ours, theirs = first.at(PESSIMISTIC), candidate.at(PESSIMISTIC)
        more = max(theirs, key=lambda part: theirs[part] - ours[part])
        return (
            f"{mesh} takes {plan.slower(candidate):.2f} times as long as the fastest: {label(candidate)}; most of the "
            f"difference is {more}, {theirs[more]:.3g} s against {ours[more]:.3g} s of {label(first)}"
        )
    if risk(candidate) < risk(first):
        reason = "and was overlooked in the rough estimate"
    else:
        reason = f"but beside {label(first)}, {difference(first, candidate)}"
    margin = tie(candidate.kind, plan.fitting[0].kind)
    return f"{mesh} is as fast within {margin:.0%} ({label(candidate)}), {reason}"


def _held(candidate: Estimate) -> str:
    parts = (candidate.memory.persistent | candidate.memory.transient).items()
    return ", ".join(f"{name} {units.size(count)}" for name, count in parts if count)


def alone(plan: Plan) -> list[tuple[str, Estimate | str]]:
    """Return for each axis the best way to use all devices on it alone, or why there is none.

    Where nothing fits, that is the candidate with the least memory.
    """
    found: list[tuple[str, Estimate | str]] = []
    one = dict.fromkeys(plan.ranked[0].shape, 1)
    for axis in (*dict(Split(plan.config, one).grown(plan.devices)), PIPELINE):
        shape = one | {axis: plan.devices}
        rows = rows_of(plan, shape)
        if len(rows):
            found.append((axis, _fastest(plan, rows) or smallest(plan, rows)))
        elif axis not in SEQUENCE_AXES:
            config = plan.config.with_knobs({"mesh": f"{axis}={plan.devices}"})
            found.append((axis, "; ".join(problems(config, shape)) or "the batch does not divide"))
    return found


def fastest_with_replicas(plan: Plan) -> Estimate | None:
    """Return the fastest candidate with replicas that fits, or None."""
    return _fastest(plan, np.flatnonzero(plan.columns[REPLICA] > 1))


def rows_of(plan: Plan, shape: MeshShape) -> np.ndarray:
    """Return the indices of the candidates with this mesh."""
    return np.flatnonzero(np.all([plan.columns[axis] == shape[axis] for axis in MESH], axis=0))


def _fastest(plan: Plan, rows: np.ndarray) -> Estimate | None:
    """Return the fastest of these candidates that fits, or None."""
    order = rows[np.argsort(plan.rough_seconds[rows], kind="stable")]
    allowed = [row for row in order if np.isfinite(plan.rough_seconds[row])][:BLOCK]
    predicted = (plan.predicted(row) for row in allowed)
    fitting = [candidate for candidate in predicted if candidate.fits]
    return min(fitting, key=lambda candidate: candidate.pessimistic, default=None)


def smallest(plan: Plan, rows: np.ndarray) -> Estimate:
    """Return the candidate with the least memory, of those in `rows` that need the least in the rough estimate."""
    order = rows[np.argsort(plan.rough_memory[rows], kind="stable")][:LEAST]
    return min((plan.predicted(int(row)) for row in order), key=lambda candidate: candidate.memory.total)
