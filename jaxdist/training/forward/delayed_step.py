"""The train step whose gradient crosses the replicas one step late, so that no step waits for a slow network.

    step t:   gradient of batch t from the weights w_t   |   the gradient of batch t-1 crosses `replica`
              w_(t+1) = w_t - update(gradient of batch t-1 from w_(t-1))

Nothing in the left column depends on the right one, nor the other way round: a device computes while the network works.
The replicas' weights are equal after every step, as without the delay. In Delayed Gradient Averaging (Zhu et al. 2021)
they are not: there each worker applies its own gradient at once, and exchanges it for the mean when that has arrived.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxdist.models import Params
from jaxdist.parallel.crossing import replicas
from jaxdist.parallel.crossing.base import cross_at_once
from jaxdist.parallel.crossing.delayed import Delayed, InFlight
from jaxdist.parallel.pipeline.pipedream import NOTHING
from jaxdist.training.forward.asked import Batch
from jaxdist.training.forward.group_norms import norm_of, squares_of
from jaxdist.training.forward.offload import to_device
from jaxdist.training.forward.step import Metrics, Step, TrainState


class DelayedStep(Step):
    """A `Step` whose batch is applied, and has metrics, when the next batch has come in.

    Only for models without variables: what a step that is not finite does to batch statistics would have to be taken
    back after the next step has begun with them.
    """

    crossing: Delayed

    def fresh(self, params: Params, variables: Params | None) -> TrainState:
        """Return the state before the first step."""
        return self._with_aux(super().fresh(params, variables))

    def resume(self, state: TrainState) -> TrainState:
        """Return the inverse of `logical`."""
        return jax.jit(self._with_aux)(super().resume(state))

    def _with_aux(self, state: TrainState) -> TrainState:
        """Return a state without a gradient in flight, with room for the sums of the layers."""
        forward = self.forward
        return state._replace(crossing=self.crossing.with_aux(state.crossing, forward.aux_places, forward.aux_abstract))

    def train(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        """Take one step. A batch without labels counts as none: the gradient in flight is applied, and nothing else.

        A step whose loss or gradient is not finite changes nothing except the counts.
        """
        state = to_device(state)
        before: InFlight = state.crossing
        state = state._replace(crossing=before.sums)
        crossed = self.crossing.sums.add_up_kept(self.differentiated, before.parts, before.sums, before.number)
        aux = cross_at_once(self.forward.aux_places, before.aux) if before.aux else {}
        loss, sums, count, _, _, own_aux = self._means(self.weights_of(state), state.variables, batch, state.step)
        parts = jax.tree.map(replicas.kept, (self.differentiated, self.forward.aux_places), (sums, own_aux))
        # The update must come last, or the compiler makes it first, and the device waits for what crosses.
        (grads, sums_state), parts = jax.lax.optimization_barrier((crossed, parts))
        squares = squares_of(grads)
        norm = norm_of(squares)
        updated = self.updated(state._replace(crossing=sums_state), grads, norm, aux)

        arrived = before.number != NOTHING
        finite = jnp.isfinite(before.loss) & jnp.isfinite(norm)
        settled = self.settled(state, updated, arrived & finite)
        skipped = jnp.where(arrived, settled.skipped, state.skipped)
        in_a_row = jnp.where(arrived, settled.skipped_in_a_row, state.skipped_in_a_row)
        # All batches have the same shape.
        further = self.forward.reported(aux, batch) | self.group_norms(squares)
        metrics = Metrics(before.loss, norm, before.count, skipped, in_a_row, further)
        came = count > 0
        after = InFlight(
            number=jnp.where(came, state.step, NOTHING),
            parts=parts[0],
            aux=parts[1],
            loss=loss,
            count=count,
            sums=settled.crossing,
        )
        # Steps are counted when a batch comes in; what is skipped is counted when its gradient has crossed.
        state = settled._replace(step=state.step + came, skipped=skipped, skipped_in_a_row=in_a_row, crossing=after)
        return self.at_rest(state), metrics
