"""The loss of a module as one piece: the forward pass of a `Step` for any `flax.nnx.Module`."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Key

from jaxdist.mesh import BATCH_AXES
from jaxdist.models import Params
from jaxdist.models.foreign import Foreign, LossFunction, cast
from jaxdist.parallel import foreign, zero
from jaxdist.sharding import Layout, wide
from jaxdist.training.forward.accumulation import AccumulatingForward, Outcome
from jaxdist.training.forward.step import Batch

Scope = Literal["batch", "rows", "device"]
"""What the loss function sees at once: all rows of a micro-batch; each device's own, batch statistics taken over all;
each device's own in everything."""


class ModuleForward(AccumulatingForward):
    """Batches are trees of arrays [k, B, ...]; `split` says of every parameter whether ZeRO may split it (None: of
    all)."""

    inside = False

    def __init__(
        self,
        model: Foreign,
        loss_fn: LossFunction,
        layout: Layout,
        scope: Scope,
        dtype: Any,
        stage: int,
        split: Params | None = None,
    ):
        self.model, self.loss_fn, self.layout, self.scope = model, loss_fn, layout, scope
        self.dtype, self.stage, self.abstract = dtype, stage, model.abstract
        together = scope == "batch"
        stacks = together and stage == 3 and set(dict(layout.axes)) <= set(BATCH_AXES)
        self.places = zero.placements(layout, model.axes, model.abstract, stage, not together, split, stacks)

    def init(self, key: Key[Array, ""]) -> tuple[Params, Params]:
        """(parameters at rest, variables)."""
        return foreign.init(self.model.init, self.places, key)

    def count(self, batch: Batch) -> Int[Array, ""]:
        """Rows."""
        k, rows = jax.tree.leaves(batch)[0].shape[:2]
        return jnp.asarray(k * rows)

    def loss(
        self, weights: Params, sinks: Params | None, variables: Params, parts: Batch, step: Int[Array, ""] | None
    ) -> Outcome:
        """Summed over the rows of one micro-batch."""
        weights = cast(zero.in_use(self.places, weights, sinks, self.stage), self.dtype)
        batch = cast(jax.tree.map(lambda a: a[0], parts), self.dtype)
        call = partial(self.model.loss, self.loss_fn, train=step is not None)
        if self.scope == "batch" or step is None:
            means, variables, further = foreign.together(self.places, call, weights, variables, batch)
        else:
            agreements = self.model.agreements
            means, variables, further = foreign.apart(
                self.layout, self.places, agreements, call, weights, variables, batch
            )
        rows = jax.tree.leaves(batch)[0].shape[0]
        loss, further = jax.tree.map(lambda mean: rows * mean.astype(wide(mean.dtype)), (means, further))
        return loss, variables, further
