"""All legal ways to split a training step over a number of devices, as columns of numbers with one row per candidate.

The asynchronous pipeline (PipeDream) is not proposed, because it learns something else. The axis `expert` is for models
with experts: for others it would be `data` by another name. The axis `context` is for rows of which each device still
has a part of `SHORTEST_PART` tokens; `jaxdist.mesh.context` decides which form of attention runs over it. The `replica`
axis holds the ranks over which ZeRO does not shard, so that it makes a difference only from ZeRO 1 on, or where the
user asks for something that depends on replicas (`mesh.crossing`).
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product

import numpy as np

from jaxdist.config import Config, RequestError
from jaxdist.config.pipeline import SCHEDULES as TRAITS
from jaxdist.config.stacks import most_chunks
from jaxdist.mesh import (
    AXES,
    BATCH_AXES,
    CONTEXT,
    DATA,
    EXPERT,
    MODEL,
    PIPELINE,
    POSITIONS,
    REPLICA,
    ZERO_AXES,
    MeshShape,
    crossing,
)
from jaxdist.mesh.context import SHORTEST_PART
from jaxdist.mesh.split import Split
from jaxdist.output.units import divisors
from jaxdist.planning.search.distinct import map_distinct
from jaxdist.request.checks import check_mesh_fits

Columns = dict[str, np.ndarray]
"""Name -> a number for each candidate: those of `CHOSEN`, and `RING`."""

MESH = (REPLICA, DATA, EXPERT, CONTEXT, MODEL, PIPELINE)

CHOSEN = ("mesh", *MESH, "zero", "sequence", "micro", "outside", "remat", "schedule", "virtual")
"""The columns of what makes a candidate. The number of the mesh among all, and the sizes of its axes; ZeRO's stage;
whether the sequence is split; the number of micro-batches; whether they run outside the loop over layers; indices into
`REMATS` and `SCHEDULES`; chunks on each rank."""

RING = "ring"
"""The column of what follows: whether attention is a ring over `context`."""

REMATS = ("none", "dots", "block", "stage")
"""Activation checkpointing, ordered by how much it recomputes."""

SCHEDULES = ("", *(name for name, traits in TRAITS.items() if traits.proposed))
"""Pipeline schedules; the first is for candidates without a pipeline."""

SPLIT = np.array([bool(name) and TRAITS[name].split for name in SCHEDULES])
"""Whether each schedule splits the backward pass in two."""

BRANCHING = np.array([bool(name) and not TRAITS[name].uniform for name in SCHEDULES])
"""Whether ranks take branches of their own in each schedule: a ring must not lie in one."""

SCHEDULES_AND_CHUNKS = [(number, v) for number, name in enumerate(SCHEDULES) if name for v in TRAITS[name].proposed]
"""The pairs of a schedule's index and chunks on each rank that a pipeline can have."""


NEUTRAL = {
    "parallel.zero": 0,
    "parallel.sequence": False,
    "parallel.context": "auto",
    "parallel.micro_batches": Config().parallel.micro_batches,
    "parallel.offload": "none",
    "pipeline": Config().pipeline,
    "train.accumulation": 1,
    "model.remat": "none",
}
"""The knobs that a candidate decides, with their defaults."""


def devices_along(columns: Columns, axes: Iterable[str]) -> np.ndarray:
    """Return the number of devices along these axes of each candidate's mesh."""
    return np.prod([columns[axis] for axis in axes], axis=0)


