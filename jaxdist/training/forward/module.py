"""The loss of a module as one piece: the forward pass of a `Step` for any `flax.nnx.Module`."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Literal

import jax
from jax.typing import DTypeLike
from jaxtyping import Array, Int, Key

from jaxdist.mesh import BATCH_AXES
from jaxdist.models import Params
from jaxdist.models.foreign import Foreign, LossFunction, cast, check_aux, with_aux
from jaxdist.parallel import all_rows, foreign, placing
from jaxdist.parallel.arranged import ROWS_FIRST, Arranged, BatchDims, arrange, rejoin
from jaxdist.parallel.sink import in_use
from jaxdist.sharding import Layout, OfRows, Tree, Weighted, wide
from jaxdist.training.forward.accumulation import AccumulatingForward, Outcome
from jaxdist.training.forward.asked import AUX, LOSS, Batch, Scale, Summed
from jaxdist.training.forward.base import count_rows

Scope = Literal["batch", "rows", "device"]
"""What the loss function sees at once.

* batch: all rows of a micro-batch
* rows: each device's own rows, with batch statistics over all of them
* device: each device's own rows, in everything
"""


class ModuleForward(AccumulatingForward[Foreign]):
    """The forward pass of a module; batches are trees of arrays [k, B, ...], or `Arranged`."""

    inside = False

    def __init__(
        self,
        model: Foreign,
        loss_fn: LossFunction,
        layout: Layout,
        scope: Scope,
        dtype: DTypeLike,
        zero: placing.ZeroOptions,
        batch_dims: BatchDims = ROWS_FIRST,
    ):
        """Lay the parameters out as `zero` asks; gradients are partial sums, but for scope "batch".

        `batch_dims` are the dims of rows in the batches that `loss_fn` gets.
        """
        self.batch_dims = batch_dims
        self.model = model
        self.loss_fn = loss_fn
        self.layout = layout
        self.scope = scope
        self.dtype = dtype
        self.stage = zero.stage
        self.abstract = model.abstract
        self.variable_specs = foreign.specs_of(layout, model.variable_axes)
        assert zero.summed == (scope != "batch")
        stacks = not zero.summed and zero.stage == 3 and set(dict(layout.axes)) <= set(BATCH_AXES)
        self.places = placing.placements(layout, model.axes, model.abstract, zero, stacks)

    def with_loss(self, loss_fn: LossFunction, has_aux: bool) -> ModuleForward:
        """Return the forward pass of another loss function, of the same module laid out alike.

        With `has_aux` it returns a pair: the loss as others do, and arrays with rows, in `Gradients.aux`.
        """
        other = copy.copy(self)
        other.loss_fn = with_aux(loss_fn) if has_aux else loss_fn
        return other

    def init(self, key: Key[Array, ""]) -> tuple[Params, Params]:
        """Return (parameters at rest, variables)."""
        return foreign.init(self.model.init, self.places, self.variable_specs, key)

    def count(self, batch: Batch) -> Int[Array, ""]:
        """Return the number of rows."""
        return count_rows(batch)

    def apply(
        self, call: Callable[[Params, Params, Tree], Tree], params: Params, variables: Params, args: Tree, out: Tree
    ) -> Any:
        """Return `call(weights, variables, args)` of weights in use, laid out as the specs `out` say."""
        weights = cast(in_use(self.places, self.weights(params), None, self.stage), self.dtype)
        return all_rows.call_on_all_rows(self.places, call, weights, variables, cast(args, self.dtype), out)

    @property
    def reduced_last(self) -> bool:
        """Whether gradients are reduced once, after the last micro-batch.

        Under scope "batch" XLA adds up those of every micro-batch, so that shards of them are all that is kept.
        """
        return super().reduced_last and (self.scope != "batch" or self.stage == 0)

    def gradients(
        self, weights: Params, variables: Params, batch: Batch, step: Int[Array, ""], scale: Scale = None
    ) -> Summed:
        """Return what every forward pass does; arrays with rows have those of all micro-batches, as the batch does."""
        loss, grads, variables, further, aux = super().gradients(weights, variables, batch, step, scale)
        if AUX in further:
            whole = jax.tree.map(lambda a: foreign.rows_of_all(self.layout, a), further[AUX])
            further = {**further, AUX: whole}
        return loss, grads, variables, further, aux

    def loss(
        self, weights: Params, sinks: Params | None, variables: Params, parts: Batch, step: Int[Array, ""] | None
    ) -> Outcome:
        """Return the loss summed over the rows of one micro-batch; `step` None calls the module for evaluation."""
        together = self.scope == "batch" or step is None
        weights = cast(in_use(self.places, weights, None if together else sinks, self.stage), self.dtype)
        batch = cast(jax.tree.map(lambda a: a[0], parts), self.dtype)
        if not isinstance(batch, Arranged):
            batch = arrange(batch, self.batch_dims)
        train = step is not None

        def call(weights: Params, variables: Params, batch: Arranged) -> foreign.Outcome:
            outcome = self.model.loss(self.loss_fn, weights, variables, rejoin(batch, self.batch_dims), train)
            check_aux(outcome[3], rows=jax.tree.leaves(batch.rows)[0].shape[0])
            return outcome

        if together:
            lies = foreign.outcome_specs(self.layout, self.variable_specs)
            outcome = all_rows.call_on_all_rows(self.places, call, weights, variables, batch, lies, sinks)
        else:
            agreements = self.model.agreements
            outcome = foreign.call_on_own_rows(self.layout, self.places, agreements, call, weights, variables, batch)
        mean, variables, further, aux = outcome
        rows = jax.tree.leaves(batch)[0].shape[0]

        def summed(value: foreign.Mean) -> foreign.Mean:
            if isinstance(value, Weighted):
                return jax.tree.map(lambda a: a.astype(wide(a.dtype)), value)
            return rows * value.astype(wide(value.dtype))

        loss, further = jax.tree.map(summed, (mean, further), is_leaf=lambda a: isinstance(a, Weighted))
        if jax.tree.leaves(aux):
            further = {**further, AUX: OfRows(aux)}
        if isinstance(loss, Weighted):
            # The weight of all micro-batches is known when they are through.
            return loss.total, variables, {**further, LOSS: loss}, {}
        return loss, variables, further, {}
