"""The update rule as one optax chain, its learning-rate schedule and global-norm clipping."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from jaxdist.config import OptimizerConfig
from jaxdist.models import Params
from jaxdist.optimizers.rates import at_rates, parse
from jaxdist.optimizers.schedules import SCHEDULES
from jaxdist.sharding import named
from jaxdist.training.forward.block_moments import InBlocks
from jaxdist.training.forward.rounded_moments import Rounded, kept_as


def schedule(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """Return the learning rate by update: up from 0, then down to `final` x peak at the last of `steps` updates.

    `config.schedule` names the shape of the way down.
    """
    warmup = min(config.warmup, steps)
    after = SCHEDULES[config.schedule].after_warmup(config, steps, max(steps - warmup - 1, 1))
    if not warmup:
        return after

    # The first update already has a rate above 0, and the first one after the warm-up has the peak.
    def rise(count: ArrayLike) -> ArrayLike:
        return config.learning_rate * (count + 1) / (warmup + 1)

    return optax.join_schedules([rise, after], [warmup])


class RateTable:
    """The learning rate by update on the host, in tables that a device computes now and then.

    A schedule is a program of its own: one for each step would queue behind the step that is on its way, and the host
    would wait for both before it gives the device the next one.
    """

    rows = 4096
    """Updates of a table."""

    def __init__(self, rate: optax.Schedule):
        self._compute = jax.jit(jax.vmap(rate))
        self._number = -1
        self._rates = np.zeros(0)

    def __call__(self, update: int) -> float:
        """Return the learning rate of the update that has so many before it."""
        number, row = divmod(update, self.rows)
        if number != self._number:
            self._rates = np.asarray(self._compute(np.arange(self.rows, dtype=np.int32) + number * self.rows))
            self._number = number
        return float(self._rates[row])


def optimizer(config: OptimizerConfig, steps: int, roles: Params) -> optax.GradientTransformation:
    """Return the update rule that `config` names, over a run of `steps`.

    `roles` has a `Role` for each parameter, nested as they are; weight decay is for those that it says decay.
    """
    rule = config.rule.transformation(config, schedule(config, steps), roles)
    if config.moments != "float32":
        kept = Rounded() if config.moments == "bfloat16" else InBlocks(config.rule, roles)
        layers = {path: role.layers for path, role in named(roles).items() if role.layers}
        rule = kept_as(kept, rule, config.rule.moments, layers)
    return at_rates(rule, parse(config.rates), roles) if config.rates else rule


def clip(grads: Params, norm: Float[Array, ""], limit: float) -> Params:
    """Scale `grads`, whose global norm is `norm`, down to the norm `limit` (Pascanu et al. 2013); 0 leaves them."""
    if limit == 0:
        return grads
    # Gradients that are all zero must not divide by zero.
    scale = jnp.minimum(1.0, limit / jnp.maximum(norm, 1e-12))
    return jax.tree.map(lambda g: g * scale, grads)
