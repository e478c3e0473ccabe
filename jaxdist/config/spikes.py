"""Spikes of the loss (`train.spike`): which updates are skipped for one, and what does not go with that."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxdist.config import Config

WINDOW = 128
"""Updates that were made last, whose losses and gradient norms say what is usual."""

FEWEST = 48
"""Updates from which on something is usual: before, none is skipped for a spike."""

LEAST_SIGMAS = 3.0
"""Fewer standard deviations would skip many steps of a run that learns well."""

KNOBS = ("train.spike", "train.local_steps", "parallel.delayed_gradients", "pipeline.schedule")
"""What `refused` reads."""


def refused(config: Config) -> Iterator[str]:
    """Yield a sentence for each knob that does not go with a spike that is skipped; none without `train.spike`."""
    sigmas = config.train.spike
    if not sigmas:
        return
    but = f"train.spike is {sigmas:g}, but"
    if sigmas < LEAST_SIGMAS:
        yield f"{but} so few standard deviations skip usual steps too; set it to {LEAST_SIGMAS:g} or more (6 is common)"
    if config.train.local_steps:
        yield (
            f"{but} with train.local_steps {config.train.local_steps} each replica would skip steps of its own; set "
            f"one of them to 0"
        )
    if config.parallel.delayed_gradients:
        yield (
            f"{but} with parallel.delayed_gradients the next step is on its way before a spike is seen; set "
            f"train.spike to 0, or parallel.delayed_gradients to false"
        )
    if config.pipeline.asynchronous:
        yield (
            f"{but} pipeline.schedule {config.pipeline.schedule} updates each stage before the loss is known; set "
            f"train.spike to 0, or pipeline.schedule to 1f1b"
        )
