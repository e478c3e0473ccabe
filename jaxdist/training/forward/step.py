"""One optimizer step as one jit-compiled function: the only place where models, layouts and the optimizer meet.

    micro-batches -> loss and gradients, added in f32 and reduced over the batch axes -> clip -> update

Every number is a sum (over tokens, or over rows) until the end, so k micro-batches, N devices and one big batch give
the same loss.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import optax
from jax.sharding import reshard
from jaxtyping import Array, Bool, Float, Int, Key

from jaxdist.models import Params
from jaxdist.parallel.pipeline.stages import Stages
from jaxdist.training.forward.offload import to_device, to_host
from jaxdist.training.forward.optimizer import clip

Batch = Any
"""A tree of arrays [k, B, ...]: k micro-batches of B rows."""

Further = dict[str, Float[Array, ""]]
"""What a loss function returns beside the loss, by name."""

Summed = tuple[Float[Array, ""], Params, Params, Further]
"""(loss, gradients, variables, further), all but the variables sums over what `Forward.count` counts."""


class TrainState(NamedTuple):
    """What goes from step to step. A checkpoint holds all of it but what follows from the rest (`derived`)."""

    step: Int[Array, ""]
    """Steps taken, skipped ones included."""
    params: Params
    optimizer: Any
    skipped: Int[Array, ""]
    """Steps whose update was skipped."""
    skipped_in_a_row: Int[Array, ""]
    weights: Params | None = None
    """The parameters in use, where they are kept between steps; they follow from `params`."""
    variables: Params | None = None
    """What the model changes while it computes: batch statistics, counts of random numbers."""
    in_flight: Any = None
    """What is under way in an asynchronous pipeline, which is emptied before its state is saved."""


class Metrics(NamedTuple):
    loss: Float[Array, ""]
    grad_norm: Float[Array, ""]
    count: Int[Array, ""]
    """What the loss is a mean over: labels that count, or rows."""
    skipped: Int[Array, ""]
    skipped_in_a_row: Int[Array, ""]
    further: Further
    """Means that the model's loss function returns beside the loss."""


class Forward(Protocol):
    """How a model's loss and gradients come from its weights: what a step asks of a model."""

    places: Any
    """A `zero.Placement` for every parameter."""
    abstract: Params
    stages: Stages | None
    """How a pipeline holds the layers."""

    def init(self, key: Key[Array, ""]) -> tuple[Params, Params]:
        """(parameters at rest, variables)."""

    def weights(self, params: Params) -> Params:
        """What a step begins with: parameters in the compute dtype, and gathered, if that is done once per step."""

    def gradients(self, weights: Params, variables: Params, batch: Batch, step: Int[Array, ""]) -> Summed:
        """Over all micro-batches and devices; gradients lie as parameters at rest, in f32."""

    def evaluate(self, weights: Params, variables: Params, batch: Batch) -> tuple[Float[Array, ""], Further]:
        """(summed loss, further sums)."""

    def count(self, batch: Batch) -> Int[Array, ""]:
        """What to divide sums by."""


