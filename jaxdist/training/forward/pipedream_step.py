"""The train step of PipeDream (Narayanan et al. 2019), an asynchronous pipeline with weight stashing.

A global batch comes in, and the one that came in S-1 steps before leaves the pipeline.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import jax
import jax.numpy as jnp
import optax
from jax.sharding import reshard

from jaxdist.models import Params
from jaxdist.models.decoder import Aux
from jaxdist.parallel.partial_trees import joined, part_of
from jaxdist.parallel.pipeline.pipedream import NOTHING
from jaxdist.parallel.pipeline.stages import BLOCKS
from jaxdist.sharding import Tree
from jaxdist.training.forward.asked import Batch, Grads
from jaxdist.training.forward.pipeline import PipelineForward
from jaxdist.training.forward.step import Metrics, Step, TrainState


class PipeDreamStep(Step):
    """A `Step` whose batch m is fully applied, and has metrics, when batch m + `late` has come in.

    A stage whose gradient is not finite leaves its own parameters as they are. Nothing is reported of the routers,
    whose stages see a batch at different times.
    """

    forward: PipelineForward

    def __init__(
        self,
        forward: PipelineForward,
        optimizer: Callable[[Params], optax.GradientTransformation],
        roles: Params,
        batch: Batch,
    ):
        """Join a pipeline with the update rules of its parts.

        `optimizer` makes the update rule for parameters of which it gets the `roles`; these are those of all that have
        a gradient. `batch` holds the shapes and shardings of one global batch.
        """
        # Nothing clips by the norm of the gradient: a whole gradient never exists at one moment.
        super().__init__(forward, optimizer(roles))
        self.late = forward.stages.ranks - 1
        self.shapes = batch
        layer_rule = optimizer({BLOCKS: roles[BLOCKS]})
        top_rule = optimizer({name: role for name, role in roles.items() if name != BLOCKS})

        def update(grads: Grads, aux: Aux, state: Tree, params: Params, count: jax.Array) -> tuple[Tree, Tree]:
            rule = layer_rule if BLOCKS in params else top_rule
            learning = part_of(params, grads)
            updates, new = rule.update(grads, _with_count(state, count), learning)
            params = joined(params, cast(Params, optax.apply_updates(learning, updates)))
            return forward.steered(params, aux), _keep_counts(state, new)

        self.pipe = forward.asynchronous(update, batch)

    def derived(self, state: TrainState) -> dict[str, Tree]:
        """Return an empty pipeline: a state is saved only when nothing is in flight.

        Its arrays are zeros of the shapes of one batch, laid out as the step keeps them.
        """
        # Only the shapes of this batch matter.
        batch = jax.tree.map(lambda a: reshard(jnp.zeros(a.shape, a.dtype), a.sharding.spec), self.shapes)
        return {"in_flight": self.pipe.empty(state.params, self.forward.with_keys(batch, state.step))}

    def train(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        """Take one step. A batch without labels counts as none: those before it move on, and nothing comes in."""
        # Steps are counted when a batch comes in; what is skipped is counted when it is through.
        count = self.forward.count(batch)
        number = jnp.where(count > 0, state.step, NOTHING)
        batch = self.forward.with_keys(batch, state.step)
        params, optimizer, in_flight, through = self.pipe.round(
            state.params, state.optimizer, state.in_flight, batch, number, count
        )

        step = state.step + (count > 0)
        came_through = through.number != NOTHING
        finite = jnp.isfinite(through.loss) & jnp.isfinite(through.norm)
        skipped = state.skipped + (came_through & ~finite)
        in_a_row = jnp.where(came_through, jnp.where(finite, 0, state.skipped_in_a_row + 1), state.skipped_in_a_row)
        metrics = Metrics(through.loss, through.norm, through.count, skipped, in_a_row, {})
        state = TrainState(
            step=step,
            params=params,
            optimizer=_with_count(optimizer, step),
            skipped=skipped,
            skipped_in_a_row=in_a_row,
            variables=state.variables,
            in_flight=in_flight,
        )
        return state, metrics


def _with_count(state: Tree, count: jax.Array) -> Tree:
    """Return the optimizer state with `count` in the place of its scalars, all of which count updates."""
    return jax.tree.map(lambda a: count if a.ndim == 0 else a, state)


def _keep_counts(old: Tree, new: Tree) -> Tree:
    """Return `new` with the counts of `old`."""
    # The stages share the counts, and are not equally far: the step itself sets them, once, at its end.
    return jax.tree.map(lambda a, b: a if a.ndim == 0 else b, old, new)
