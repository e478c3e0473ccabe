"""The scale of the loss in float16, which finds its own size (Micikevicius et al. 2018, "Mixed Precision Training").

float16 holds no number below 2^-24, as many gradients are, and none above 65504. So the backward pass computes the
gradients of `scale` times the mean loss, and they are divided by it in f32. A step whose gradients are not finite is
skipped, and halves the scale; many good steps in a row double it.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

FIRST = 2.0**15
"""The scale of the first step: the largest power of two that float16 holds."""

LEAST = 1.0
"""The scale is never smaller: where gradients are not finite even so, it is not the scale that makes them so."""

MOST = 2.0**24
"""The scale is never larger: a gradient of zero would double it until it is infinity, which no halving undoes."""

PATIENCE = 2000
"""Good steps in a row that double the scale."""


class LossScale(NamedTuple):
    """The scale that the next step computes with. It is a power of two, so that scaling rounds nothing."""

    scale: Float[Array, ""]
    good: Int[Array, ""]
    """Finite steps in a row since the scale has changed."""

    def after(self, finite: Bool[Array, ""]) -> LossScale:
        """Return the scale after a step that was `finite`, on all devices, or that was skipped."""
        good = self.good + 1
        doubles = finite & (good >= PATIENCE)
        kept_or_doubled = jnp.where(doubles, jnp.minimum(2 * self.scale, MOST), self.scale)
        scale = jnp.where(finite, kept_or_doubled, jnp.maximum(self.scale / 2, LEAST))
        return LossScale(scale, jnp.where(finite & ~doubles, good, 0))

    def of_sum(self, count: Int[Array, ""]) -> Float[Array, ""]:
        """Return the scale of a loss that is summed over `count`, and not a mean: the next lower power of two."""
        _, exponent = jnp.frexp(count.astype(self.scale.dtype))
        return jnp.ldexp(self.scale, -exponent)


def first() -> LossScale:
    """Return the scale of the first step."""
    return LossScale(jnp.float32(FIRST), jnp.int32(0))