class Step:
    """The functions of a run on one mesh; call them, and jit them, under `jax.set_mesh(mesh)`.

    Gradients are added and reduced in f32. `keep` keeps the weights in use between steps, in the compute dtype, beside
    their f32 masters. `offload` has the optimizer's state, and such masters, rest in the host's memory.
    """

    def __init__(
        self,
        forward: Forward,
        optimizer: optax.GradientTransformation,
        max_norm: float = 0.0,
        keep: bool = False,
        offload: bool = False,
    ):
        self.forward, self.optimizer, self.max_norm = forward, optimizer, max_norm
        self.keep, self.offload = keep, offload
        self.places = forward.places
        self.late = 0
        """Steps until the metrics of a step are told."""

    def init(self, key: Key[Array, ""]) -> TrainState:
        """The state before the first step, laid out for the mesh."""
        return self.start(*self.forward.init(key))

    def place(self, params: Params) -> Params:
        """Parameters as they lie at rest."""
        return jax.tree.map(lambda p, w: reshard(w, p.rest), self.places, params)

    def start(self, params: Params, variables: Params | None = None) -> TrainState:
        """The state before the first step from these parameters, as `place` returns them."""
        count, params = jnp.zeros((), jnp.int32), to_device(params)
        state = TrainState(count, params, self.optimizer.init(params), count, count, None, variables or {})
        return self.at_rest(state._replace(**self.derived(state)))

    def at_rest(self, state: TrainState) -> TrainState:
        """The state with each part in the memory where it waits for the next step."""
        if not self.offload:
            return state
        masters = to_host(state.params) if self.keep else state.params
        return state._replace(params=masters, optimizer=to_host(state.optimizer))

    def derived(self, state: TrainState) -> dict[str, Any]:
        """What follows from the rest of a state, and a checkpoint does not hold."""
        return {"weights": self.forward.weights(to_device(state.params))} if self.keep else {}

    def logical(self, state: TrainState) -> TrainState:
        """The state as a checkpoint holds it: layers as [L, ...] whatever the mesh."""
        state = state._replace(weights=None, in_flight=None)
        if self.forward.stages is None:
            return state
        return self._unfolded(state)

    @cached_property
    def _unfolded(self) -> Callable[[TrainState], TrainState]:
        """A program that is kept: every save calls it."""
        return jax.jit(lambda state: self.at_rest(self.forward.stages.unfolded(to_device(state))))

    def folded(self, tree: Any) -> Any:
        """Parameters, or what has their names, from a checkpoint, as a step holds them."""
        stages = self.forward.stages
        return tree if stages is None else jax.jit(lambda tree: stages.folded(to_device(tree)))(tree)

    def resume(self, state: TrainState) -> TrainState:
        """The inverse of `logical`, with what a checkpoint does not hold made again."""
        state = state._replace(params=self.folded(state.params), optimizer=self.folded(state.optimizer))
        return self.at_rest(state._replace(**jax.jit(self.derived)(state)))

    def train(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        """One optimizer step. A loss or gradient that is not finite leaves all but the counts as it is."""
        state = to_device(state)
        weights = state.weights if self.keep else self.forward.weights(state.params)
        loss, grads, count, variables, further = self.gradients(weights, state.variables, batch, state.step)
        norm = optax.tree.norm(grads)
        updates, optimizer = self.optimizer.update(clip(grads, norm, self.max_norm), state.optimizer, state.params)
        params = optax.apply_updates(state.params, updates)

        finite = jnp.isfinite(loss) & jnp.isfinite(norm)
        old = state.params, state.optimizer, state.variables
        params, optimizer, variables = _choose(finite, (params, optimizer, variables), old)
        weights = self.forward.weights(params) if self.keep else None
        skipped = state.skipped + ~finite
        in_a_row = jnp.where(finite, 0, state.skipped_in_a_row + 1)
        metrics = Metrics(loss, norm, count, skipped, in_a_row, further)
        state = TrainState(state.step + 1, params, optimizer, skipped, in_a_row, weights, variables)
        return self.at_rest(state), metrics

    def gradients(self, weights: Params, variables: Params, batch: Batch, step: Int[Array, ""] | int = 0):
        """(mean loss, its gradient in f32, what it is a mean over, variables, further means), over all devices."""
        loss, grads, variables, further = self.forward.gradients(weights, variables, batch, jnp.asarray(step))
        count = self.forward.count(batch)
        mean = lambda total: total * (1 / jnp.maximum(count, 1).astype(loss.dtype))
        return mean(loss), jax.tree.map(mean, grads), count, variables, jax.tree.map(mean, further)

    def evaluate(self, params: Params, variables: Params, batch: Batch):
        """(summed loss, what to divide it by, further sums); divide the sums over all batches."""
        loss, further = self.forward.evaluate(self.forward.weights(to_device(params)), variables, batch)
        return loss, self.forward.count(batch), further


def _choose(condition: Bool[Array, ""], yes, no):
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), yes, no)