def meshes(config: Config, devices: int) -> list[MeshShape]:
    """Return the meshes of a number of devices over which the model and the rows of a batch divide."""
    found = []
    neutral = neutral_config(config)
    for model, pipeline, context in product(divisors(devices), divisors(devices), context_sizes(config, devices)):
        if devices % (model * pipeline * context):
            continue
        ranks = devices // (model * pipeline * context)
        if config.train.global_batch_size % (ranks * config.train.rows_together):
            continue
        for expert in expert_sizes(config, ranks):
            beside = ranks // expert
            sizes = (1, beside, expert, context, model, pipeline)
            shape = dict.fromkeys(AXES, 1) | dict(zip(MESH, sizes, strict=True))
            # The model divides or not, whichever of these ranks are replicas.
            if not _mesh_problems(neutral, shape):
                found += [shape | {REPLICA: beside // data, DATA: data} for data in divisors(beside)]
    return found


def expert_sizes(config: Config, ranks: int) -> list[int]:
    """Return the sizes that the axis `expert` can have, where `ranks` split the rows of a batch."""
    if not config.model.traits.routed:
        return [1]
    return [size for size in divisors(ranks) if config.model.experts % size == 0]


def context_sizes(config: Config, devices: int) -> list[int]:
    """Return the sizes that the axis `context` can have: each part of a row is two equal chunks."""
    sequence = config.model.sequence
    most = max(1, sequence // SHORTEST_PART)
    return [size for size in divisors(devices) if size == 1 or (size <= most and sequence % (2 * size) == 0)]


def why_not_planned(split: Split) -> str:
    """Return why a mesh is no candidate although the model divides over it; empty where it may be one."""
    if split.row_parts == 1 or split.length >= SHORTEST_PART:
        return ""
    return (
        f"a device would have {split.length:,} tokens of a row, and the model of time knows parts of "
        f"{SHORTEST_PART:,} tokens or more; ask for a smaller {CONTEXT}"
    )


def problems(config: Config, shape: MeshShape) -> list[str]:
    """Return why the model does not divide over a mesh, whatever the batch; empty if it does."""
    return _mesh_problems(neutral_config(config), shape)


def _mesh_problems(neutral: Config, shape: MeshShape) -> list[str]:
    try:
        check_mesh_fits(Split(neutral, shape), batch=False)
    except RequestError as error:
        return error.problems
    return []


def neutral_config(config: Config) -> Config:
    """Return `config` with defaults for everything that a candidate decides."""
    return config.with_knobs(NEUTRAL)


def candidates(config: Config, shapes: list[MeshShape], sites: int = 1) -> Columns:
    """Return all legal candidates on these meshes, whose devices lie in a number of sites."""
    numbered = list(enumerate(shapes))
    flat = [(number, shape) for number, shape in numbered if shape[PIPELINE] == 1]
    staged = [(number, shape) for number, shape in numbered if shape[PIPELINE] > 1]
    no_schedule = [(0, 1)]
    blocks = [_columns(config, flat, no_schedule, sites), _columns(config, staged, SCHEDULES_AND_CHUNKS, sites)]
    columns = {name: np.concatenate([block[name] for block in blocks]) for name in CHOSEN}
    return columns | {RING: _rings(config, columns)}


def _rings(config: Config, c: Columns) -> np.ndarray:
    """Return whether attention is a ring over `context`: 1 or 0."""
    neutral = neutral_config(config)

    def of(schedule: int, context: int, model: int) -> float:
        scheduled = neutral.with_knobs({"pipeline.schedule": SCHEDULES[schedule]}) if schedule else neutral
        return Split(scheduled, {PIPELINE: 2 if schedule else 1, CONTEXT: context, MODEL: model}).ring

    return map_distinct(of, c["schedule"], c[CONTEXT], c[MODEL]).astype(int)


def _columns(
    config: Config, shapes: list[tuple[int, MeshShape]], schedules: list[tuple[int, int]], sites: int
) -> Columns:
    """Return the legal combinations of all choices.

    The choices span a grid, one dim each, and columns broadcast over it: a rule of `_legal` is computed only for the
    combinations of the choices that it reads. Only legal points of the grid become rows.
    """
    names = ("mesh", *MESH)
    rows = [[number, *(shape[axis] for axis in MESH)] for number, shape in shapes]
    sizes = np.array(rows, int).reshape(-1, len(names))
    schedule_and_chunks = np.array(schedules)
    # The powers of two up to a micro-batch of one row.
    micro = 2 ** np.arange(config.train.global_batch_size.bit_length())
    choices: list[Columns] = [
        {name: sizes[:, place] for place, name in enumerate(names)},
        {"zero": np.arange(4)},
        {"sequence": np.arange(2)},
        {"micro": micro},
        {"outside": np.arange(2)},
        {"remat": np.arange(len(REMATS))},
        {"schedule": schedule_and_chunks[:, 0], "virtual": schedule_and_chunks[:, 1]},
    ]
    lengths = [len(next(iter(choice.values()))) for choice in choices]
    grid = _take(choices, np.ogrid[tuple(slice(length) for length in lengths)])
    return _take(choices, np.nonzero(_legal(config, grid, sites)))


def _take(choices: list[Columns], indices: tuple[np.ndarray, ...]) -> Columns:
    """Return the columns of each choice at its indices."""
    taken = {}
    for choice, at in zip(choices, indices, strict=True):
        for name, column in choice.items():
            taken[name] = column[at]
    return taken


def _legal(config: Config, c: Columns, sites: int) -> np.ndarray:
    """Return which rows are legal, and differ from every simpler row."""
    staged = c[PIPELINE] > 1
    # A part of a row is two chunks.
    chunks = np.where(c[CONTEXT] > 1, 2 * c[CONTEXT], 1)
    sequence_divides = (c[MODEL] > 1) & (config.model.sequence % (chunks * c[MODEL]) == 0)
    sequence = np.where(c["sequence"] == 1, sequence_divides, True)
    # Sharding over one rank, or replicas of what is not sharded, are plain data parallelism. Over several sites they
    # are not the same: `replica` alone lies outside the other axes there. Nor are they where replicas change the loss.
    unsharded = True if crossing.asked(config).name else np.isin(c[REPLICA], (1, sites))
    zero = np.where(c["zero"] > 0, devices_along(c, ZERO_AXES) > 1, unsharded)
    outside = np.where(c["outside"] == 1, (c["zero"] >= 2) & (c["micro"] > 1) & ~staged, True)
    parts = devices_along(c, BATCH_AXES) * c["micro"]
    batch = config.train.global_batch_size % (config.train.rows_together * parts) == 0
    layers = most_chunks(config.model) >= c[PIPELINE] * c["virtual"]

    # Without a pipeline, `stage` is the same as `block`.
    remat = staged | (c["remat"] != REMATS.index("stage"))
    for number, name in enumerate(SCHEDULES):
        if name:
            refused = [REMATS.index(value) for value in TRAITS[name].not_recomputed]
            remat = remat & ((c["schedule"] != number) | ~np.isin(c["remat"], refused))
    # Ulysses needs `context` to divide the query heads of a model rank.
    ulysses = config.model.heads % (c[MODEL] * c[CONTEXT]) == 0
    no_ring_in_branch = ~BRANCHING[c["schedule"]] | (c[CONTEXT] == 1) | ulysses
    return sequence & zero & outside & batch & layers & remat & no_ring_in_branch


def candidate_config(config: Config, row: dict[str, int]) -> Config:
    """Return `config` with the choices of a candidate; without replicas it is exact."""
    values: dict[str, object] = {
        **NEUTRAL,
        **(crossing.EXACT if row[REPLICA] == 1 else {}),
        "mesh": _mesh_text(row),
        "parallel.zero": row["zero"],
        "parallel.sequence": bool(row["sequence"]),
        "model.remat": REMATS[row["remat"]],
    }
    if row["outside"]:
        values["parallel.micro_batches"] = "outside"
    if row[PIPELINE] > 1:
        # Its stages loop over their layers.
        values["model.unroll_layers"] = False
        values["pipeline.schedule"] = SCHEDULES[row["schedule"]]
        values["pipeline.microbatches"] = row["micro"]
        # 0 is the default: one chunk, but for interleaved, which always has more here.
        values["pipeline.virtual_stages"] = row["virtual"] if row["virtual"] > 1 else 0
    else:
        values["train.accumulation"] = row["micro"]
    return config.with_knobs(values)


def _mesh_text(row: dict[str, int]) -> str:
    if any(row[axis] > 1 for axis in MESH if axis not in POSITIONS):
        return ",".join(f"{axis}={row[axis]}" for axis in MESH if row[axis] > 1)
    return f"{row[DATA]}x{row[MODEL]}x{row[PIPELINE]}"


def row_of(columns: Columns, row: int) -> dict[str, int]:
    """Return one candidate: name -> its number."""
    return {name: int(column[row]) for name, column in columns.items()}
