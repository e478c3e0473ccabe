"""The train step whose gradient crosses the replicas one step late, so that no step waits for a slow network.

    step t:   gradient of batch t from the weights w_t   |   the gradient of batch t-1 crosses `replica`
              w_(t+1) = w_t - update(gradient of batch t-1 from w_(t-1))

Nothing in the left column depends on the right one, nor the other way round: a device computes while the network works.
The replicas' weights are equal after every step, as without the delay. In Delayed Gradient Averaging (Zhu et al. 2021)
they are not: there each worker applies its own gradient at once, and exchanges it for the mean when that has arrived.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxdist.models import Params
from jaxdist.parallel.crossing import delayed, replicas
from jaxdist.parallel.pipeline.pipedream import NOTHING
from jaxdist.sharding import Tree
from jaxdist.training.forward.offload import to_device
from jaxdist.training.forward.step import Batch, Metrics, Step, TrainState


class InFlight(NamedTuple):
    """A gradient that has not crossed the replicas yet, and what is told of its step."""

    number: Int[Array, ""]
    """The number of the step that made it; NOTHING where there is none."""
    parts: Params
    """What each replica has of the gradient, [..., R] in f32."""
    loss: Float[Array, ""]
    count: Int[Array, ""]  # type: ignore[assignment]  # a tuple has a method of this name, which nobody calls here
    """What the loss is a mean over."""


class DelayedStep(Step):
    """A `Step` whose batch is applied, and has metrics, when the next batch has come in.

    Only for models without variables: what a step that is not finite does to batch statistics would have to be taken
    back after the next step has begun with them.
    """

    late = 1

    def derived(self, state: TrainState) -> dict[str, Tree]:
        """Return also that nothing is in flight: a state is saved only then."""
        zero = jnp.zeros((), jnp.float32)
        nothing = InFlight(jnp.asarray(NOTHING), self.zeros_per_replica(state.params), zero, jnp.zeros((), jnp.int32))
        return super().derived(state) | {"in_flight": nothing}

    def train(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        """Take one step. A batch without labels counts as none: the gradient in flight is applied, and nothing else.

        A step whose loss or gradient is not finite changes nothing except the counts.
        """
        state = to_device(state)
        before: InFlight = state.in_flight
        crossed = self.crossed(before, state.errors)
        loss, sums, count, _, _ = self._means(self.weights_of(state), state.variables, batch, state.step)
        parts = jax.tree.map(replicas.kept, self.places, sums)
        # The update must come last, or the compiler makes it first, and the device waits for what crosses.
        (grads, errors), parts = jax.lax.optimization_barrier((crossed, parts))
        updated, norm = self.updated(state._replace(errors=errors), grads)

        arrived = before.number != NOTHING
        finite = jnp.isfinite(before.loss) & jnp.isfinite(norm)
        settled = self.settled(state, updated, arrived & finite)
        skipped = jnp.where(arrived, settled.skipped, state.skipped)
        in_a_row = jnp.where(arrived, settled.skipped_in_a_row, state.skipped_in_a_row)
        # All batches have the same shape.
        further = self.forward.told(grads, batch)
        metrics = Metrics(before.loss, norm, before.count, skipped, in_a_row, further)
        came = count > 0
        after = InFlight(
            number=jnp.where(came, state.step, NOTHING),
            parts=parts,
            loss=loss,
            count=count,
        )
        # Steps are counted when a batch comes in; what is skipped is counted when its gradient has crossed.
        state = settled._replace(step=state.step + came, skipped=skipped, skipped_in_a_row=in_a_row, in_flight=after)
        return self.at_rest(state), metrics

    def crossed(self, before: InFlight, errors: Params | None) -> tuple[Params, Params | None]:
        """Add up the gradient in flight over the replicas; return (gradients, new errors), as `cross` does."""
        if errors is None:
            return delayed.cross_at_once(self.places, before.parts), None
        sums = jax.tree.map(replicas.partial_sums, self.places, before.parts)
        return self.cross(sums, errors, before.number)
