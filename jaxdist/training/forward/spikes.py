"""Spikes: steps whose loss or gradient norm is far above that of the updates before, which are skipped.

    usual(x) = mean(x) + sigmas max(std(x), mean |x| / 100)   over the last 128 updates that were made

A step is a spike if its loss is above usual(losses), or its gradient norm above usual(norms). The `SkipStep` optimizers
of OLMo-core and Levanter use the same mean and deviation. Here a spike itself never enters the window, so that it makes
no later one look usual, and the hundredth keeps a loss that hardly changes from having spikes. A loss that falls is
none. Loss and norm are those of the global batch, so every device, on every mesh, decides alike.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxdist.config.spikes import FEWEST, WINDOW

LEAST_DEVIATION = 0.01
"""The deviation is at least this part of the mean."""


class Usual(NamedTuple):
    """The largest loss and the largest gradient norm that are no spike; infinity while too few updates were made."""

    loss: Float[Array, ""]
    norm: Float[Array, ""]

    def has(self, loss: Float[Array, ""], norm: Float[Array, ""]) -> Bool[Array, ""]:
        """Return whether a step is usual."""
        return (loss <= self.loss) & (norm <= self.norm)


class Recent(NamedTuple):
    """The updates that were made last, as rings: update number n is at place n modulo 128."""

    losses: Float[Array, "128"]
    norms: Float[Array, "128"]
    made: Int[Array, ""]
    """Updates that have entered the rings."""
    spikes: Int[Array, ""]
    """Updates that were skipped because they were spikes."""

    def usual(self, sigmas: float) -> Usual:
        """Return what the next step may have, with that many standard deviations."""
        known = jnp.arange(WINDOW) < self.made
        count = jnp.clip(self.made, 1, WINDOW)

        def limit(ring: Float[Array, "128"]) -> Float[Array, ""]:
            mean = jnp.sum(jnp.where(known, ring, 0)) / count
            deviation = jnp.sqrt(jnp.sum(jnp.where(known, (ring - mean) ** 2, 0)) / count)
            most = mean + sigmas * jnp.maximum(deviation, LEAST_DEVIATION * jnp.abs(mean))
            return jnp.where(self.made >= FEWEST, most, jnp.inf)

        return Usual(limit(self.losses), limit(self.norms))

    def after(
        self, loss: Float[Array, ""], norm: Float[Array, ""], finite: Bool[Array, ""], made: Bool[Array, ""]
    ) -> Recent:
        """Return the rings after a step that was `finite`, and whose update was `made`."""
        here = (jnp.arange(WINDOW) == self.made % WINDOW) & made
        return Recent(
            jnp.where(here, loss, self.losses),
            jnp.where(here, norm, self.norms),
            self.made + made,
            self.spikes + (finite & ~made),
        )


def none_yet() -> Recent:
    """Return the rings before the first step."""
    ring = jnp.zeros(WINDOW, jnp.float32)
    return Recent(ring, ring, jnp.int32(0), jnp.int32(0))
