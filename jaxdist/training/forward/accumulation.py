"""Gradient accumulation: `jax.grad` of a loss, micro-batch by micro-batch, reduced as the ZeRO stage demands."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxdist.models import ModelT, Params
from jaxdist.models.decoder import Aux
from jaxdist.parallel import sink, zero
from jaxdist.parallel.partial_trees import joined, part_of
from jaxdist.parallel.placement import differentiated
from jaxdist.sharding import OfRows, wide
from jaxdist.training.forward.asked import Batch, Scale, Summed, Sums
from jaxdist.training.forward.balance import weighed
from jaxdist.training.forward.base import ForwardBase

Outcome = tuple[Float[Array, ""], Params, Sums, Aux]
"""(summed loss, variables after it, further sums, each device's own part of aux of all layers)."""

Carry = tuple[tuple[Float[Array, ""], Params], Params]
"""((sum of losses, sum of gradients), variables)."""

LossOf = Callable[[Params, Params, Batch], Outcome]
"""(what the gradient is taken of, variables, micro-batches) -> outcome."""


class AccumulatingForward(ForwardBase[ModelT], ABC):
    """A `Forward` whose gradients follow from its `loss`, by automatic differentiation."""

    inside: bool
    """Whether `loss` takes all k micro-batches at once at ZeRO stages 2 and 3; otherwise it takes one at a time."""

    @abstractmethod
    def loss(
        self, weights: Params, sinks: Params | None, variables: Params, parts: Batch, step: Int[Array, ""] | None
    ) -> Outcome:
        """Return the outcome of one or more micro-batches; gradients that are not `reduced_last` go to `sinks`.

        `step` None means evaluation.
        """

    @property
    def reduced_last(self) -> bool:
        """Whether gradients are reduced once, after the last micro-batch; otherwise where they are made."""
        return self.stage < 2

    def weights(self, params: Params) -> Params:
        """Return the parameters in the compute dtype. Below stage 3 they are gathered here, once per step.

        At stage 3 each layer gathers its own weights when it runs, and again in the backward pass; here they are only
        gathered over the replicas.
        """
        rest = super().weights(params)
        if self.stage == 3:
            return rest
        return jax.tree.map(zero.gather, part_of(self.places, rest), rest)

    def gradients(
        self, weights: Params, variables: Params, batch: Batch, step: Int[Array, ""], scale: Scale = None
    ) -> Summed:
        """Return loss and gradients, summed over all micro-batches and devices; gradients wait for `zero.cross`.

        Those that are not `reduced_last` are reduced in every layer's backward pass. Aux are few numbers, and always
        reduced at the end.
        """
        make = self._reduce_at_the_end if self.reduced_last else self._reduce_in_layers
        loss, grads, variables, further, aux = make(weights, variables, batch, step, scale)
        aux = jax.tree.map(zero.reduce, self.aux_places, aux)
        return loss, grads, variables, further, aux

    def evaluate(self, weights: Params, variables: Params, batch: Batch) -> tuple[Float[Array, ""], Sums]:
        """Return (summed loss, further sums)."""
        loss, _, further, _ = self.loss(weights, None, variables, batch, None)
        return loss, further

    def accumulators(self, weights: Params) -> Params:
        """Return zeros that the gradients of all micro-batches are added to, in f32 or wider; frozen weights have none.

        For gradients that are `reduced_last` they lie as the weights in use, whole over their ZeRO group; otherwise as
        reduced gradients.
        """
        if self.reduced_last:
            learning = differentiated(self.places, weights)
            return jax.tree.map(zero.partial_sums, self.differentiated_places, learning)
        dtype = wide(self.dtype)
        learning = differentiated(self.places, self.abstract)
        return jax.tree.map(lambda p, w: zero.reduced_sums(p, w.shape, dtype), self.differentiated_places, learning)

    def _reduce_at_the_end(
        self, weights: Params, variables: Params, batch: Batch, step: Int[Array, ""], scale: Scale
    ) -> Summed:
        """Stages 0 and 1: each device accumulates its own whole gradients in f32; they are reduced once, at the end."""

        def loss_of(learning: Params, variables: Params, parts: Batch) -> Outcome:
            return self.loss(joined(weights, learning), None, variables, parts, step)

        # Each device adds up its own sums: nothing moves before all micro-batches are through.
        learning = differentiated(self.places, weights)
        zeros = self.accumulators(weights)
        loss, grads, *rest = self._accumulate(loss_of, learning, zeros, variables, _one_by_one(batch), scale)
        grads = jax.tree.map(zero.reduce, self.differentiated_places, grads)
        return loss, grads, *rest

    def _reduce_in_layers(
        self, weights: Params, variables: Params, batch: Batch, step: Int[Array, ""], scale: Scale
    ) -> Summed:
        """Stages 2 and 3: each layer's gradient is reduced as it is made, and only its shard is kept."""
        # A sink is zeros in the shape of a parameter at rest: its gradient is the reduced gradient of the weight.
        dtype = wide(self.dtype)
        learning = differentiated(self.places, self.abstract)
        sinks = jax.tree.map(lambda p, w: sink.zeros(p, w.shape, dtype), self.differentiated_places, learning)

        def loss_of(sinks: Params, variables: Params, parts: Batch) -> Outcome:
            return self.loss(weights, sinks, variables, parts, step)

        if self.inside:
            # One group of all k micro-batches.
            groups = jax.tree.map(lambda a: a[None], batch)
        else:
            groups = _one_by_one(batch)
        return self._accumulate(loss_of, sinks, self.accumulators(weights), variables, groups, scale)

    def _accumulate(
        self, loss_of: LossOf, towards: Params, zeros: Params, variables: Params, groups: Batch, scale: Scale
    ) -> Summed:
        """Sum loss and gradients over the leading dim of `groups`; the gradient is with respect to `towards`."""

        def with_auxiliary(
            towards: Params, variables: Params, parts: Batch
        ) -> tuple[Float[Array, ""], tuple[Params, tuple[Sums, Aux]]]:
            loss, variables, further, aux = loss_of(towards, variables, parts)
            if scale is not None:
                loss = weighed(loss, scale)
            return loss, (variables, (further, aux))

        gradient_of = jax.value_and_grad(with_auxiliary, has_aux=True)

        def add(carry: Carry, parts: Batch) -> tuple[Carry, tuple[Sums, Aux]]:
            total, variables = carry
            (loss, (variables, sums)), grads = gradient_of(towards, variables, parts)
            total = jax.tree.map(lambda t, a: t + a.astype(t.dtype), total, (loss, grads))
            return (total, variables), sums

        # The loss is accumulated in f32, whatever the compute dtype.
        zero = jnp.zeros((), wide(self.dtype))
        ((loss, grads), variables), sums = jax.lax.scan(add, ((zero, zeros), variables), groups)

        def total(a: Array | OfRows) -> Array | OfRows:
            # The rows of each micro-batch stay apart.
            return a if isinstance(a, OfRows) else a.sum(0)

        further, aux = jax.tree.map(total, sums, is_leaf=lambda a: isinstance(a, OfRows))
        return loss, grads, variables, further, aux


def _one_by_one(batch: Batch) -> Batch:
    """Return the batch as k groups of one micro-batch each."""
    return jax.tree.map(lambda a: a[:, None], batch)
