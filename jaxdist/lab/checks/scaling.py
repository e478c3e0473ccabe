"""Strong scaling of the lab's CNN: the work of a device, the loss, and times beside the ideal line."""

from __future__ import annotations

import math
from functools import partial

from jaxdist.bench.scaling_picture import draw
from jaxdist.bench.scaling_text import lines
from jaxdist.bench.study import Study, measure
from jaxdist.cluster.runtime import first
from jaxdist.lab.claim import Check, Claim, Outcome
from jaxdist.lab.phases import cpu_mesh
from jaxdist.request import load
from jaxdist.training.run import Run

CONFIG = "cnn_digits"
COUNTS = (1, 2, 4)
"""Numbers of devices."""

DIGITS = 1797
"""Images of an epoch."""

REPEATS = 4
"""Steps that are timed."""


def strong(claim: Claim, mode: str = "strong", counts: tuple[int, ...] = COUNTS, batch: int = 64) -> Outcome:
    """Measure the rows per device on each number of devices, at ZeRO 0 and 3, and the loss after the same steps.

    Times are shown, not judged: virtual devices share the cores of one CPU.
    """
    allowed_work, allowed_loss = (part.strip() for part in claim.tolerance.split("/"))
    # Split the CPU for the largest mesh, before a smaller one is made.
    cpu_mesh(f"{counts[-1]}x1x1")
    config = load(CONFIG, {"train.global_batch_size": str(batch)})
    study = Study(config, mode, counts, stages=(0, 3), warmup=1, repeats=REPEATS, rows=DIGITS)
    share = {n: _rows(study, n) / _rows(study, 1) for n in counts}
    if any(abs(part * n - 1) > float(allowed_work.rstrip("%")) / 100 for n, part in share.items()):
        shares = ", ".join(f"{part:g}" for part in share.values())
        return Outcome(f"work per device {shares}", False, ("nothing was timed",))
    result = {"config": CONFIG, **measure(study)}
    losses = [one["loss"] for one in result["measurements"]]
    difference = max(abs(loss - losses[0]) / losses[0] for loss in losses)
    if difference <= float(allowed_loss):
        value = "work per device 1/n; loss equal"
    else:
        # Also for a difference that is not a number.
        value = f"work per device 1/n; loss {difference:.1e} apart"
    largest = f"largest relative difference of the loss from one device: {difference:.1e}"
    return Outcome(value, claim.met(value), (*lines(result), largest), partial(draw, result))


def _rows(study: Study, count: int) -> int:
    """Return the rows of a batch on each device."""
    batch = Run(study.config_of(count, 0), devices=first(count, "the lab needs")).batch()["rows"]
    return math.prod(batch.sharding.shard_shape(batch.shape))


CHECKS = {"strong-scaling": Check(strong, {"mode": "weak"})}
