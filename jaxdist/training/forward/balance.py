"""What a routed model reports of a step, and how its losses are weighed (`models.experts`).

The losses of the router are means over all positions, the cross-entropy is one over the labels that count. So what is
differentiated is positions / labels x cross-entropy + the router's losses, and gradients are divided by the positions.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxdist.config import ModelConfig
from jaxdist.models.decoder import Aux
from jaxdist.models.experts import METERS

LOAD_MAX = "load_max"
REPORTED = (*METERS, LOAD_MAX)
"""What is reported of a step, by name."""

COLLAPSED = 0.9
"""How far the load may be on its way from even (0) to all tokens at the same k experts (1), before it is a collapse.

A router that is merely uneven is far below: with 64 experts, 8 of them for each token, a fullest expert with twice the
mean load is at 0.14."""

PATIENCE = 100
"""Steps for which a router may be collapsed before the log has a warning.

A new router may be: its scores are nearly alike, and what all tokens have in common decides. In so many steps a balance
that moves by 1e-3 each time has moved by 0.1, which outweighs that."""


def reported(aux: Aux, layers: int, positions: int) -> dict[str, Float[Array, ""]]:
    """Return what is REPORTED of a step, from the sums that its routers have made of all tokens.

    All are means over tokens and layers, but the load: that is how many times the mean the fullest expert of any layer
    has. Places of a stage that are padding have sums of zero.
    """
    meter = aux["meter"]
    load = aux["load"]
    sums = jnp.sum(meter, tuple(range(meter.ndim - 1))) / (layers * positions)
    mean_load = jnp.sum(load) / (layers * load.shape[-1])
    return dict(zip(METERS, sums, strict=True)) | {LOAD_MAX: jnp.max(load) / mean_load}


def collapsed(load_max: float, most: float) -> bool:
    """Return whether nearly all tokens choose the same experts of some layer; `most` is the load if all do."""
    return most > 1 and load_max - 1 >= COLLAPSED * (most - 1)


class CollapseWatch:
    """Counts the steps in which a router is collapsed."""

    def __init__(self, model: ModelConfig):
        self.most = model.experts / model.experts_per_token
        """The load of an expert that all tokens choose, as many times the mean."""
        self.steps = 0
        """Steps in a row in which a router was collapsed."""
        self.warned = False

    def warning(self, steps: range, figures: Mapping[str, float | int | None]) -> str:
        """Return once of a run that nearly all tokens have gone to the same experts of a layer for PATIENCE steps.

        `figures` belong to the last of the `steps`. Empty where there is nothing to say, as without routers.
        """
        load_max = figures.get(LOAD_MAX)
        if load_max is None or not collapsed(load_max, self.most):
            self.steps = 0
            return ""
        self.steps += len(steps)
        if self.warned or self.steps < PATIENCE:
            return ""
        self.warned = True
        return (
            f"warning: a router has collapsed: for {self.steps} steps up to {steps[-1]} the fullest expert of a "
            f"layer had nearly all tokens ({load_max:.2f} times the mean load, at most {self.most:.2f}); raise "
            f"model.balance_rate or model.balance_loss"
        )


@jax.custom_vjp
def weighed(loss: Float[Array, ""], weight: Float[Array, ""]) -> Float[Array, ""]:
    """Return `loss`, whose gradient is multiplied by `weight`."""
    return loss


def _weighed_forward(loss: jax.Array, weight: jax.Array) -> tuple[jax.Array, jax.Array]:
    return loss, weight


def _weighed_backward(weight: jax.Array, g: jax.Array) -> tuple[jax.Array, None]:
    return g * weight.astype(g.dtype), None


weighed.defvjp(_weighed_forward, _weighed_backward)
