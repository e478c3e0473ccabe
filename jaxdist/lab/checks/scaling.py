"""Strong scaling of the lab's CNN: the work of a device, the loss, and times beside the ideal line."""

from __future__ import annotations

import math
from functools import partial

from jaxdist.bench.scaling_picture import draw
from jaxdist.bench.scaling_text import lines as told
from jaxdist.bench.study import Study, result
from jaxdist.cluster.runtime import first
from jaxdist.lab.claim import Check, Outcome
from jaxdist.lab.phases import cpu_mesh
from jaxdist.request import load
from jaxdist.training.run import Run

CONFIG, COUNTS, DIGITS, REPEATS = "cnn_digits", (1, 2, 4), 1797, 4
"""The network, numbers of devices, images of an epoch, and steps that are timed."""


def strong(
    expected: str, tolerance: str, mode: str = "strong", counts: tuple[int, ...] = COUNTS, batch: int = 64
) -> Outcome:
    """Rows of a device on each number of devices, data-parallel and fully sharded, and the loss after the same steps.

    Times are shown, not judged: virtual devices share the cores of one CPU.
    """
    work, loss = (part.strip() for part in tolerance.split("/"))
    cpu_mesh(f"{counts[-1]}x1x1")
    config = load(CONFIG, {"train.global_batch_size": str(batch)})
    study = Study(config, mode, counts, stages=(0, 3), warmup=1, repeats=REPEATS, rows=DIGITS)
    share = {n: _rows(study, n) / _rows(study, 1) for n in counts}
    if any(abs(part * n - 1) > float(work.rstrip("%")) / 100 for n, part in share.items()):
        shares = ", ".join(f"{part:g}" for part in share.values())
        return Outcome(f"work per device {shares}", False, ("nothing was timed",))
    table = {"config": CONFIG, **result(study)}
    alone = table["measurements"][0]["loss"]
    apart = max(abs(one["loss"] - alone) / alone for one in table["measurements"])
    value = f"work per device 1/n; loss {'equal' if apart <= float(loss) else f'{apart:.1e} apart'}"
    largest = f"largest relative difference of the loss from one device: {apart:.1e}"
    return Outcome(value, value == expected, (*told(table), largest), partial(draw, table))


def _rows(study: Study, count: int) -> int:
    """Of a batch, those that lie on each of so many devices."""
    batch = Run(study.config_of(count, 0), devices=first(count, "the lab needs")).batch()["rows"]
    return math.prod(batch.sharding.shard_shape(batch.shape))


CHECKS = {"strong-scaling": Check(strong, {"mode": "weak"})}
