"""The train step of an asynchronous pipeline: a global batch comes in, and the one of S-1 steps before is through."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import reshard

from jaxdist.models import Params
from jaxdist.parallel.pipeline.pipedream import NOTHING
from jaxdist.parallel.pipeline.stages import BLOCKS
from jaxdist.training.forward.pipeline import PipelineForward
from jaxdist.training.forward.step import Batch, Metrics, Step, TrainState


class PipeDreamStep(Step):
    """As a `Step`, but updates of batch m are made until m + `late` has come in, and metrics are told then.

    There is no moment at which a whole gradient is there: nothing clips by its norm. A stage whose gradient is not
    finite leaves itself as it is.
    """

    def __init__(
        self,
        forward: PipelineForward,
        optimizer: Callable[[Params], optax.GradientTransformation],
        decay: Params,
        batch: Batch,
    ):
        """`optimizer` makes the update rule for the parameters that `decay` names. `batch` is one, in shapes."""
        super().__init__(forward, optimizer(decay))
        self.late = forward.stages.ranks - 1
        """Steps until a batch is through."""
        self.shapes = batch
        of_layers = optimizer({BLOCKS: decay[BLOCKS]})
        of_others = optimizer({name: is_matrix for name, is_matrix in decay.items() if name != BLOCKS})

        def update(grads: Params, state: Any, params: Params, count: jax.Array):
            rule = of_layers if BLOCKS in params else of_others
            updates, new = rule.update(grads, _counted(state, count), params)
            return optax.apply_updates(params, updates), _counts_of(state, new)

        self.pipe = forward.asynchronous(update)

    def derived(self, state: TrainState) -> dict[str, Any]:
        batch = jax.tree.map(lambda a: reshard(jnp.zeros(a.shape, a.dtype), a.sharding.spec), self.shapes)
        return {"in_flight": self.pipe.empty(state.params, self.forward.with_keys(batch, state.step))}

    def train(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        """A batch without labels is none: those before it go on, and nothing comes in."""
        count = self.forward.count(batch)
        number = jnp.where(count > 0, state.step, NOTHING)
        batch = self.forward.with_keys(batch, state.step)
        made = self.pipe.round(state.params, state.optimizer, state.in_flight, batch, number, count)
        params, optimizer, in_flight, through = made

        step, there = state.step + (count > 0), through.number != NOTHING
        finite = jnp.isfinite(through.loss) & jnp.isfinite(through.norm)
        skipped = state.skipped + (there & ~finite)
        in_a_row = jnp.where(there, jnp.where(finite, 0, state.skipped_in_a_row + 1), state.skipped_in_a_row)
        metrics = Metrics(through.loss, through.norm, through.count, skipped, in_a_row, {})
        return TrainState(
            step, params, _counted(optimizer, step), skipped, in_a_row, None, state.variables, in_flight
        ), metrics


def _counted(state: Any, count: jax.Array) -> Any:
    """The optimizer's state, in which all that is one number counts updates."""
    return jax.tree.map(lambda a: count if a.ndim == 0 else a, state)


def _counts_of(old: Any, new: Any) -> Any:
    """`new` with the counts of `old`: the stages share them, and are not equally far."""
    return jax.tree.map(lambda a, b: a if a.ndim == 0 else b, old, new)
