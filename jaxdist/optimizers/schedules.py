"""The learning-rate schedules after the warm-up, which is the same for all. A new one is a function and a row."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from jaxdist.optimizers.rule import Knobs

if TYPE_CHECKING:
    import optax
    from jax.typing import ArrayLike

AfterWarmup = Callable[[Knobs, int, int], "optax.Schedule"]
"""(knobs, steps of the run, updates from the first after the warm-up to the last) -> learning rate by update."""


@dataclass(frozen=True)
class Schedule:
    """A row of the table of schedules."""

    after_warmup: AfterWarmup
    open_ended: bool = False
    """Whether only the rate in the last `decay_fraction` of the run depends on the length of the run: until then, the
    length may still be raised."""


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


def _inverse_sqrt(config: Knobs, steps: int, rest: int) -> optax.Schedule:
    """Return the inverse square root of the steps (Vaswani et al. 2017, equation 3), then a decay (Zhai et al. 2022).

    Step s has the peak times sqrt((warm-up + 1) / s), so that the first after the warm-up has the peak. The last of the
    steps decay linearly to the final rate, unless theirs is lower already.
    """
    import jax.numpy as jnp
    import optax

    peak = config.learning_rate
    first = config.warmup + 1
    decay = config.decay_steps(steps)

    def root(count: ArrayLike) -> ArrayLike:
        return peak * jnp.sqrt(first / (count + first))

    if not decay:
        return root
    start = rest - decay
    before = peak * math.sqrt(first / (start + first))
    down = optax.linear_schedule(before, min(before, peak * config.final), decay)
    return lambda count: jnp.where(jnp.asarray(count) <= start, root(count), down(count - start))


SCHEDULES = {
    "cosine": Schedule(_cosine),
    "linear": Schedule(_linear),
    "constant": Schedule(_constant, open_ended=True),
    "inverse-sqrt": Schedule(_inverse_sqrt, open_ended=True),
}
"""The schedules by the names that `optimizer.schedule` accepts."""
