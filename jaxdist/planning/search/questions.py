"""What a person asks of a plan: why not this mesh, what would one axis alone do, what do more devices bring?"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxdist import units
from jaxdist.config import Config, RequestError
from jaxdist.mesh import DATA, MODEL, PIPELINE, REPLICA, MeshShape, describe, fill, parse_mesh
from jaxdist.planning.clusters import Cluster
from jaxdist.planning.search.candidates import MESH, problems
from jaxdist.planning.search.estimate import Estimate, told
from jaxdist.planning.search.plan import LOOKED_AT, ROOM, TIE, Plan, complexity, search

LEAST = 4
"""Candidates that are predicted for the least memory of a mesh."""


def why_not(plan: Plan, mesh: str) -> str:
    """Why a mesh, whatever else is chosen with it, is not the first. Raises `RequestError` for what is no mesh."""
    shape = fill(parse_mesh(mesh), plan.devices)
    if found := problems(plan.config.model_copy(update={"mesh": mesh}), shape):
        return f"{mesh} cannot be: " + "; ".join(found)
    if shape[DATA] == 1 < shape[REPLICA]:
        plain = f"{DATA}={shape[REPLICA]}"
        return f"{mesh} cannot be: replicas of what nothing shards are plain data parallelism; ask for {plain}"
    rows = rows_of(plan, shape)
    if not len(rows):
        size = plan.config.train.global_batch_size
        return f"{mesh} cannot be: {shape[DATA] * shape[REPLICA]} data ranks do not share {size} rows evenly"
    first, best_one = plan.ranked[0], _best(plan, rows)
    if best_one is None:
        least = smallest(plan, rows)
        return f"{mesh} does not fit: at least {units.size(least.memory.total)} ({told(least)}): {_held(least)}"
    if describe(best_one.shape) == describe(first.shape):
        return f"{mesh} is the first: {told(best_one)}"
    more = max(best_one.parts, key=lambda part: best_one.parts[part] - first.parts[part])
    if plan.tied(best_one):
        simpler = complexity(best_one) < complexity(first)
        than = "and was overlooked at first sight" if simpler else f"but less simple than {told(first)}"
        return f"{mesh} is as fast within {TIE:.0%} ({told(best_one)}), {than}"
    return (
        f"{mesh} takes {plan.slower(best_one):.2f} times as long as the fastest: {told(best_one)}; most of it {more}, "
        f"{best_one.parts[more]:.3g} s against {first.parts[more]:.3g} s of {told(first)}"
    )


def _held(one: Estimate) -> str:
    parts = (one.memory.persistent | one.memory.transient).items()
    return ", ".join(f"{name} {units.size(count)}" for name, count in parts if count)


def alone(plan: Plan) -> list[tuple[str, Estimate | str]]:
    """Each way to use all devices on one axis: the best of it, or why there is none.

    What fits is not asked: of an axis that needs too much memory the smallest is told.
    """
    found: list[tuple[str, Estimate | str]] = []
    for axis in (DATA, MODEL, PIPELINE):
        shape = dict.fromkeys(plan.ranked[0].shape, 1) | {axis: plan.devices}
        rows = rows_of(plan, shape)
        if len(rows):
            found.append((axis, _best(plan, rows) or smallest(plan, rows)))
        else:
            config = plan.config.model_copy(update={"mesh": f"{axis}={plan.devices}"})
            found.append((axis, "; ".join(problems(config, shape)) or "the batch does not divide"))
    return found


def scaling(config: Config, counts: Sequence[int], cluster: Cluster) -> list[tuple[int, Estimate | str]]:
    """The first of the plan for each number of devices, at the same global batch; or why there is none."""
    found: list[tuple[int, Estimate | str]] = []
    for count in counts:
        try:
            found.append((count, search(config, count, cluster).ranked[0]))
        except RequestError as error:
            found.append((count, error.problems[0]))
    return found


def rows_of(plan: Plan, shape: MeshShape) -> np.ndarray:
    """Numbers of the candidates with this mesh."""
    return np.flatnonzero(np.all([plan.columns[axis] == shape[axis] for axis in MESH], axis=0))


def _best(plan: Plan, rows: np.ndarray) -> Estimate | None:
    """The fastest of these candidates that fits."""
    order = rows[np.argsort(plan.rough_seconds[rows], kind="stable")]
    allowed = [row for row in order if plan.rough_memory[row] <= ROOM * plan.cluster.memory][:LOOKED_AT]
    fitting = [one for one in (plan.predicted(row) for row in allowed) if one.fits]
    return min(fitting, key=lambda one: one.seconds, default=None)


def smallest(plan: Plan, rows: np.ndarray) -> Estimate:
    """The least memory that one of these candidates needs, predicted for those that need least at first sight."""
    order = rows[np.argsort(plan.rough_memory[rows], kind="stable")][:LEAST]
    return min((plan.predicted(int(row)) for row in order), key=lambda one: one.memory.total)
