"""An exponential moving average of the parameters (Polyak and Juditsky 1992), kept beside the optimizer's state."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import optax

from jaxdist.models import Params
from jaxdist.sharding import Tree, wide


class Averaged(NamedTuple):
    """The state of an optimizer, and the average of the parameters that it trains, in f32 or wider."""

    inner: Tree
    ema: Params


def averaged(optimizer: optax.GradientTransformation, decay: float) -> optax.GradientTransformationExtraArgs:
    """Return an optimizer that also keeps `decay` x the average + (1 - `decay`) x the parameters after each step.

    The average begins with the parameters. Where a step is skipped, it stays.
    """
    rule = optax.with_extra_args_support(optimizer)

    def init(params: Tree) -> Tree:
        return Averaged(optimizer.init(params), jax.tree.map(lambda w: w.astype(wide(w.dtype)), params))

    def update(updates: Tree, state: Tree, params: Tree = None, **extra: Any) -> tuple[Tree, Tree]:
        updates, inner = rule.update(updates, state.inner, params, **extra)
        after = optax.apply_updates(params, updates)
        ema = jax.tree.map(lambda mean, w: decay * mean + (1 - decay) * w.astype(mean.dtype), state.ema, after)
        return updates, Averaged(inner, ema)

    return optax.GradientTransformationExtraArgs(init, update)
