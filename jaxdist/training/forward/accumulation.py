"""Gradients by `jax.grad` of a loss, micro-batch by micro-batch, reduced as the ZeRO stage has it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxdist.models import Params
from jaxdist.sharding import wide
from jaxdist.training.forward.step import Batch, Further, Summed

Outcome = tuple[Float[Array, ""], Params, Further]
"""(summed loss, variables after it, further sums)."""


class AccumulatingForward(ABC):
    """The part of a `Forward` that follows from its `loss`."""

    places: Any
    abstract: Params
    stages = None
    dtype: Any
    """What the model computes in."""
    stage: int
    """Of ZeRO."""
    inside: bool
    """Whether `loss` takes all k micro-batches at stages 2 and 3; otherwise one at a time."""

    @abstractmethod
    def loss(
        self, weights: Params, sinks: Params | None, variables: Params, parts: Batch, step: Int[Array, ""] | None
    ) -> Outcome:
        """Of one or more micro-batches; gradients go to `sinks` from stage 2 on. No `step`: evaluation."""

    def weights(self, params: Params) -> Params:
        """Parameters in the compute dtype, gathered, but for stage 3."""
        cast = jax.tree.map(lambda w: w.astype(self.dtype), params)
        return cast if self.stage == 3 else jax.tree.map(lambda p, w: p.gather(w), self.places, cast)

    def gradients(self, weights: Params, variables: Params, batch: Batch, step: Int[Array, ""]) -> Summed:
        summed = self._reduced_at_the_end if self.stage < 2 else self._reduced_in_layers
        return summed(weights, variables, batch, step)

    def evaluate(self, weights: Params, variables: Params, batch: Batch) -> tuple[Float[Array, ""], Further]:
        loss, _, further = self.loss(weights, None, variables, batch, None)
        return loss, further

    def accumulators(self, weights: Params) -> Params:
        """Zeros that the gradients of all micro-batches are added to, in f32 at least: at stages 0 and 1 as the
        weights lie in use, whole over the data axis; from stage 2 on as the parameters lie at rest."""
        if self.stage < 2:
            return jax.tree.map(lambda p, w: p.partial_sums(w), self.places, weights)
        dtype = wide(self.dtype)
        return jax.tree.map(lambda p, w: p.sink(w.shape, dtype), self.places, self.abstract)

    def _reduced_at_the_end(self, weights: Params, variables: Params, batch: Batch, step: Int[Array, ""]) -> Summed:
        """Stages 0 and 1: each device adds up its own gradients of all micro-batches, whole and in f32."""
        loss_of = lambda weights, variables, parts: self.loss(weights, None, variables, parts, step)
        zeros = self.accumulators(weights)
        loss, grads, *more = self._add_up(loss_of, weights, zeros, variables, _one_by_one(batch))
        return loss, jax.tree.map(lambda p, g: p.reduce(g), self.places, grads), *more

    def _reduced_in_layers(self, weights: Params, variables: Params, batch: Batch, step: Int[Array, ""]) -> Summed:
        """Stages 2 and 3: each layer's gradient is reduced as it is made, and only its shard is kept."""
        sinks = self.accumulators(weights)
        loss_of = lambda sinks, variables, parts: self.loss(weights, sinks, variables, parts, step)
        groups = jax.tree.map(lambda a: a[None], batch) if self.inside else _one_by_one(batch)
        return self._add_up(loss_of, sinks, sinks, variables, groups)

    def _add_up(self, loss_of, towards: Params, zeros: Params, variables: Params, groups: Batch) -> Summed:
        """The gradient is with respect to `towards`; all is summed over the leading dim of `groups`."""

        def with_rest(towards, variables, parts):
            loss, variables, further = loss_of(towards, variables, parts)
            return loss, (variables, further)

        def add(carry, parts: Batch):
            total, variables = carry
            (loss, (variables, further)), grads = jax.value_and_grad(with_rest, has_aux=True)(towards, variables, parts)
            total = jax.tree.map(lambda t, a: t + a.astype(t.dtype), total, (loss, grads))
            return (total, variables), further

        zero = jnp.zeros((), wide(self.dtype))
        ((loss, grads), variables), further = jax.lax.scan(add, ((zero, zeros), variables), groups)
        return loss, grads, variables, jax.tree.map(lambda a: a.sum(0), further)


def _one_by_one(batch: Batch) -> Batch:
    """k groups of one micro-batch each."""
    return jax.tree.map(lambda a: a[:, None], batch)
