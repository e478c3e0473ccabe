"""One optimizer step as one jit-compiled function: the only place where models, layouts and the optimizer meet.

    micro-batches -> loss and partial-sum gradients, added in f32 -> reduce once -> clip -> update

Every number is a sum over tokens until the end, so k micro-batches, N devices and one big batch give the same loss.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int, Key

from jaxdist.models import Model, Params
from jaxdist.parallel import zero
from jaxdist.sharding import PRODUCT, Layout, wide
from jaxdist.training.optimizer import clip

Batch = dict[str, Array]
"""k micro-batches: `tokens` [k, B, S], `labels` [k, B, S] (negative: does not count), `rows` [k, B] (global row)."""


class TrainState(NamedTuple):
    """Everything that a checkpoint has to hold."""

    step: Int[Array, ""]
    """Steps taken, skipped ones included."""
    params: Params
    optimizer: Any
    skipped: Int[Array, ""]
    """Steps whose update was skipped."""
    skipped_in_a_row: Int[Array, ""]


class Metrics(NamedTuple):
    loss: Float[Array, ""]
    grad_norm: Float[Array, ""]
    tokens: Int[Array, ""]
    skipped: Int[Array, ""]
    skipped_in_a_row: Int[Array, ""]


class Step:
    """The functions of a run on one mesh; call them, and jit them, under `jax.set_mesh(mesh)`.

    `dtype` is what the model computes in; parameters, gradients and their sums are f32.
    """

    def __init__(
        self,
        model: Model,
        layout: Layout,
        optimizer: optax.GradientTransformation,
        dtype: Any = jnp.float32,
        remat: str = "none",
        max_norm: float = 0.0,
        dropout: bool = False,
        seed: int = 0,
    ):
        self.model, self.optimizer, self.dtype = model, optimizer, dtype
        self.max_norm, self.dropout, self.seed = max_norm, dropout, seed
        self.rest, self.use = zero.layouts(layout, model.axes)
        self.remat = REMAT[remat]

    def init(self, key: Key[Array, ""]) -> TrainState:
        """The state before the first step, laid out for the mesh."""
        return self.start(self.place(self.model.init(key)))

    def place(self, params: Params) -> Params:
        """Parameters as they lie at rest."""
        return jax.tree.map(zero.reduce, params, self.rest)

    def start(self, params: Params) -> TrainState:
        """The state before the first step from these parameters."""
        count = jnp.zeros((), jnp.int32)
        return TrainState(count, params, self.optimizer.init(params), count, count)

    def train(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        """One optimizer step. A loss or gradient that is not finite leaves parameters and optimizer as they are."""
        loss, grads, tokens = self.gradients(state.params, batch, state.step)
        norm = optax.tree.norm(grads)
        updates, optimizer = self.optimizer.update(clip(grads, norm, self.max_norm), state.optimizer, state.params)
        params = optax.apply_updates(state.params, updates)

        finite = jnp.isfinite(loss) & jnp.isfinite(norm)
        params, optimizer = _choose(finite, (params, optimizer), (state.params, state.optimizer))
        skipped = state.skipped + ~finite
        in_a_row = jnp.where(finite, 0, state.skipped_in_a_row + 1)
        metrics = Metrics(loss, norm, tokens, skipped, in_a_row)
        return TrainState(state.step + 1, params, optimizer, skipped, in_a_row), metrics

    def gradients(
        self, params: Params, batch: Batch, step: Int[Array, ""] | int = 0
    ) -> tuple[Float[Array, ""], Params, Int[Array, ""]]:
        """(mean loss in nats, its gradient in f32, labels that count), over all micro-batches and devices."""
        weights = jax.tree.map(zero.gather, self._cast(params), self.use)
        key = jax.random.fold_in(jax.random.key(self.seed), step) if self.dropout else None

        def micro_batch(total, part: Batch):
            out = jax.value_and_grad(self._loss)(weights, part, key)
            return jax.tree.map(lambda t, a: t + a.astype(t.dtype), total, out), None

        zeros = jax.tree.map(zero.partial_sums, weights, self.use)
        (loss, grads), _ = jax.lax.scan(micro_batch, (jnp.zeros((), wide(self.dtype)), zeros), batch)
        grads = jax.tree.map(zero.reduce, grads, self.rest)
        tokens = jnp.sum(batch["labels"] >= 0)
        share = 1 / jnp.maximum(tokens, 1).astype(loss.dtype)
        return loss * share, jax.tree.map(lambda g: g * share, grads), tokens

    def evaluate(self, params: Params, batch: Batch) -> tuple[Float[Array, ""], Int[Array, ""]]:
        """(summed loss in nats, labels that count); divide the sums over all batches."""
        weights = self._cast(params)
        one = lambda total, part: (total + self._loss(weights, part, None), None)
        loss, _ = jax.lax.scan(one, jnp.zeros((), wide(self.dtype)), batch)
        return loss, jnp.sum(batch["labels"] >= 0)

    def logits(self, params: Params, tokens: Int[Array, "B S"]) -> Float[Array, "B S V"]:
        """What the model thinks comes next, without dropout."""
        weights = self._cast(params)
        return self.model.logits(weights, self.hidden(weights, tokens, None))

    def _cast(self, params: Params) -> Params:
        return jax.tree.map(lambda w: w.astype(self.dtype), params)

    def _loss(self, weights: Params, part: Batch, key: Key[Array, ""] | None) -> Float[Array, ""]:
        keys = None if key is None else jax.vmap(partial(jax.random.fold_in, key))(part["rows"])
        x = self.hidden(weights, part["tokens"], keys)
        return self.model.loss(weights, x, part["labels"])

    def hidden(
        self, weights: Params, tokens: Int[Array, "B S"], keys: Key[Array, " B"] | None
    ) -> Float[Array, "B S D"]:
        """The residual stream after the last block: one `scan` over the stacked layers, whatever their number."""

        @self.remat
        def block(x, layer):
            index, w = layer
            return self.model.block(w, x, _fold(keys, index)), None

        layers = jax.tree.leaves(weights["blocks"])[0].shape[0]
        x = self.model.embed(weights, tokens, _fold(keys, layers))
        return jax.lax.scan(block, x, (jnp.arange(layers), weights["blocks"]))[0]


REMAT = dict(
    none=lambda f: f,
    dots=partial(jax.checkpoint, prevent_cse=False, policy=jax.checkpoint_policies.save_only_these_names(PRODUCT)),
    block=partial(jax.checkpoint, prevent_cse=False),
)
"""What a layer's backward pass recomputes: `model.remat`."""


def _fold(keys: Key[Array, " B"] | None, number) -> Key[Array, " B"] | None:
    return None if keys is None else jax.vmap(lambda key: jax.random.fold_in(key, number))(keys)


def _choose(condition: Bool[Array, ""], yes, no):
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), yes, no)
