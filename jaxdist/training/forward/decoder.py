"""The loss of a model that offers `embed`, `block` and `loss`: one `scan` over its stacked layers.

At ZeRO 2 and 3 a layer's weights are gathered, and its gradient reduced, inside that scan; k micro-batches run inside
each layer one after the other, so that this happens once per step.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int, Key

from jaxdist.models import Model, Params
from jaxdist.models.attention import ATTENTION, Starts, is_cudnn_forward
from jaxdist.parallel import zero
from jaxdist.parallel.tensor import PRODUCT
from jaxdist.sharding import HOST, Layout
from jaxdist.training.forward.accumulation import AccumulatingForward, Outcome
from jaxdist.training.forward.step import Batch


class DecoderForward(AccumulatingForward):
    """The forward pass of a `Step`: batches of `tokens` [k, B, S], `labels` [k, B, S] (negative: does not count),
    `rows` [k, B] (global row) and, where documents are apart, `starts` [k, B, S] (`models.attention`).

    `dtype` is what the model computes in, `stage` that of ZeRO. `inside` runs the micro-batches of stages 2 and 3
    inside each layer, at the price of keeping what `remat` leaves of all of them; otherwise one after the other.
    `unroll` writes the layers out one after the other, in place of one program that loops over them.
    """

    def __init__(
        self,
        model: Model,
        layout: Layout,
        dtype: Any = jnp.float32,
        remat: str = "none",
        dropout: bool = False,
        seed: int = 0,
        stage: int = 0,
        inside: bool = True,
        unroll: bool = False,
    ):
        self.model, self.dtype, self.dropout, self.seed = model, dtype, dropout, seed
        self.stage, self.inside, self.unroll = stage, inside, unroll
        self.places = zero.placements(layout, model.axes, model.abstract, stage)
        self.abstract = model.abstract
        self.remat = recompute(remat) if remat != "none" or stage >= 2 else lambda f: f
        self.around = inputs_in_host if remat == "offload" else self.remat if stage >= 2 else lambda f: f
        """What is done to a layer with its micro-batches; from stage 2 on, so that its weights in use are not kept."""

    def init(self, key: Key[Array, ""]) -> tuple[Params, Params]:
        """(parameters, nothing else), each device making its own shards."""
        rest = jax.tree.map(lambda p: p.rest, self.places)
        return jax.sharding.auto_axes(self.model.init, out_sharding=rest)(key), {}

    def count(self, batch: Batch) -> Int[Array, ""]:
        """Labels that count."""
        return jnp.sum(batch["labels"] >= 0)

    def loss(
        self, weights: Params, sinks: Params | None, variables: Params, parts: Batch, step: Int[Array, ""] | None
    ) -> Outcome:
        """In nats, summed over the labels of k micro-batches; without a `step` there is no dropout."""
        keys = None
        if self.dropout and step is not None:
            key = jax.random.fold_in(jax.random.key(self.seed), step)
            keys = jax.vmap(jax.vmap(partial(jax.random.fold_in, key)))(parts["rows"])
        weights = self._tops(weights, sinks)
        x = self.hidden(weights, sinks, parts["tokens"], keys, parts.get("starts"))
        return self.model.loss(self._cast(weights), x, parts["labels"]), variables, {}

    def logits(self, weights: Params, tokens: Int[Array, "B S"]) -> Float[Array, "B S V"]:
        """What the model thinks comes next, without dropout."""
        weights = self._tops(weights, None)
        return self.model.logits(self._cast(weights), self.hidden(weights, None, tokens[None], None)[0])

    def hidden(
        self,
        weights: Params,
        sinks: Params | None,
        tokens: Int[Array, "k B S"],
        keys: Key[Array, "k B"] | None,
        starts: Int[Array, "k B S"] | None = None,
    ) -> Float[Array, "k B s D"]:
        """The residual stream after the last block, whatever the number of layers."""
        layers = jax.tree.leaves(weights["blocks"])[0].shape[0]
        places = jax.tree.map(lambda p: p.layer, self.places["blocks"])

        @self.around
        def block(x, layer):
            index, w, sinks = layer
            x = checkpoint_name(x, INPUT)
            w = zero.in_use(places, w, sinks, self.stage)
            one = self.remat(lambda x, keys, starts: self.model.block(self._cast(w), x, fold_in(keys, index), starts))
            return _each(one, x, keys, starts), None

        def embed(tokens: Int[Array, "B S"], keys: Key[Array, " B"] | None, starts: Starts) -> Float[Array, "B s D"]:
            return self.model.embed(self._cast(weights), tokens, fold_in(keys, layers), starts)

        x = _each(embed, tokens, keys, starts)
        over = jnp.arange(layers), weights["blocks"], sinks and sinks["blocks"]
        return jax.lax.scan(block, x, over, unroll=self.unroll)[0]

    def _tops(self, weights: Params, sinks: Params | None) -> Params:
        """`weights` with all but the blocks ready for use."""
        top = lambda tree: tree and {name: tree[name] for name in tree if name != "blocks"}
        return weights | zero.in_use(top(self.places), top(weights), top(sinks), self.stage)

    def _cast(self, params: Params) -> Params:
        return jax.tree.map(lambda w: w.astype(self.dtype), params)


INPUT = "input of a layer"
"""The name of what a layer begins with: named inside it, because a scan that is told to offload what it carries does
not."""

KEPT = dict(none=(PRODUCT, ATTENTION), dots=(PRODUCT,), block=(), stage=(), offload=())
"""What the forward pass of a layer keeps for the backward pass beside its input, by name: `model.remat`. Where a mesh
has no stages, a run that recomputes them (it came from one that has) recomputes blocks."""


def recompute(remat: str):
    """What makes a function of a layer keep no more than `remat` says."""
    names = KEPT[remat]
    policies = jax.checkpoint_policies
    policy = policies.save_only_these_names(*names)
    if ATTENTION in names:
        policy = policies.save_from_both_policies(policy, is_cudnn_forward)
    return partial(jax.checkpoint, prevent_cse=False, policy=policy)


def inputs_in_host(f):
    """`f` of a layer, computed again in the backward pass from its input, which waits for it in the host's memory."""
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=(), names_which_can_be_offloaded=(INPUT,), offload_src="device", offload_dst=HOST
    )
    return jax.checkpoint(f, prevent_cse=False, policy=policy)


def _each(f, *parts):
    """`f` of the k micro-batches one after the other; the results are stacked."""
    if jax.tree.leaves(parts)[0].shape[0] == 1:
        return jax.tree.map(lambda a: a[None], f(*jax.tree.map(lambda a: a[0], parts)))
    return jax.lax.map(lambda parts: f(*parts), parts)


def fold_in(keys: Key[Array, " B"] | None, number) -> Key[Array, " B"] | None:
    """Each row's key for a layer."""
    return None if keys is None else jax.vmap(lambda key: jax.random.fold_in(key, number))(keys)
