"""Every way to split a training step over so many devices that this trainer has: one row of numbers for each.

The axes `expert` and `context` are not built, and so not proposed; nor is the asynchronous pipeline, which learns
something else. Replicas are what `data` does not shard over: they matter where it shards, from ZeRO 1 on.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import numpy as np

from jaxdist.config import Config, RequestError
from jaxdist.mesh import AXES, DATA, MODEL, PIPELINE, REPLICA, MeshShape
from jaxdist.request.checks import check_mesh_fits
from jaxdist.units import divisors

Columns = dict[str, np.ndarray]
"""Name -> a number for each candidate. The names are those of `COLUMNS`."""

MESH = (REPLICA, DATA, MODEL, PIPELINE)

COLUMNS = (*MESH, "zero", "sequence", "micro", "outside", "remat", "schedule", "virtual")
"""Sizes of axes; ZeRO's stage; whether the sequence is split; micro-batches, and whether they run outside the layers;
numbers in `REMATS` and `SCHEDULES`; chunks on each rank."""

REMATS = ("none", "dots", "block", "stage")
"""What is recomputed: ever more."""

SCHEDULES = ("", "gpipe", "1f1b", "interleaved", "zb-h1", "zb-u")
"""Of a pipeline; the first is for those that are none."""

SPLIT = [SCHEDULES.index(name) for name in ("zb-h1", "zb-u")]
"""Those that take the backward pass in two pieces."""

CHUNKS = {"interleaved": (2, 4), "zb-h1": (1, 2), "zb-u": (1, 2)}
"""How many on each rank are looked at; one for the others."""

CUTS = [(number, v) for number, name in enumerate(SCHEDULES) if name for v in CHUNKS.get(name, (1,))]
"""(schedule, chunks on each rank) of a pipeline."""


def meshes(config: Config, devices: int) -> list[MeshShape]:
    """The meshes of so many devices over which the model and the rows divide."""
    found, plain = [], at_rest(config)
    for model, pipeline in product(divisors(devices), repeat=2):
        for data in divisors(devices // (model * pipeline)) if devices % (model * pipeline) == 0 else []:
            replica = devices // (model * pipeline * data)
            shape = dict.fromkeys(AXES, 1) | {REPLICA: replica, DATA: data, MODEL: model, PIPELINE: pipeline}
            if config.train.global_batch_size % (replica * data) == 0 and not _refused(plain, shape):
                found.append(shape)
    return found


def problems(config: Config, shape: MeshShape) -> list[str]:
    """Why the model does not divide over a mesh, whatever the batch."""
    return _refused(at_rest(config), shape)


def _refused(plain: Config, shape: MeshShape) -> list[str]:
    try:
        check_mesh_fits(plain, shape, batch=False)
    except RequestError as error:
        return error.problems
    return []


def at_rest(config: Config) -> Config:
    """`config` without what a candidate decides."""
    plain = Config()
    parallel = dict(zero=0, sequence=False, micro_batches=plain.parallel.micro_batches, offload="none")
    return config.model_copy(
        update=dict(
            parallel=config.parallel.model_copy(update=parallel),
            pipeline=plain.pipeline,
            train=config.train.model_copy(update=dict(accumulation=1)),
            model=config.model.model_copy(update=dict(remat="none")),
        )
    )


def candidates(config: Config, shapes: list[MeshShape]) -> Columns:
    """All of them on these meshes; only legal ones."""
    flat = [shape for shape in shapes if shape[PIPELINE] == 1]
    staged = [shape for shape in shapes if shape[PIPELINE] > 1]
    blocks = [_columns(config, flat, [(0, 1)]), _columns(config, staged, CUTS)]
    return {name: np.concatenate([block[name] for block in blocks]) for name in COLUMNS}


def _columns(config: Config, shapes: list[MeshShape], cuts: list[tuple[int, int]]) -> Columns:
    """A rule looks only at the few values of what it is about: on a grid, of which only legal points become rows."""
    sizes = np.array([[shape[axis] for axis in MESH] for shape in shapes], int).reshape(-1, 4)
    cut = np.array(cuts)
    micro = np.array(list(_powers_of_two(config.train.global_batch_size)))
    choices: list[Columns] = [
        {axis: sizes[:, number] for number, axis in enumerate(MESH)},
        {"zero": np.arange(4)},
        {"sequence": np.arange(2)},
        {"micro": micro},
        {"outside": np.arange(2)},
        {"remat": np.arange(len(REMATS))},
        {"schedule": cut[:, 0], "virtual": cut[:, 1]},
    ]
    along = np.ogrid[tuple(slice(len(next(iter(choice.values())))) for choice in choices)]
    grid = {name: column[at] for choice, at in zip(choices, along, strict=True) for name, column in choice.items()}
    kept = np.nonzero(_legal(config, grid))
    return {name: column[at] for choice, at in zip(choices, kept, strict=True) for name, column in choice.items()}


def _legal(config: Config, c: Columns) -> np.ndarray:
    """What the request would refuse, or what is the same as a simpler row, is left out."""
    ranks, staged = c[REPLICA] * c[DATA], c[PIPELINE] > 1
    splits = np.where(c["sequence"] == 1, (c[MODEL] > 1) & (config.model.sequence % c[MODEL] == 0), True)
    shards = np.where(c["zero"] > 0, c[DATA] > 1, c[REPLICA] == 1)
    outside = np.where(c["outside"] == 1, (c["zero"] >= 2) & (c["micro"] > 1) & ~staged, True)
    batch = config.train.global_batch_size % (ranks * c["micro"]) == 0
    layers = config.model.layers >= c[PIPELINE] * c["virtual"]
    stage, block = c["remat"] == REMATS.index("stage"), c["remat"] == REMATS.index("block")
    split = np.isin(c["schedule"], SPLIT)
    remat = np.where(staged, ~(stage & split) & ~(block & (c["schedule"] == SCHEDULES.index("zb-h1"))), ~stage)
    return splits & shards & outside & batch & layers & remat


def _powers_of_two(most: int) -> Iterator[int]:
    number = 1
    while number <= most:
        yield number
        number *= 2


def asked(config: Config, row: dict[str, int]) -> Config:
    """The request that a candidate is."""
    staged = row[PIPELINE] > 1
    mesh = f"{row[DATA]}x{row[MODEL]}x{row[PIPELINE]}"
    if row[REPLICA] > 1:
        mesh = ",".join(f"{axis}={row[axis]}" for axis in MESH if row[axis] > 1)
    base = at_rest(config)
    parallel = dict(zero=row["zero"], sequence=bool(row["sequence"]))
    if row["outside"]:
        parallel["micro_batches"] = "outside"
    update = dict(
        mesh=mesh,
        parallel=base.parallel.model_copy(update=parallel),
        model=base.model.model_copy(update=dict(remat=REMATS[row["remat"]])),
    )
    if staged:
        virtual = row["virtual"] if row["virtual"] > 1 else 0
        chosen = dict(schedule=SCHEDULES[row["schedule"]], microbatches=row["micro"], virtual_stages=virtual)
        update["pipeline"] = base.pipeline.model_copy(update=chosen)
    else:
        update["train"] = base.train.model_copy(update=dict(accumulation=row["micro"]))
    return base.model_copy(update=update)


def row_of(columns: Columns, row: int) -> dict[str, int]:
    """One candidate: name -> its number."""
    return {name: int(column[row]) for name, column in columns.items()}
