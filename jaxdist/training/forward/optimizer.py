"""The update rule as one optax chain, its learning-rate schedule and global-norm clipping."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from jaxdist.config import OptimizerConfig
from jaxdist.models import Params


def schedule(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """Return the learning rate by update: up from 0, then down to `final` x peak at the last of `steps` updates.

    `config.schedule` names the shape of the way down.
    """
    peak = config.learning_rate
    end = peak * config.final
    warmup = min(config.warmup, steps)
    # From the first update after the warm-up to the last of the run.
    rest = max(steps - warmup - 1, 1)
    if config.schedule == "cosine":
        after = optax.cosine_decay_schedule(peak, rest, alpha=config.final)
    elif config.schedule == "linear":
        after = optax.linear_schedule(peak, end, rest)
    else:
        decay = config.decay_steps(steps)
        if decay:
            after = optax.linear_schedule(peak, end, decay, transition_begin=rest - decay)
        else:
            after = optax.constant_schedule(peak)
    if not warmup:
        return after

    # The first update already has a rate above 0, and the first one after the warm-up has the peak.
    def rise(count: ArrayLike) -> ArrayLike:
        return peak * (count + 1) / (warmup + 1)

    return optax.join_schedules([rise, after], [warmup])


def optimizer(config: OptimizerConfig, steps: int, matrices: Params) -> optax.GradientTransformation:
    """Return AdamW (Loshchilov and Hutter 2019), Lion (Chen et al. 2023) or SGD with momentum.

    Weight decay applies to the parameters that `matrices` marks, and to no others.
    """
    rate = schedule(config, steps)
    if config.name == "adamw":
        return optax.adamw(rate, config.beta1, config.beta2, weight_decay=config.weight_decay, mask=matrices)
    if config.name == "lion":
        return optax.lion(rate, config.beta1, config.beta2, weight_decay=config.weight_decay, mask=matrices)
    decay = optax.add_decayed_weights(config.weight_decay, mask=matrices)
    return optax.chain(optax.trace(config.beta1), decay, optax.scale_by_learning_rate(rate))


def clip(grads: Params, norm: Float[Array, ""], limit: float) -> Params:
    """Scale `grads`, whose global norm is `norm`, down to the norm `limit` (Pascanu et al. 2013); 0 leaves them."""
    if limit == 0:
        return grads
    # Gradients that are all zero must not divide by zero.
    scale = jnp.minimum(1.0, limit / jnp.maximum(norm, 1e-12))
    return jax.tree.map(lambda g: g * scale, grads)
