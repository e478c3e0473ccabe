"""The learning-rate schedules after the warm-up, which is the same for all. A new one is a function and a row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from jaxdist.optimizers.rule import Knobs

if TYPE_CHECKING:
    import optax

AfterWarmup = Callable[[Knobs, int, int], "optax.Schedule"]
"""(knobs, steps of the run, updates from the first after the warm-up to the last) -> learning rate by update."""


@dataclass(frozen=True)
class Schedule:
    """A row of the table of schedules."""

    after_warmup: AfterWarmup
    holds_peak: bool = False
    """Whether the rate stays at its peak from the warm-up to the last `decay_fraction` of the run: until then it does
    not depend on the length of the run, which may still be raised."""


def _cosine(config: Knobs, steps: int, rest: int) -> optax.Schedule:
    """Return half a period of a cosine (Loshchilov and Hutter 2017, equation 5, without restarts)."""
    import optax

    return optax.cosine_decay_schedule(config.learning_rate, rest, alpha=config.final)


def _linear(config: Knobs, steps: int, rest: int) -> optax.Schedule:
    import optax

    return optax.linear_schedule(config.learning_rate, config.learning_rate * config.final, rest)


def _constant(config: Knobs, steps: int, rest: int) -> optax.Schedule:
    """Return warm-up, stable, decay (WSD, Hu et al. 2024): the last of the steps decay linearly."""
    import optax

    peak = config.learning_rate
    decay = config.decay_steps(steps)
    if not decay:
        return optax.constant_schedule(peak)
    return optax.linear_schedule(peak, peak * config.final, decay, transition_begin=rest - decay)


SCHEDULES = {
    "cosine": Schedule(_cosine),
    "linear": Schedule(_linear),
    "constant": Schedule(_constant, holds_peak=True),
}
"""The schedules by the names that `optimizer.schedule` accepts."""
