"""The update rule as one optax chain, its learning-rate schedule and global-norm clipping."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from jaxdist.config import OptimizerConfig


def schedule(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """Warm-up from 0, then to `final` x peak at the last of `steps` updates, in the shape that is asked for."""
    peak, end = config.learning_rate, config.learning_rate * config.final
    warmup = min(config.warmup, steps)
    rest = max(steps - warmup - 1, 1)  # from the first update after the warm-up to the last of the run
    if config.schedule == "cosine":
        after = optax.cosine_decay_schedule(peak, rest, alpha=config.final)
    elif config.schedule == "linear":
        after = optax.linear_schedule(peak, end, rest)
    else:
        decay = config.decay_steps(steps)
        after = optax.linear_schedule(peak, end, max(decay, 1), transition_begin=rest - decay)
        after = after if decay else optax.constant_schedule(peak)
    return optax.join_schedules([lambda count: peak * (count + 1) / (warmup + 1), after], [warmup]) if warmup else after


def optimizer(config: OptimizerConfig, steps: int, matrices) -> optax.GradientTransformation:
    """AdamW (Loshchilov and Hutter 2019), Lion (Chen et al. 2023) or SGD with momentum; `matrices` alone decay."""
    rate = schedule(config, steps)
    if config.name == "adamw":
        return optax.adamw(rate, config.beta1, config.beta2, weight_decay=config.weight_decay, mask=matrices)
    if config.name == "lion":
        return optax.lion(rate, config.beta1, config.beta2, weight_decay=config.weight_decay, mask=matrices)
    decay = optax.add_decayed_weights(config.weight_decay, mask=matrices)
    return optax.chain(optax.trace(config.beta1), decay, optax.scale_by_learning_rate(rate))


def clip(grads, norm: Float[Array, ""], limit: float):
    """Scale `grads`, whose global norm is `norm`, down to the norm `limit` (Pascanu et al. 2013); 0 leaves them."""
    if limit == 0:
        return grads
    scale = jnp.minimum(1.0, limit / jnp.maximum(norm, 1e-12))
    return jax.tree.map(lambda g: g * scale, grads)
