"""The loss of a model that offers `embed`, `block` and `loss`: one `scan` over each stack of its layers.

At ZeRO stages 2 and 3 (FSDP) a layer's weights are gathered, and its gradient is reduced, inside that scan. All k
micro-batches run inside each layer, one after the other, so that this happens once per step.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int, Key

from jaxdist.mesh.split import saved_by_layer
from jaxdist.models import Model, Params, Stack
from jaxdist.models.decoder import Aux
from jaxdist.models.inputs import NO_INPUTS, BlockInputs
from jaxdist.parallel import periods, placing
from jaxdist.parallel.partial_trees import joined
from jaxdist.parallel.pipeline.stages import BLOCKS
from jaxdist.parallel.placement import Placements, differentiated
from jaxdist.parallel.sink import in_use
from jaxdist.parallel.vocabulary import Vocabulary
from jaxdist.sharding import LAYERS, Layout, Tree
from jaxdist.training.forward.accumulation import AccumulatingForward, Outcome
from jaxdist.training.forward.asked import Batch, Scale, Summed
from jaxdist.training.forward.balance import weighed
from jaxdist.training.forward.base import PLAIN, ForwardOptions, made_at_rest
from jaxdist.training.forward.remat import INPUT, Wrapper, keep_all, offload_input, recompute


class DecoderForward(AccumulatingForward[Model]):
    """The forward pass of a decoder on a mesh without a pipeline.

    A batch holds `tokens` [k, B, S], `labels` [k, B, S] (negative: does not count), `rows` [k, B] (global row) and,
    where documents are kept apart, `starts` [k, B, S] (see `models.attention`).
    """

    def __init__(
        self,
        model: Model,
        layout: Layout,
        zero: placing.ZeroOptions = placing.DDP,
        options: ForwardOptions = PLAIN,
        inside: bool = True,
    ):
        """Lay the parameters out as `zero` asks; the model computes as `options` say.

        `inside` runs the micro-batches of ZeRO 2 and 3 inside each layer, at the price of keeping what is saved of all
        of them; otherwise they run one after the other.
        """
        self.model = model
        self.layout = layout
        self.dtype = options.dtype
        self.dropout = options.dropout
        self.seed = options.seed
        self.objective = options.objective
        self.stage = zero.stage
        self.inside = inside
        self.unroll = options.unroll
        """Whether the layers are written out one after the other, in place of one program that loops over them."""
        self.vocabulary = Vocabulary(layout, model.vocab)
        self.abstract = self.vocabulary.abstract(model.abstract)
        self.places = self.vocabulary.places(placing.placements(layout, model.axes, self.abstract, zero))
        saved = saved_by_layer(options.remat, zero.stage, pipelined=False)

        self.remat: Wrapper = keep_all
        """Wraps a layer of one micro-batch."""
        if saved != "none":
            self.remat = recompute(saved)

        self.remat_all: Wrapper = keep_all
        """Wraps a layer with all of its micro-batches."""
        if saved == "offload":
            self.remat_all = offload_input
        elif zero.stage >= 2:
            # Without this the backward pass would keep the gathered weights of every layer.
            self.remat_all = self.remat

    @property
    def aux_places(self) -> Placements:
        """How the sums of the layers are added up over the devices."""
        return placing.of_sums(self.layout, self.aux_shapes, (LAYERS,))

    def init(self, key: Key[Array, ""]) -> tuple[Params, Params]:
        """Return (parameters at rest, no variables)."""
        vocabulary = self.vocabulary
        assert vocabulary is not None

        def padded(key: Key[Array, ""]) -> Params:
            return vocabulary.pad(self.model.init(key))

        return made_at_rest(padded, self.places, key), {}

    def gradients(
        self, weights: Params, variables: Params, batch: Batch, step: Int[Array, ""], scale: Scale = None
    ) -> Summed:
        """Return what `AccumulatingForward.gradients` does; beside losses of layers the cross-entropy is weighed."""
        if self.has_layer_losses:
            k = len(batch["labels"])
            batch = batch | {"weight": jnp.broadcast_to(self.cross_entropy_weight(batch), (k,))}
        return super().gradients(weights, variables, batch, step, scale)

    def loss(
        self, weights: Params, sinks: Params | None, variables: Params, parts: Batch, step: Int[Array, ""] | None
    ) -> Outcome:
        """Return the loss of k micro-batches, summed; without a `step` there is no dropout."""
        keys = None
        if self.dropout and step is not None:
            keys = self.dropout_keys(parts["rows"], step)
        parts = self.with_reference(weights, parts)
        weights = self._gather_tops(weights, sinks)
        x, aux = self.hidden(weights, sinks, parts["tokens"], BlockInputs(keys, parts.get("starts")))
        loss, further = self.objective.sums(self.model, self.layout, self.cast(weights), x, parts)
        if "weight" in parts:
            loss = weighed(loss, parts["weight"][0])
        return loss, variables, dict(further), {name: aux[name] for name in self.aux_places}

    def row_losses(self, weights: Params, batch: Batch) -> Float[Array, "k B"]:
        """Return the loss in nats of each row of `batch`, summed over its labels, without dropout."""
        weights = self._gather_tops(weights, None)
        x, _ = self.hidden(weights, None, batch["tokens"], BlockInputs(starts=batch.get("starts")))
        return self.model.row_losses(self.cast(weights), x, batch["labels"])

    def logits(self, weights: Params, tokens: Int[Array, "B S"]) -> Float[Array, "B S V"]:
        """Return the logits of the next tokens, without dropout.

        `weights` are those that `accumulation.weights` returns; at stage 3 they are gathered here.
        """
        weights = self._gather_tops(weights, None)
        cast = self.cast(weights)
        x, _ = self.hidden(weights, None, tokens[None])
        return self.model.logits(cast, x[0])

    def hidden(
        self,
        weights: Params,
        sinks: Params | None,
        tokens: Int[Array, "k B S"],
        inputs: BlockInputs = NO_INPUTS,
    ) -> tuple[Float[Array, "k B s D"], Aux]:
        """Return (the residual stream after the last block, the layers' aux); `weights` hold any number of layers.

        The arrays of `inputs` have a dim of k micro-batches before their others.
        """
        layers = sum(_depth(stack.of(weights[BLOCKS])) for stack in self.model.stacks)

        def embed(tokens: Int[Array, "B S"], inputs: BlockInputs) -> Float[Array, "B s D"]:
            return self.model.embed(self.cast(weights), tokens, inputs.of_layer(layers))

        # The embedding has a dropout key of its own: it takes the number after the last layer's.
        x = _each(embed, tokens, inputs)
        found: Aux = {}
        for stack in self.model.stacks:
            x, aux = self._through(stack, weights, sinks, x, inputs)
            found |= aux
        return x, found

    def _through(
        self, stack: Stack, weights: Params, sinks: Params | None, x: Float[Array, "k B s D"], inputs: BlockInputs
    ) -> tuple[Float[Array, "k B s D"], Aux]:
        """Return (the residual stream after the layers of a stack, their aux)."""
        places = jax.tree.map(lambda p: p.layer, stack.of(self.places[BLOCKS]))

        def block(
            kind: int, x: Float[Array, "k B s D"], layer: tuple[Int[Array, ""], Params, Params | None]
        ) -> tuple[Float[Array, "k B s D"], Aux]:
            index, w, sinks = layer
            x = checkpoint_name(x, INPUT)
            # A sink takes the gradient of its weight. Unrolled layers would compute one of each that has none.
            learning = {} if sinks else differentiated(places, w)
            w = joined(jax.tree.map(jax.lax.stop_gradient, w), learning)
            w = in_use(places, w, sinks, self.stage)

            # Weights are cast inside the loop over micro-batches, so that their gradients are added in f32; matmuls
            # cast theirs themselves, so that gradients leave them in f32.
            @self.remat
            def one(x: Float[Array, "B s D"], inputs: BlockInputs) -> tuple[Float[Array, "B s D"], Aux]:
                cast = self.model.cast(w, self.dtype, products=False)
                return self.model.block(cast, x, inputs.of_layer(index), kind)

            x, aux = _each(one, x, inputs)
            return x, jax.tree.map(lambda a: a.sum(0), aux)

        of_stack = stack.of(weights[BLOCKS])
        sinks_of_stack = stack.of(sinks[BLOCKS]) if sinks and BLOCKS in sinks else None
        numbers = jnp.arange(stack.first, stack.first + _depth(of_stack))
        blocks = [self.remat_all(partial(block, kind)) for kind in stack.kinds]
        return periods.scan(blocks, x, (numbers, of_stack, sinks_of_stack), unroll=self.unroll)

    def _gather_tops(self, weights: Params, sinks: Params | None) -> Params:
        """Return `weights` with everything except the blocks ready for use."""
        top_sinks = _without_blocks(sinks) if sinks else None
        tops = in_use(_without_blocks(self.places), _without_blocks(weights), top_sinks, self.stage)
        return weights | tops


def _without_blocks(tree: dict[str, Any]) -> dict[str, Any]:
    return {name: part for name, part in tree.items() if name != BLOCKS}


def _depth(layers: Tree) -> int:
    """Return the number of layers [L, ...]."""
    return jax.tree.leaves(layers)[0].shape[0]


def _each(f: Callable[..., Any], *parts: Tree) -> Any:
    """Call `f` on each of the k micro-batches, one after the other, and stack the results."""
    if jax.tree.leaves(parts)[0].shape[0] == 1:
        # One micro-batch needs no loop.
        only = jax.tree.map(lambda a: a[0], parts)
        return jax.tree.map(lambda a: a[None], f(*only))
    return jax.lax.map(lambda parts: f(*parts), parts)
