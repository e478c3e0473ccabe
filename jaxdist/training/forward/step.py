"""One optimizer step as one jit-compiled function: the only place where models, layouts and the optimizer meet.

    micro-batches -> loss and gradients, accumulated in f32 and reduced over devices -> clip -> update

Every number is a sum (over tokens, or over rows) until the end, so k micro-batches, N devices and one big batch give
the same loss. Mixed precision: the model computes in bfloat16, from weights that are cast once per step or kept beside
their f32 masters, while gradients are accumulated and updates are made in f32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax
from jax.sharding import reshard
from jaxtyping import Array, Bool, Float, Int, Key

from jaxdist.models import Params
from jaxdist.models.decoder import Aux
from jaxdist.parallel import zero
from jaxdist.parallel.crossing.base import Crossing
from jaxdist.parallel.partial_trees import joined, part_of, without
from jaxdist.parallel.placement import Placement, differentiated, trained
from jaxdist.sharding import OfRows, Tree, Weighted, scale_partial
from jaxdist.training.forward.asked import AUX, LOSS, Batch, Forward, Further, Grads, Scale, Sums
from jaxdist.training.forward.group_norms import group_norms, norm_of, squares_of
from jaxdist.training.forward.loss_scale import LossScale, first
from jaxdist.training.forward.offload import to_device, to_host
from jaxdist.training.forward.optimizer import clip
from jaxdist.training.forward.spikes import Recent, Usual, none_yet


class TrainState(NamedTuple):
    """What goes from step to step. A checkpoint holds all of it, except what can be derived from the rest."""

    step: Int[Array, ""]
    """Steps taken, skipped ones included."""
    params: Params
    optimizer: Tree
    skipped: Int[Array, ""]
    """Steps whose update was skipped."""
    skipped_in_a_row: Int[Array, ""]
    weights: Params | None = None
    """The parameters in the compute dtype, where they are kept between steps; derived from `params`."""
    variables: Params = {}  # noqa: RUF012  # it is never changed in place
    """What the model changes while it computes: batch statistics, counts of random numbers."""
    in_flight: Tree = None
    """The batches in an asynchronous pipeline, which are through before the state is saved (`PipeDreamStep`)."""
    crossing: Tree = None
    """The state of the rule by which gradients cross the replicas (`parallel.crossing`).

    What a checkpoint holds of it is a dict, with a name for each item."""
    frozen: Params = {}  # noqa: RUF012  # it is never changed in place
    """The parameters that are not trained, which `params` does not hold."""
    loss_scale: LossScale | None = None
    """The scale of the loss in the next step, where it is scaled."""
    recent: Recent | None = None
    """What says whether the next step is a spike, where spikes are skipped."""


class Metrics(NamedTuple):
    """The results of a step, on the devices."""

    loss: Float[Array, ""]
    grad_norm: Float[Array, ""]
    count: Int[Array, ""]  # type: ignore[assignment]  # a tuple has a method of this name, which is not called here
    """What the loss is a mean over: labels that count, rows, or the sum of their weights."""
    skipped: Int[Array, ""]
    skipped_in_a_row: Int[Array, ""]
    further: Further
    """Means that the model's loss function returns beside the loss."""
    loss_scale: Float[Array, ""] | None = None
    """The scale of the loss in this step, where it is scaled."""
    usual: Usual | None = None
    """What was no spike in this step, where spikes are skipped."""
    spikes: Int[Array, ""] | None = None
    """Updates so far that were skipped because they were spikes."""


class Gradients(NamedTuple):
    """What a step computes of a batch before its update, over all micro-batches and devices; it lies on the devices."""

    grads: Grads
    """The gradient of the mean loss by each parameter that is trained, in f32; it lies as the parameters do."""
    loss: Float[Array, ""]
    count: Int[Array, ""]  # type: ignore[assignment]  # as in `Metrics`
    """What the loss is a mean over."""
    variables: Params
    """The variables after the batch."""
    further: Further
    """Means that the loss function returns beside the loss."""
    sums: Aux = {}  # noqa: RUF012  # it is never changed in place
    """Sums of the layers over all tokens, by which some parameters move that have no gradient."""
    aux: Tree = None
    """What the loss function returns beside the loss with `has_aux`: arrays [B, ...] of all rows of the batch."""


