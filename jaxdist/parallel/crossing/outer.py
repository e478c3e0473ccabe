"""The crossing of local steps: nothing crosses in a step, and changes of weights do at the end of each round.

Each round ends with a step of gradient descent with Nesterov momentum, in which the replicas' mean change of weights is
the gradient (`training.forward.local_step`).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxdist.parallel.crossing.base import F32, AtRest, Crossing, Later, Numbers
from jaxdist.parallel.placement import Placements
from jaxdist.sharding import Params, Tree

VELOCITY = "velocity"
"""The item of a checkpoint with the momentum of the outer step."""


class OuterState(NamedTuple):
    """What an outer step leaves for the next one."""

    velocity: Params | None
    """v; None without momentum."""
    sums: Tree
    """The state of the rule by which changes of weights are added up."""


class Outer(Later):
    """The rule of an outer step. Within a round there is no state: `add_up` is that of a replica by itself."""

    def __init__(self, sums: Crossing, every: int, rate: float, momentum: float):
        """Take the rule by which changes of weights are added up, once in `every` steps, and the rule of the update."""
        super().__init__(sums)
        self.every = every
        self.rate = rate
        self.momentum = momentum

    def start(self, places: Placements, params: Params) -> OuterState:
        """Return no momentum yet."""
        velocity = jax.tree.map(jnp.zeros_like, params) if self.momentum else None
        return OuterState(velocity, self.sums.start(places, params))

    def saved(self, state: OuterState) -> dict[str, Tree]:
        """Return the momentum, where there is one, and what the sums leave."""
        momentum = {} if state.velocity is None else {VELOCITY: state.velocity}
        return momentum | self.sums.saved(state.sums)

    def resumed(self, places: Placements, saved: dict[str, Tree], params: Params) -> OuterState:
        """Return the inverse of `saved`. The momentum is common to all replicas, of any number."""
        return OuterState(saved.get(VELOCITY), self.sums.resumed(places, saved, params))

    def at_rest(self, sent: Numbers, learned: Numbers, on_host: bool) -> AtRest:
        """Return also what all replicas have in common: parameters, and the momentum.

        Where f32 parameters rest in the host's memory, these do too.
        """
        of_host = F32 if on_host else 0
        momentum = F32 if self.momentum else 0
        own = super().at_rest(sent, learned, on_host)
        return own._replace(common=(F32 - of_host + momentum) * learned, host=of_host * learned)

    def has_rest(self, state: OuterState) -> bool:
        """Return whether the sums have."""
        return self.sums.has_rest(state.sums)

    def without_rest(self, state: OuterState) -> OuterState:
        """Return the state after the outer step that took it."""
        return state._replace(sums=self.sums.without_rest(state.sums))

    def moved(self, params: Params, delta: Params, velocity: Params | None) -> tuple[Params, Params | None]:
        """Take a step by the mean change `delta`; return (parameters, velocity)."""
        eta, mu = self.rate, self.momentum
        if velocity is None:
            steps = jax.tree.map(lambda d: eta * d, delta)
        else:
            velocity = jax.tree.map(lambda v, d: mu * v + d, velocity, delta)
            steps = jax.tree.map(lambda v, d: eta * (mu * v + d), velocity, delta)
        return jax.tree.map(jnp.subtract, params, steps), velocity
