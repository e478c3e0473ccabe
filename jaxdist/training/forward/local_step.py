"""Local steps: each replica takes H steps by itself, and then all take an outer step together.

    H times, in each replica r:   theta_r, m_r <- the usual step, with the replica's rows of the batch
    then, all together:           delta <- sum over r of n_r / n (theta - theta_r)
                                  v <- mu v + delta
                                  theta <- theta - eta (mu v + delta)
                                  theta_r <- theta

n_r is the number of labels from which replica r has learned in the round, m_r its moments, which stay its own. With
eta = 1 and mu = 0 the weights become the mean of the replicas': local SGD (Stich 2019), federated averaging (McMahan et
al. 2017). With Nesterov momentum, eta = 0.7 and mu = 0.9, it is DiLoCo (Douillard et al. 2023, algorithm 1).

The step of a replica is compiled for its own devices alone: no collective over `replica` can be in it. The outer step
is a program of the whole mesh. The two hand arrays to each other without a copy (`training.rounds`): what a replica has
of its own has a last dim that `replica` splits, of size R on the whole mesh and of size 1 on that of one replica.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import reshard
from jaxtyping import Array, Float, Int

from jaxdist.config import RequestError
from jaxdist.models import Params
from jaxdist.parallel import zero
from jaxdist.parallel.crossing import replicas
from jaxdist.parallel.crossing.outer import Outer, OuterState
from jaxdist.parallel.partial_trees import joined, part_of, without
from jaxdist.parallel.placement import Placement
from jaxdist.sharding import Tree
from jaxdist.training.forward.asked import Batch
from jaxdist.training.forward.offload import to_device, to_host
from jaxdist.training.forward.step import Metrics, Step, TrainState


class Common(NamedTuple):
    """What all replicas have in common between rounds."""

    params: Params
    crossing: OuterState


class LocalStep(Step):
    """The functions of a run with local steps, on the whole mesh or on that of one replica.

    Between rounds all replicas have the same parameters, and the state holds them once; its `optimizer`, `skipped` and
    `skipped_in_a_row` are [..., R].
    """

    crossing: Outer

    def fresh(self, params: Params, variables: Params | None) -> TrainState:
        """Return the state before the first step, all of it on the devices."""
        state = super().fresh(params, variables)
        return state._replace(
            optimizer=self._of_each(state.optimizer),
            skipped=self._of_each(state.skipped),
            skipped_in_a_row=self._of_each(state.skipped_in_a_row),
        )

    def derived(self, state: TrainState) -> dict[str, Tree]:
        """Return nothing: only replicas, in a round, keep weights in the compute dtype."""
        return {}

    def resume(self, state: TrainState) -> TrainState:
        """Return the inverse of `logical`. On another number of replicas, each gets the mean of the saved moments."""
        own = state.optimizer, state.skipped, state.skipped_in_a_row
        optimizer, skipped, in_a_row = jax.jit(lambda own: replicas.dealt(to_device(own), self.crossing.replicas))(own)
        return super().resume(state._replace(optimizer=optimizer, skipped=skipped, skipped_in_a_row=in_a_row))

    def train(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        """Raise `RequestError`: there is no step of all devices (`training.rounds`)."""
        raise RequestError(
            f"train.local_steps is {self.crossing.every}, but this command needs a step of all devices together; "
            f"set it to 0"
        )

    def replicas_of(self, state: TrainState) -> TrainState:
        """Return what the replicas have of their own before a round: the common parameters, and their moments."""
        params = self._masters_at_rest(self._of_each(to_device(state.params)))
        return state._replace(step=self._of_each(state.step), params=params, crossing=None)

    def begin(self, state: TrainState) -> TrainState:
        """Return the state of a replica at the beginning of a round; `state` is its part of `replicas_of`."""
        if not self.keep:
            return state
        return state._replace(weights=self.forward.weights(replicas.alone(to_device(state.params))))

    def take(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        """Take one step in a replica, with its rows of the batch; the metrics are its own, [1].

        `weights`, which follow from `params`, is the only field without a dim for the replica.
        """
        own = replicas.alone(to_device(state._replace(weights=None)))
        new, metrics = self.step_on_device(own._replace(weights=state.weights), batch)
        state = self.at_rest(self._of_each(new._replace(weights=None)))
        return state._replace(weights=new.weights), self._of_each(metrics)

    def outer_step(
        self, common: Common, own: Params, learned: Float[Array, " R"], step: Int[Array, " R"], metrics: Metrics
    ) -> tuple[Common, Params, Int[Array, ""], Metrics]:
        """End a round; return what is common, the replicas' parameters, the step, and metrics of the whole mesh.

        `own` are the replicas' parameters [..., R], `learned` the labels, or rows, from which each has learned in the
        round, and `metrics` [R] those of each one's last step. The loss is the mean over their labels, the norm the
        mean of the replicas' own. Of skipped steps the most of a replica count.
        """
        common = to_device(common)
        weight = learned / jnp.maximum(jnp.sum(learned), 1)

        def change(place: Placement, w: Array, own: Array) -> Array:
            moved = (self._of_each(w) - own) * replicas.like(weight, own)
            # Where data splits a gradient only while it crosses, a device takes its part of what it has.
            return replicas.partial_sums(place, reshard(moved, replicas.own_parts(place)))

        changes = jax.tree.map(change, self.places, common.params, to_device(own))
        velocity, before = common.crossing
        learning = part_of(changes, self.differentiated)
        delta, sums = self.crossing.sums.add_up(self.differentiated, learning, before, jnp.max(step))
        params, velocity = self.crossing.moved(part_of(common.params, delta), delta, velocity)
        params = joined(self._steered_by_all(common.params, changes), params)
        own = self._masters_at_rest(self._of_each(params))
        common = Common(self._masters_at_rest(params), OuterState(velocity, sums))
        return common, own, jnp.max(step), _of_all(metrics)

    def _steered_by_all(self, params: Params, changes: Params) -> Params:
        """Return the parameters that have no gradient: they become the mean of the replicas'."""
        places = without(self.places, self.differentiated)
        total = jax.tree.map(zero.cross, places, part_of(changes, places))
        return jax.tree.map(lambda w, d: w - d, part_of(params, places), total)

    def _of_each(self, tree: Tree) -> Tree:
        return replicas.of_each(tree, self.crossing.replicas)

    def _masters_at_rest(self, params: Params) -> Params:
        """Return parameters in the memory where they wait for the next step."""
        return to_host(params) if self.offload and self.keep else params


def _of_all(metrics: Metrics) -> Metrics:
    """Return the metrics [R] of the replicas' steps, joined into the metrics of one step."""
    count = jnp.sum(metrics.count)
    share = metrics.count / jnp.maximum(count, 1)

    def mean(own: Float[Array, " R"]) -> Float[Array, ""]:
        # A replica without labels has no loss that would count, not even NaN.
        return jnp.sum(jnp.where(share > 0, own * share, 0))

    return Metrics(
        loss=mean(metrics.loss),
        grad_norm=mean(metrics.grad_norm),
        count=count,
        skipped=jnp.max(metrics.skipped),
        skipped_in_a_row=jnp.max(metrics.skipped_in_a_row),
        further=jax.tree.map(mean, metrics.further),
    )
