"""What to change where no plan exists. Each proposal is predicted, as a plan is, before it is made."""

from __future__ import annotations

import numpy as np

from jaxdist.config import Config
from jaxdist.models import build_decoder
from jaxdist.output import units
from jaxdist.output.units import counted, multiples
from jaxdist.planning.clusters import Cluster, one_site
from jaxdist.planning.hardware import GPUS
from jaxdist.planning.search.candidates import candidate_config, candidates, meshes, row_of
from jaxdist.planning.search.estimate import Estimate, estimate, label
from jaxdist.planning.search.screen import screen_of

PREDICTED = 8
"""Candidates that are predicted exactly: those that need the least memory in the rough estimate."""

FAR = 2.0
"""The rough memory over that of a device, beyond which a candidate is not predicted at all."""

SHORTEST = 128
"""Tokens of the shortest row that is proposed."""

SMALLER_MODEL = "choose a smaller model: neither more devices, nor a known cluster, nor shorter rows are enough"


def fits(config: Config, devices: int, where: Cluster) -> bool:
    """Return whether one of the smallest candidates fits, so that `search` finds a plan."""
    shapes = meshes(config, devices)
    if not shapes:
        return False
    model = build_decoder(config.model)
    columns = candidates(config, shapes)
    rough = screen_of(config, model, where, columns).memory()
    rows = np.argsort(rough, kind="stable")[:PREDICTED]
    for row in rows[rough[rows] <= FAR * where.memory]:
        if estimate(candidate_config(config, row_of(columns, int(row))), model, where).fits:
            return True
    return False


def no_mesh(config: Config, devices: int, where: Cluster) -> str:
    """Return the error message where no mesh of this number of devices divides the model and the batch."""
    batch = config.train.global_batch_size
    ways = []
    fewer = next(count for count in range(min(devices, batch), 0, -1) if meshes(config, count))
    if fits(config, fewer, where):
        ways.append(f"use {fewer} devices")
    sizes = _batches(config, devices, where)
    if sizes:
        ways.append(f"set train.global_batch_size to {' or '.join(map(str, sizes))}")
    return f"no mesh of {counted(devices, 'device')} divides this model and a global batch of {batch} rows; " + (
        ", or ".join(ways) or "choose another number of devices"
    )


def nothing_fits(config: Config, devices: int, where: Cluster, smallest: Estimate) -> str:
    """Return the error message where meshes divide and none fits; `smallest` needs the least memory."""
    ways = [
        _more_devices(config, devices, where),
        _larger_gpus(config, devices, where),
        _shorter_rows(config, devices, where),
    ]
    return (
        f"nothing fits {devices} x {where.name} with {units.size(where.memory)} each: the smallest, {label(smallest)}, "
        f"needs {units.size(smallest.memory.total)}; " + (", or ".join(filter(None, ways)) or SMALLER_MODEL)
    )


def _batches(config: Config, devices: int, where: Cluster) -> list[int]:
    """Return the global batches nearest to that of `config` that fit.

    They give each device equally many rows, in 1, 2, 4, ... micro-batches.
    """
    batch = config.train.global_batch_size
    # Doubling the unit lets the rows of each device be split into twice as many micro-batches.
    unit = devices
    while unit <= 2 * max(batch, devices):
        found = []
        for size in multiples(unit, batch):
            if fits(config.with_knobs({"train.global_batch_size": size}), devices, where):
                found.append(size)
        if found:
            return found
        unit *= 2
    return []


def _more_devices(config: Config, devices: int, where: Cluster) -> str:
    """Return the first larger power of two on which a plan fits; empty once no mesh divides the model and the batch."""
    count = 2 ** devices.bit_length()
    while meshes(config, count):
        if fits(config, count, where):
            return f"use --devices {count}"
        count *= 2
    return ""


def _larger_gpus(config: Config, devices: int, where: Cluster) -> str:
    """Return the known clusters with more memory on which as many devices fit, least memory first."""
    known = sorted(one_site(), key=lambda candidate: candidate.memory)
    larger = [candidate for candidate in known if candidate.gpu in GPUS and candidate.memory > where.memory]
    names = [candidate.name for candidate in larger if fits(config, devices, candidate)]
    if not names:
        return ""
    return f"--cluster {' or '.join(names)}"


def _shorter_rows(config: Config, devices: int, where: Cluster) -> str:
    """Return the longest rows that fit among a half, a quarter, ... of the rows of `config`."""
    length = config.model.sequence // 2
    # Where the shortest rows do not fit, those between need not be tried.
    if length < SHORTEST or not fits(config.with_knobs({"model.sequence": SHORTEST}), devices, where):
        return ""
    while length >= SHORTEST:
        if fits(config.with_knobs({"model.sequence": length}), devices, where):
            return f"--model.sequence {length}"
        length //= 2
    return ""
