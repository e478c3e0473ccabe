"""Gradients that cross one step late: each replica keeps its own part as state, and the parts cross together.

Inside a program a gradient between `zero.reduce` and `Crossing.add_up` is typed as partial sums; an array between
two programs cannot be. It is kept as [..., R], as the residual of compression is.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxdist.parallel.crossing.base import F32, AtRest, Later, Numbers, no_residual
from jaxdist.parallel.pipeline.pipedream import NOTHING
from jaxdist.parallel.placement import Placements
from jaxdist.sharding import Params, Tree


class InFlight(NamedTuple):
    """A gradient that has not crossed the replicas yet, and what is known of its step."""

    number: Int[Array, ""]
    """The number of the step that made it; NOTHING where there is none."""
    parts: Params
    """What each replica has of the gradient, [..., R] in f32."""
    aux: Params
    """What each replica has of the sums of the layers (`models.decoder.Aux`), in the same form."""
    loss: Float[Array, ""]
    count: Int[Array, ""]  # type: ignore[assignment]  # a tuple has a method of this name, which is not called here
    """What the loss is a mean over."""
    sums: Tree = None
    """The state of the rule by which it will be added up."""


class Delayed(Later):
    """A rule that adds up each gradient in the next step. A state is saved only when nothing is in flight."""

    late = 1
    scalars = 12

    def at_rest(self, sent: Numbers, learned: Numbers, on_host: bool) -> AtRest:
        """Return also the gradient in flight."""
        return super().at_rest(sent, learned, on_host)._replace(in_flight=F32 * sent)

    def with_aux(self, state: InFlight, places: Placements, aux: Params) -> InFlight:
        """Return a state without a gradient in flight, with room for sums of the shapes `aux`."""
        return state._replace(aux=no_residual(places, aux, self.replicas))

    def start(self, places: Placements, params: Params) -> InFlight:
        """Return that nothing is in flight."""
        return self._nothing(places, params, self.sums.start(places, params))

    def saved(self, state: InFlight) -> dict[str, Tree]:
        """Return what the sums leave: a gradient in flight is none of it."""
        return self.sums.saved(state.sums)

    def resumed(self, places: Placements, saved: dict[str, Tree], params: Params) -> InFlight:
        """Return that nothing is in flight, and what the sums had left."""
        return self._nothing(places, params, self.sums.resumed(places, saved, params))

    def _nothing(self, places: Placements, params: Params, sums: Tree) -> InFlight:
        zero = jnp.zeros((), jnp.float32)
        parts = no_residual(places, params, self.replicas)
        return InFlight(jnp.asarray(NOTHING), parts, {}, zero, jnp.zeros((), jnp.int32), sums)
