"""One optimizer step as one jit-compiled function: the only place where models, layouts and the optimizer meet.

    micro-batches -> loss and gradients, added in f32 and reduced over the batch axes -> clip -> update

Every number is a sum over tokens until the end, so k micro-batches, N devices and one big batch give the same loss.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import reshard
from jaxtyping import Array, Bool, Float, Int, Key

from jaxdist.models import Model, Params
from jaxdist.models.attention import ATTENTION, is_cudnn_forward
from jaxdist.parallel import zero
from jaxdist.parallel.tensor import PRODUCT
from jaxdist.sharding import Layout, wide
from jaxdist.training.optimizer import clip

Batch = dict[str, Array]
"""k micro-batches: `tokens` [k, B, S], `labels` [k, B, S] (negative: does not count), `rows` [k, B] (global row)."""


class TrainState(NamedTuple):
    """What goes from step to step. A checkpoint holds all of it but `weights`."""

    step: Int[Array, ""]
    """Steps taken, skipped ones included."""
    params: Params
    optimizer: Any
    skipped: Int[Array, ""]
    """Steps whose update was skipped."""
    skipped_in_a_row: Int[Array, ""]
    weights: Params | None = None
    """The parameters in use, where they are kept between steps; they follow from `params`."""


class Metrics(NamedTuple):
    loss: Float[Array, ""]
    grad_norm: Float[Array, ""]
    tokens: Int[Array, ""]
    skipped: Int[Array, ""]
    skipped_in_a_row: Int[Array, ""]


class Step:
    """The functions of a run on one mesh; call them, and jit them, under `jax.set_mesh(mesh)`.

    `dtype` is what the model computes in; gradients are added and reduced in f32. `stage` is that of ZeRO. `inside`
    runs the micro-batches of stages 2 and 3 inside each layer, so that its weights are gathered and its gradient is
    reduced once per step, at the price of keeping what remat leaves of all of them; otherwise one after the other.
    `keep` keeps the weights in use between steps, in `dtype`, beside their f32 masters.
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
        stage: int = 0,
        inside: bool = True,
        keep: bool = False,
    ):
        self.model, self.optimizer, self.dtype = model, optimizer, dtype
        self.max_norm, self.dropout, self.seed = max_norm, dropout, seed
        self.stage, self.inside, self.keep = stage, inside, keep
        self.places = zero.placements(layout, model.axes, model.abstract, stage)
        self.remat = _recompute(KEPT[remat]) if remat != "none" or stage >= 2 else lambda f: f

    def init(self, key: Key[Array, ""]) -> TrainState:
        """The state before the first step, laid out for the mesh: each device makes its own shards."""
        rest = jax.tree.map(lambda p: p.rest, self.places)
        return self.start(jax.sharding.auto_axes(self.model.init, out_sharding=rest)(key))

    def place(self, params: Params) -> Params:
        """Parameters as they lie at rest."""
        return jax.tree.map(lambda p, w: reshard(w, p.rest), self.places, params)

    def start(self, params: Params) -> TrainState:
        """The state before the first step from these parameters, as `place` returns them."""
        count = jnp.zeros((), jnp.int32)
        weights = self.weights(params) if self.keep else None
        return TrainState(count, params, self.optimizer.init(params), count, count, weights)

    def weights(self, params: Params) -> Params:
        """What a step begins with: parameters in the compute dtype, gathered, but for stage 3."""
        cast = self._cast(params)
        return cast if self.stage == 3 else jax.tree.map(lambda p, w: p.gather(w), self.places, cast)

    def train(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        """One optimizer step. A loss or gradient that is not finite leaves parameters and optimizer as they are."""
        weights = state.weights if self.keep else self.weights(state.params)
        loss, grads, tokens = self.gradients(weights, batch, state.step)
        norm = optax.tree.norm(grads)
        updates, optimizer = self.optimizer.update(clip(grads, norm, self.max_norm), state.optimizer, state.params)
        params = optax.apply_updates(state.params, updates)

        finite = jnp.isfinite(loss) & jnp.isfinite(norm)
        params, optimizer = _choose(finite, (params, optimizer), (state.params, state.optimizer))
        weights = self.weights(params) if self.keep else None
        skipped = state.skipped + ~finite
        in_a_row = jnp.where(finite, 0, state.skipped_in_a_row + 1)
        metrics = Metrics(loss, norm, tokens, skipped, in_a_row)
        return TrainState(state.step + 1, params, optimizer, skipped, in_a_row, weights), metrics

    def gradients(
        self, weights: Params, batch: Batch, step: Int[Array, ""] | int = 0
    ) -> tuple[Float[Array, ""], Params, Int[Array, ""]]:
        """(mean loss in nats, its gradient in f32, labels that count), over all micro-batches and devices."""
        key = jax.random.fold_in(jax.random.key(self.seed), step) if self.dropout else None
        summed = self._reduced_at_the_end if self.stage < 2 else self._reduced_in_layers
        loss, grads = summed(weights, batch, key)
        tokens = jnp.sum(batch["labels"] >= 0)
        share = 1 / jnp.maximum(tokens, 1).astype(loss.dtype)
        return loss * share, jax.tree.map(lambda g: g * share, grads), tokens

    def _reduced_at_the_end(self, weights: Params, batch: Batch, key: Key[Array, ""] | None):
        """Stages 0 and 1: each device adds up its own gradients of all micro-batches, whole and in f32."""
        loss_of = lambda weights, parts: self._loss(weights, None, parts, key)
        zeros = jax.tree.map(lambda p, w: p.partial_sums(w), self.places, weights)
        loss, grads = self._add_up(loss_of, weights, zeros, _one_by_one(batch))
        return loss, jax.tree.map(lambda p, g: p.reduce(g), self.places, grads)

    def _reduced_in_layers(self, weights: Params, batch: Batch, key: Key[Array, ""] | None):
        """Stages 2 and 3: each layer's gradient is reduced as it is made, and only its shard is kept."""
        sinks = jax.tree.map(lambda p, w: p.sink(w.shape, wide(self.dtype)), self.places, self.model.abstract)
        loss_of = lambda sinks, parts: self._loss(weights, sinks, parts, key)
        groups = jax.tree.map(lambda a: a[None], batch) if self.inside else _one_by_one(batch)
        return self._add_up(loss_of, sinks, sinks, groups)

    def _add_up(self, loss_of, variables: Params, zeros: Params, groups: Batch):
        """(loss, gradient with respect to `variables`), added up over the leading dim of `groups`."""

        def add(total, parts: Batch):
            out = jax.value_and_grad(loss_of)(variables, parts)
            return jax.tree.map(lambda t, a: t + a.astype(t.dtype), total, out), None

        return jax.lax.scan(add, (jnp.zeros((), wide(self.dtype)), zeros), groups)[0]

    def evaluate(self, params: Params, batch: Batch) -> tuple[Float[Array, ""], Int[Array, ""]]:
        """(summed loss in nats, labels that count); divide the sums over all batches."""
        return self._loss(self.weights(params), None, batch, None), jnp.sum(batch["labels"] >= 0)

    def logits(self, params: Params, tokens: Int[Array, "B S"]) -> Float[Array, "B S V"]:
        """What the model thinks comes next, without dropout."""
        weights = self._tops(self.weights(params), None)
        return self.model.logits(self._cast(weights), self.hidden(weights, None, tokens[None], None)[0])

    def _loss(self, weights: Params, sinks: Params | None, parts: Batch, key: Key[Array, ""] | None):
        """Summed over k micro-batches, which run inside each layer one after the other."""
        keys = None if key is None else jax.vmap(jax.vmap(partial(jax.random.fold_in, key)))(parts["rows"])
        weights = self._tops(weights, sinks)
        x = self.hidden(weights, sinks, parts["tokens"], keys)
        return self.model.loss(self._cast(weights), x, parts["labels"])

    def hidden(
        self, weights: Params, sinks: Params | None, tokens: Int[Array, "k B S"], keys: Key[Array, "k B"] | None
    ) -> Float[Array, "k B s D"]:
        """The residual stream after the last block: one `scan` over the stacked layers, whatever their number."""
        layers = jax.tree.leaves(weights["blocks"])[0].shape[0]
        places = jax.tree.map(lambda p: p.layer, self.places["blocks"])

        @(self.remat if self.stage >= 2 else lambda f: f)  # so that a layer's weights in use are not kept
        def block(x, layer):
            index, w, sinks = layer
            w = self._in_use(places, w, sinks)
            one = self.remat(lambda x, keys: self.model.block(self._cast(w), x, _fold(keys, index)))
            return _each(one, x, keys), None

        embed = lambda tokens, keys: self.model.embed(self._cast(weights), tokens, _fold(keys, layers))
        x = _each(embed, tokens, keys)
        return jax.lax.scan(block, x, (jnp.arange(layers), weights["blocks"], sinks and sinks["blocks"]))[0]

    def _tops(self, weights: Params, sinks: Params | None) -> Params:
        """`weights` with all but the blocks ready for use."""
        top = lambda tree: tree and {name: tree[name] for name in tree if name != "blocks"}
        return weights | self._in_use(top(self.places), top(weights), top(sinks))

    def _in_use(self, places, weights: Params, sinks: Params | None) -> Params:
        """Weights whole and, where gradients are reduced as they are made, on the way to their sinks.

        They are cast where they are used, inside the loop over micro-batches, so that it adds gradients in f32.
        """
        if self.stage == 3:
            weights = jax.tree.map(lambda p, w: p.gather(w), places, weights)
        return weights if sinks is None else jax.tree.map(lambda p, w, s: p.land(w, s), places, weights, sinks)

    def _cast(self, params: Params) -> Params:
        return jax.tree.map(lambda w: w.astype(self.dtype), params)


KEPT = dict(none=(PRODUCT, ATTENTION), dots=(PRODUCT,), block=())
"""What the forward pass of a layer keeps for the backward pass beside its input, by name: `model.remat`."""


def _recompute(names: tuple[str, ...]):
    policies = jax.checkpoint_policies
    policy = policies.save_only_these_names(*names)
    if ATTENTION in names:
        policy = policies.save_from_both_policies(policy, is_cudnn_forward)
    return partial(jax.checkpoint, prevent_cse=False, policy=policy)


def _each(f, *parts):
    """`f` of the k micro-batches one after the other; the results are stacked."""
    if jax.tree.leaves(parts)[0].shape[0] == 1:
        return jax.tree.map(lambda a: a[None], f(*jax.tree.map(lambda a: a[0], parts)))
    return jax.lax.map(lambda parts: f(*parts), parts)


def _one_by_one(batch: Batch) -> Batch:
    """k groups of one micro-batch each."""
    return jax.tree.map(lambda a: a[:, None], batch)


def _fold(keys: Key[Array, " B"] | None, number) -> Key[Array, " B"] | None:
    return None if keys is None else jax.vmap(lambda key: jax.random.fold_in(key, number))(keys)


def _choose(condition: Bool[Array, ""], yes, no):
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), yes, no)