class Step:
    """The functions of a run on one mesh; call them, and jit them, under `jax.set_mesh(mesh)`."""

    def __init__(
        self,
        forward: Forward,
        optimizer: optax.GradientTransformation,
        max_norm: float = 0.0,
        keep: bool = False,
        offload: bool = False,
        crossing: Crossing | None = None,
        saves_frozen: bool = True,
        takes_loss: bool = False,
        scales: bool = False,
        spike: float = 0.0,
        norms: bool = False,
    ):
        """Join a model's forward pass with its optimizer; gradients are clipped to the global norm `max_norm` (0: not).

        `keep` keeps the weights in the compute dtype between steps, beside their f32 masters. `offload` lets the
        optimizer state, and such masters, rest in the host's memory. `crossing` is how gradients cross
        the replicas; None for exact sums. `saves_frozen`: a checkpoint holds the frozen parameters too, which otherwise
        come from where they came from. `takes_loss`: the optimizer's update has an argument `value`, the loss.
        `scales`: the backward pass scales the loss, as float16 needs it. `spike` is by how many standard deviations a
        loss or gradient norm is a spike, whose update is skipped (0: none is). `norms`: the metrics have the gradient
        norm of each group of parameters.
        """
        self.forward = forward
        self.takes_loss = takes_loss
        self.scales = scales
        self.spike = spike
        self.norms = norms
        self.optimizer = optimizer
        self.max_norm = max_norm
        self.keep = keep
        self.offload = offload
        self.places = trained(forward.places, forward.places)
        """The placements of the parameters that are trained."""
        self.differentiated = differentiated(forward.places, forward.places)
        """The placements of those among them that have a gradient."""
        self.crossing = crossing or Crossing()
        self.late = self.crossing.late
        """Steps by which the metrics of a step come later than the step itself."""
        self.saves_frozen = saves_frozen

    def init(self, key: Key[Array, ""]) -> TrainState:
        """Return the state before the first step, laid out for the mesh."""
        return self.start(*self.forward.init(key))

    def place(self, params: Params) -> Params:
        """Return the parameters laid out as they are between steps."""
        return jax.tree.map(lambda p, w: reshard(w, p.held), self.forward.places, params)

    def start(self, params: Params, variables: Params | None = None) -> TrainState:
        """Return the state before the first step from these parameters, as `place` returns them."""
        # Parameters that come from a checkpoint may wait in the host's memory.
        params = to_device(params)
        learned = part_of(params, self.places)
        state = self.fresh(learned, variables)._replace(frozen=without(params, learned))
        return self.at_rest(state._replace(**self.derived(state)))

    def fresh(self, params: Params, variables: Params | None) -> TrainState:
        """Return the state of the trained parameters before the first step, on the devices, without what is derived."""
        zero = jnp.zeros((), jnp.int32)
        learning = part_of(params, self.differentiated)
        return TrainState(
            step=zero,
            params=params,
            optimizer=self.optimizer.init(learning),
            skipped=zero,
            skipped_in_a_row=zero,
            variables=variables or {},
            crossing=self.crossing.start(self.differentiated, learning),
            loss_scale=first() if self.scales else None,
            recent=none_yet() if self.spike else None,
        )

    def at_rest(self, state: TrainState) -> TrainState:
        """Return the state with each part in the memory where it waits for the next step.

        With offload that is the host's memory for the optimizer state, and for the float32 parameters where bfloat16
        weights are kept on the device.
        """
        if not self.offload:
            return state
        params = to_host(state.params) if self.keep else state.params
        return state._replace(params=params, optimizer=to_host(state.optimizer))

    def derived(self, state: TrainState) -> dict[str, Tree]:
        """Return the fields of a state that follow from the others, and that a checkpoint does not hold.

        These are the weights in the compute dtype, where the step keeps them from one step to the next.
        """
        if not self.keep:
            return {}
        return {"weights": self.forward.weights(to_device(state.params))}

    def whole(self, state: TrainState) -> Params:
        """Return all parameters, trained and frozen."""
        return joined(state.params, state.frozen)

    def logical(self, state: TrainState) -> TrainState:
        """Return the state as a checkpoint holds it: layers as [L, ...] and tables as [V, D], whatever the mesh.

        What `derived` can make again is left out.
        """
        state = state._replace(weights=None, in_flight=None, crossing=self.crossing.saved(state.crossing))
        if not self.saves_frozen:
            state = state._replace(frozen={})
        if not self.forward.folds:
            return state
        return self._unfolded(state)

    @cached_property
    def _unfolded(self) -> Callable[[TrainState], TrainState]:
        """A compiled function that is kept, because every save calls it."""
        return jax.jit(lambda state: self.at_rest(self.unfolded(to_device(state))))

    def unfolded(self, tree: Tree) -> Tree:
        """Return parameters, or a tree that has their names, as a checkpoint holds them."""
        return self.forward.unfolded(tree)

    def folded(self, tree: Tree) -> Tree:
        """Return parameters of a checkpoint, or a tree that has their names, as a step holds them."""
        if not self.forward.folds:
            return tree
        return jax.jit(lambda tree: self.forward.folded(to_device(tree)))(tree)

    def resume(self, state: TrainState) -> TrainState:
        """Return the inverse of `logical`, with the fields that a checkpoint does not hold computed anew."""
        state = state._replace(
            params=self.folded(state.params),
            optimizer=self.folded(state.optimizer),
            frozen=self.folded(state.frozen),
            loss_scale=(state.loss_scale or first()) if self.scales else None,
            recent=(state.recent or none_yet()) if self.spike else None,
        )

        def resumed(saved: dict[str, Tree], params: Params) -> Tree:
            return self.crossing.resumed(self.differentiated, to_device(saved), part_of(params, self.differentiated))

        state = state._replace(crossing=jax.jit(resumed)(self.folded(state.crossing), state.params))
        return self.at_rest(state._replace(**jax.jit(self.derived)(state)))

    def train(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        """Take one optimizer step. One that is not finite, or is a spike, changes nothing except the counts."""
        state, metrics = self.step_on_device(to_device(state), batch)
        return self.at_rest(state), metrics

    def step_on_device(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        """Do what `train` does with a state that is on the devices, and stays there."""
        scale = self._scale_of_sum(state, batch)
        made = self._means(self.weights_of(state), state.variables, batch, state.step, scale)
        loss, sums, count, variables, further, aux = made
        grads, crossing = self.crossing.add_up(self.differentiated, sums, state.crossing, state.step)
        aux = jax.tree.map(zero.cross, self.forward.aux_places, aux)
        further = further | self.forward.reported(aux, batch)
        gradients = Gradients(grads, loss, count, variables, further, aux)
        extra = {"value": loss} if self.takes_loss else {}
        return self.taken(state, state._replace(crossing=crossing), gradients, extra)

    def differentiate(self, state: TrainState, batch: Batch) -> Gradients:
        """Return what a step computes of `batch` before its update; gradients cross the replicas exactly."""
        state = to_device(state)
        scale = self._scale_of_sum(state, batch)
        return self.gradients(self.weights_of(state), state.variables, batch, state.step, scale)

    def _scale_of_sum(self, state: TrainState, batch: Batch) -> Scale:
        """Return the scale of the loss summed over `batch`; None where it is not scaled."""
        if state.loss_scale is None:
            return None
        return state.loss_scale.of_sum(self.forward.count(batch))

    def update(self, state: TrainState, gradients: Gradients, extra: dict[str, Any]) -> tuple[TrainState, Metrics]:
        """Take a step with these gradients; `extra` are further arguments of the optimizer's update."""
        state = to_device(state)
        if self.takes_loss:
            extra = {"value": gradients.loss, **extra}
        state, metrics = self.taken(state, state, gradients, extra)
        return self.at_rest(state), metrics

    def taken(
        self, state: TrainState, crossed: TrainState, gradients: Gradients, extra: dict[str, Any]
    ) -> tuple[TrainState, Metrics]:
        """Return `state` after a step; `crossed` is the same state after its gradients have crossed the replicas."""
        loss = gradients.loss
        squares = squares_of(gradients.grads)
        norm = norm_of(squares)
        updated = self.updated(crossed, gradients.grads, norm, gradients.sums, extra)
        finite = jnp.isfinite(loss) & jnp.isfinite(norm)
        scale, recent = state.loss_scale, state.recent
        usual = recent.usual(self.spike) if recent else None
        made = finite & usual.has(loss, norm) if usual else finite
        state = self.settled(state, updated._replace(variables=gradients.variables), made)
        # A spike says nothing about the scale of the loss.
        state = state._replace(
            step=state.step + 1,
            loss_scale=scale.after(finite) if scale else None,
            recent=recent.after(loss, norm, finite, made) if recent else None,
        )
        counts = gradients.count, state.skipped, state.skipped_in_a_row
        scaled = scale.scale if scale else None
        spikes = state.recent.spikes if state.recent else None
        further = gradients.further | self.group_norms(squares)
        return state, Metrics(loss, norm, *counts, further, scaled, usual, spikes)

    def group_norms(self, squares: Tree) -> Further:
        """Return the norms of the groups of a gradient, where they are reported, from its sums of squares."""
        return group_norms(squares) if self.norms else {}

    def weights_of(self, state: TrainState) -> Params:
        """Return the weights that a step from this state computes with."""
        if not self.keep:
            return self.forward.weights(self.whole(state))
        assert state.weights is not None
        return joined(state.weights, self.forward.weights(state.frozen)) if state.frozen else state.weights

    def updated(
        self,
        state: TrainState,
        grads: Grads,
        norm: Float[Array, ""],
        aux: Aux,
        extra: Mapping[str, Any] = MappingProxyType({}),
    ) -> TrainState:
        """Return the state after the update by a gradient of this norm, which is clipped first, and by aux.

        `extra` are further arguments of the optimizer's update.
        """
        learning = part_of(state.params, grads)
        rule = optax.with_extra_args_support(self.optimizer)
        updates, optimizer = rule.update(clip(grads, norm, self.max_norm), state.optimizer, learning, **extra)
        params = joined(state.params, cast(Params, optax.apply_updates(learning, updates)))
        return state._replace(params=self.forward.steered(params, aux), optimizer=optimizer)

    def settled(self, state: TrainState, updated: TrainState, made: Bool[Array, ""]) -> TrainState:
        """Return `updated` where that update is `made`; otherwise `state`, with one more skipped step."""
        # An update is skipped on the devices: no step waits for the host to look at it.
        new = (updated.params, updated.optimizer, updated.variables, updated.crossing)
        old = (state.params, state.optimizer, state.variables, state.crossing)
        params, optimizer, variables, crossing = _choose(made, new, old)
        return state._replace(
            params=params,
            optimizer=optimizer,
            skipped=state.skipped + ~made,
            skipped_in_a_row=jnp.where(made, 0, state.skipped_in_a_row + 1),
            weights=self.forward.weights(params) if self.keep else None,
            variables=variables,
            crossing=crossing,
        )

    def gradients(
        self, weights: Params, variables: Params, batch: Batch, step: Int[Array, ""] | int = 0, scale: Scale = None
    ) -> Gradients:
        """Return the loss and its gradient over all micro-batches and devices; nothing of them is compressed.

        The backward pass computes with `scale` times the loss, of which the gradients show nothing.
        """
        loss, sums, count, variables, further, aux = self._means(weights, variables, batch, step, scale)
        grads, _ = Crossing().add_up(self.differentiated, sums, None, jnp.asarray(step))
        aux = jax.tree.map(zero.cross, self.forward.aux_places, aux)
        of_rows: Any = further.pop(AUX, None)
        further = further | self.forward.reported(aux, batch)
        rows = None if of_rows is None else of_rows.arrays
        return Gradients(grads, loss, count, variables, further, aux, rows)

    def _means(
        self, weights: Params, variables: Params, batch: Batch, step: Int[Array, ""] | int, scale: Scale = None
    ) -> tuple[Float[Array, ""], Grads, Int[Array, ""], Params, Further, Aux]:
        """Return what `gradients` does, and aux, before the replicas' parts of the gradient and aux are added up."""
        loss, grads, variables, further, aux = self.forward.gradients(
            weights, variables, batch, jnp.asarray(step), scale
        )
        count, further = self._counted(batch, further)
        # The labels of a batch may all be masked: divide by 1 then.
        divisor = jnp.maximum(count, 1) if jnp.issubdtype(count.dtype, jnp.integer) else jnp.where(count == 0, 1, count)
        factor = 1 / divisor.astype(loss.dtype)

        def mean(total: Array | Weighted | OfRows) -> Any:
            if isinstance(total, OfRows):
                return total
            return total.mean if isinstance(total, Weighted) else total * factor

        positions = self.forward.positions(batch)
        share = factor if positions is None else jnp.asarray(1 / positions, factor.dtype)
        if scale is not None:
            share = share / scale

        def own_part(place: Placement, total: Array) -> Array:
            return scale_partial(total, share) if place.deferred else total * share

        grads = jax.tree.map(own_part, self.differentiated, grads)
        return mean(loss), grads, count, variables, {name: mean(total) for name, total in further.items()}, aux

    def _counted(self, batch: Batch, further: Sums) -> tuple[Array, Sums]:
        """Return (what the loss is to be divided by, the other sums)."""
        loss = further.get(LOSS)
        if isinstance(loss, Weighted):
            return loss.weight, {name: total for name, total in further.items() if name != LOSS}
        return self.forward.count(batch), further

    def evaluate(
        self, params: Params, variables: Params, batch: Batch
    ) -> tuple[Float[Array, ""], Int[Array, ""], Sums]:
        """Return (summed loss, what to divide it by, further sums); divide the sums over all batches."""
        weights = self.forward.weights(to_device(params))
        loss, further = self.forward.evaluate(weights, variables, batch)
        count, further = self._counted(batch, further)
        return loss, count, further


def _choose(condition: Bool[Array, ""], yes: Tree, no: Tree) -> Tree:
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), yes, no)
