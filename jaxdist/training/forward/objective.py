"""What a decoder is trained for: the loss that is made of its last residual stream, and what is reported beside it.

A forward pass knows nothing of a loss but this. It asks for sums over micro-batches, and what they are divided by is
counted of the whole global batch, so that no mesh, pipeline or accumulation changes the loss.
"""

from __future__ import annotations

from typing import Protocol

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxdist.models import Model, Params
from jaxdist.sharding import Layout
from jaxdist.training.forward.asked import Batch

ScalarSums = dict[str, Float[Array, ""]]
"""Sums beside that of the loss, by name: each becomes a mean over what the loss is a mean over."""

REFERENCE = "reference"
"""The array of a batch [k, B] with the log-probabilities of its rows under the model that an objective starts from."""


class Objective(Protocol):
    """A loss of a decoder, computed with its layout: inside the region of a pipeline, or on global arrays."""

    @property
    def refers(self) -> bool:
        """Return whether it reads `REFERENCE`, which a forward pass adds to a batch that lacks it."""

    def sums(
        self, model: Model, layout: Layout, params: Params, x: Float[Array, "k B s D"], parts: Batch
    ) -> tuple[Float[Array, ""], ScalarSums]:
        """Return (the loss, further sums) of k micro-batches; `x` is the residual stream after the last layer.

        `layout` is that of the model: in the region of a pipeline these are a device's own parts, and vary over the
        axes over which they are to be added up.
        """

    def count(self, batch: Batch) -> Int[Array, ""]:
        """Return the number that these sums are divided by; `batch` is global."""


class CrossEntropy(Objective):
    """The mean of the cross-entropy over all labels that count, in nats."""

    refers = False

    def sums(
        self, model: Model, layout: Layout, params: Params, x: Float[Array, "k B s D"], parts: Batch
    ) -> tuple[Float[Array, ""], ScalarSums]:
        """Return (the cross-entropy of all labels, nothing else)."""
        return model.loss(params, x, parts["labels"]), {}

    def count(self, batch: Batch) -> Int[Array, ""]:
        """Return the number of labels that count."""
        return count_labels(batch)


CROSS_ENTROPY = CrossEntropy()


def count_labels(batch: Batch) -> Int[Array, ""]:
    """Return the number of labels that count: those that are not negative."""
    return jnp.sum(batch["labels"] >= 0)
