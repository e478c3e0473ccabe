"""What would do where there is no plan. Each proposal is predicted as a plan is before it is made."""

from __future__ import annotations

import numpy as np

from jaxdist import units
from jaxdist.config import Config
from jaxdist.models import build
from jaxdist.planning.clusters import PRESETS, Cluster, cluster
from jaxdist.planning.hardware import GPUS
from jaxdist.planning.search.candidates import asked, candidates, meshes, row_of
from jaxdist.planning.search.estimate import Estimate, estimate, told
from jaxdist.planning.search.screen import Screen
from jaxdist.units import multiples

PREDICTED = 8
"""Candidates that are predicted parameter by parameter: those that need the least memory at first sight."""

FAR = 2.0
"""Times the memory of a device: what needs more at first sight is not predicted at all."""

SHORTEST = 128
"""Tokens of a row: shorter ones are not proposed."""

SMALLER_MODEL = "choose a smaller model: neither more devices, nor a known cluster, nor shorter rows are enough"


def fits(config: Config, devices: int, where: Cluster) -> bool:
    """Whether one of the candidates that need the least memory fits: then `search` finds a plan."""
    shapes = meshes(config, devices)
    if not shapes:
        return False
    model, columns = build(config.model), candidates(config, shapes)
    rough = Screen(config, model, where, columns).memory()
    rows = np.argsort(rough, kind="stable")[:PREDICTED]
    rows = rows[rough[rows] <= FAR * where.memory]
    return any(estimate(asked(config, row_of(columns, int(row))), model, where).fits for row in rows)


def no_mesh(config: Config, devices: int, where: Cluster) -> str:
    """The sentence where no mesh of so many devices divides the model and the batch."""
    batch = config.train.global_batch_size
    ways = []
    fewer = next(count for count in range(min(devices, batch), 0, -1) if meshes(config, count))
    if fits(config, fewer, where):
        ways.append(f"use {fewer} devices")
    if sizes := _batches(config, devices, where):
        ways.append(f"set train.global_batch_size to {' or '.join(map(str, sizes))}")
    return f"no mesh of {devices} device(s) divides this model and a global batch of {batch} rows; " + (
        ", or ".join(ways) or "choose another number of devices"
    )


def nothing_fits(config: Config, devices: int, where: Cluster, nearest: Estimate) -> str:
    """The sentence where meshes divide, and none fits; `nearest` is the candidate that needs the least memory."""
    ways = [_more_devices(config, devices, where), _larger_gpus(config, devices, where)]
    ways.append(_shorter_rows(config, devices, where))
    return (
        f"nothing fits {devices} x {where.name} with {units.size(where.memory)} each: the smallest, {told(nearest)}, "
        f"needs {units.size(nearest.memory.total)}; " + (", or ".join(filter(None, ways)) or SMALLER_MODEL)
    )


def _batches(config: Config, devices: int, where: Cluster) -> list[int]:
    """Global batches next to that of `config` that fit: as many rows for each device, in 1, 2, 4, ... micro-batches."""
    batch, unit = config.train.global_batch_size, devices
    while unit <= 2 * max(batch, devices):
        found = [size for size in multiples(unit, batch) if fits(_with_batch(config, size), devices, where)]
        if found:
            return found
        unit *= 2
    return []


def _more_devices(config: Config, devices: int, where: Cluster) -> str:
    """The first of the larger powers of two on which a plan fits; empty where no mesh of so many divides."""
    count = 2 ** devices.bit_length()
    while meshes(config, count):
        if fits(config, count, where):
            return f"use --devices {count}"
        count *= 2
    return ""


def _larger_gpus(config: Config, devices: int, where: Cluster) -> str:
    """The known clusters with more memory on which as many devices fit, least memory first."""
    known = sorted(map(cluster, PRESETS), key=lambda one: one.memory)
    larger = [one for one in known if one.gpu in GPUS and one.memory > where.memory]
    names = [one.name for one in larger if fits(config, devices, one)]
    return f"--cluster {' or '.join(names)}" if names else ""


def _shorter_rows(config: Config, devices: int, where: Cluster) -> str:
    """Rows half as long, and so on, until a plan fits."""
    length = config.model.sequence // 2
    if length < SHORTEST or not fits(_with_sequence(config, SHORTEST), devices, where):
        return ""
    while length >= SHORTEST:
        if fits(_with_sequence(config, length), devices, where):
            return f"--model.sequence {length}"
        length //= 2
    return ""


def _with_batch(config: Config, rows: int) -> Config:
    return config.model_copy(update={"train": config.train.model_copy(update={"global_batch_size": rows})})


def _with_sequence(config: Config, length: int) -> Config:
    return config.model_copy(update={"model": config.model.model_copy(update={"sequence": length})})
