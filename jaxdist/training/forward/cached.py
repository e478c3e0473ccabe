"""The forward pass of generation, in one manual region on any mesh: prefill fills a key-value cache, a step extends it.

Tokens are split by rows alone. What splits the sequence in training, `context`, splits the slots of the cache: each
device attends to its own slots, and the results are joined by their log sum exp.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from operator import itemgetter

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import reshard
from jaxtyping import Array, Float, Int

from jaxdist.config import ModelConfig
from jaxdist.config.model import Kind
from jaxdist.config.stacks import stacks_of
from jaxdist.mesh.split import cached_heads_of
from jaxdist.models import Params, Stack, build_decoder
from jaxdist.models.attention import causal_attention
from jaxdist.models.decoding import Cache, attend_to_slots, slots_of, tokens_in
from jaxdist.models.inputs import BlockInputs
from jaxdist.models.scores import Scores
from jaxdist.models.sinks import Sinks, with_sinks
from jaxdist.parallel import placing, region, zero
from jaxdist.parallel.context import Starts, join_over
from jaxdist.parallel.pipeline.relay import Place, relay, written_out
from jaxdist.parallel.pipeline.stages import BLOCKS, Stages
from jaxdist.sharding import BATCH, SLOTS, STAGES, Layout, Tree, forward_spec
from jaxdist.training.forward.decoder import DecoderForward
from jaxdist.training.forward.offload import to_device
from jaxdist.training.forward.pipeline import PipelineForward

Caches = tuple[Cache, ...]
"""A cache for each kind of layer; or for each layer, where they are written out."""


class CachedForward:
    """The programs of generation, to be jitted; they take weights that `ready` has made."""

    def __init__(self, forward: DecoderForward | PipelineForward, config: ModelConfig, layout: Layout, whole: bool):
        """Take the forward pass of training, its model's configuration, and the layout of its mesh.

        Whether weights of ZeRO 3 are kept `whole`, or gathered in each layer for each token, is up to the caller, who
        sees to it that they fit twice if they are.
        """
        self.forward = forward
        self.config = config
        self.layout = layout.with_whole_rows()
        self.inner = replace(self.layout, manual=True)
        """The layout inside the region."""
        self.model = build_decoder(config, self.inner)
        self.piped = forward.stages is not None
        self.whole = whole
        self.gathers = forward.stage == 3 and not whole
        """Whether each layer gathers its weights when it runs."""
        stacks = stacks_of(config).values()
        self.kinds = [kind for stack in stacks for kind in stack.kinds]
        """The kinds of layers by their numbers."""
        self.stages = [Stages(1, 1, (stack.layers,), len(stack.kinds)) for stack in stacks]
        if forward.stages:
            self.stages = list(forward.stages.stacks.values())
        """Where the layers of each stack run."""
        zero_options = placing.ZeroOptions(forward.stage)
        self.places = placing.placements(self.layout, forward.axes, forward.abstract, zero_options)
        self.top_places = {name: place for name, place in self.places.items() if name != BLOCKS}
        lead = 3 if self.piped else 1
        self.layer_places = self.places[BLOCKS]
        for _ in range(lead):
            self.layer_places = jax.tree.map(lambda place: place.layer, self.layer_places)

    @property
    def apart(self) -> bool:
        """Whether layers are written out one after the other, each with weights and a cache of its own.

        On a GPU a token takes as long as reading the weights and the cache. A loop would cut those of each layer out
        of a stack first, and so write them and read them again. Slices that are written out would go into the kernels,
        but no two kernels would be the same then, and XLA would compile and measure those of each layer.
        """
        return self.whole and not self.piped and self.layout.platform != "cpu"

    def ready(self, params: Params) -> Params:
        """Return the parameters of a train state as the region takes them, in the compute dtype.

        Where each layer gathers its own, they stay sharded over `data`.
        """
        weights = self.forward.weights(to_device(params))
        if not self.gathers and (self.piped or self.forward.stage == 3):
            weights = jax.tree.map(zero.gather, self.forward.places, weights)
        if self.apart:
            weights = {**weights, BLOCKS: self._by_stack(lambda stack, layers: _cut(stack.of(weights[BLOCKS]), layers))}
        return jax.tree.map(reshard, weights, self._weight_specs)

    def prefill(
        self,
        weights: Params,
        tokens: Int[Array, "R T"],
        starts: Starts,
        begins: Int[Array, " B"],
        lengths: Int[Array, " B"],
        room: int,
    ) -> tuple[Caches, Float[Array, "B V"]]:
        """Return (the cache of B fresh prompts, which holds `room` tokens of each; the logits after each of them).

        The prompts stand in R rows of T tokens; `starts` is None where each row is one prompt. `begins` says where each
        prompt begins in the tokens of its own batch rank, counted row by row, and `lengths` how long it is.
        """
        rows = self.layout.spec([BATCH])
        of_tokens = self.layout.spec([BATCH, None])
        arguments = [reshard(tokens, of_tokens), reshard(begins, rows), reshard(lengths, rows)]
        specs = [of_tokens, rows, rows]
        if starts is not None:
            arguments.append(reshard(starts, of_tokens))
            specs.append(of_tokens)
        prefill = jax.shard_map(
            partial(self._prefill, room),
            in_specs=(self._weight_specs, *specs),
            out_specs=(self._cache_spec, self._logit_spec),
        )
        return prefill(weights, *arguments)

    def step(
        self, weights: Params, cache: Caches, tokens: Int[Array, " B"], positions: Int[Array, " B"], room: int
    ) -> tuple[Caches, Float[Array, "B V"]]:
        """Return (the cache with one token more in each row, at `positions`; the logits after these tokens).

        `room` is what `prefill` got.
        """
        rows = self.layout.spec([BATCH])
        specs = (self._weight_specs, self._cache_spec, rows, rows)
        step = jax.shard_map(partial(self._step, room), in_specs=specs, out_specs=(self._cache_spec, self._logit_spec))
        return step(weights, cache, reshard(tokens, rows), reshard(positions, rows))

    @property
    def _cache_spec(self) -> Tree:
        """How the cache lies: layers over stages, rows over the batch, heads over `model`, slots over `context`."""
        return self.layout.spec([None, STAGES, None, BATCH, "heads", SLOTS, None])

    @property
    def _logit_spec(self) -> Tree:
        return self.layout.spec([BATCH, "vocab"])

    @property
    def _weight_specs(self) -> Tree:
        """How the weights that `ready` makes lie."""
        if self.gathers:
            return jax.tree.map(lambda place: place.rest, self.places)
        places = self.places
        if self.apart:
            places = {**places, BLOCKS: self._by_stack(lambda stack, layers: (stack.of(self.layer_places),) * layers)}
        return jax.tree.map(lambda place: forward_spec(place.use), places)

    def _by_stack(self, make: Callable[[Stack, int], tuple[Tree, ...]]) -> Tree:
        """Return what `make` returns of each stack and the number of its layers, as the weights have it."""
        stacks = zip(self.model.stacks, self.stages, strict=True)
        found = {stack.name: make(stack, stages.depth) for stack, stages in stacks}
        # The only stack has no name.
        return found.get("", found)

    def _prefill(
        self,
        room: int,
        weights: Params,
        tokens: jax.Array,
        begins: jax.Array,
        lengths: jax.Array,
        starts: Starts = None,
    ) -> tuple[Caches, jax.Array]:
        """Do the work of `prefill` on one device."""
        # A slot that no token is for gets the first one.
        sources = [begins[:, None] + jnp.maximum(0, self._tokens_in(kind, room, lengths - 1)) for kind in self.kinds]
        inputs = BlockInputs(starts=starts)

        def layer(stack: Stack, w: Params, x: jax.Array, caches: Caches, place: Place) -> tuple[jax.Array, Caches]:
            kind = stack.kinds[place.kind]

            def attend(
                scores: Scores, q: jax.Array, k: jax.Array, v: jax.Array, sinks: Sinks = None
            ) -> tuple[jax.Array, Cache]:
                found = causal_attention(self.inner, scores, q, k, scores.values(k, v), starts, sinks)
                return found, Cache(*(_taken(a, sources[kind]).swapaxes(1, 2) for a in (k, v)))

            x, made = self.model.block_with(self._in_use(stack.of(self.layer_places), w), x, inputs, attend, kind)
            cache = Cache(*(_put(all_, new, place) for all_, new in zip(caches[place.part], made, strict=True)))
            return x, _replaced(caches, place.part, cache)

        tops = self._tops(weights)
        x = self._vary(self.model.embed(self._with_blocks(tops), tokens, inputs))
        x, cache = self._through(layer, weights, x, self._empty(len(begins), room))
        last = _taken(x, (begins + lengths - 1)[:, None])
        return jax.tree.map(lambda a: a[:, None], cache), self._logits(tops, last)

    def _step(
        self, room: int, weights: Params, cache: Caches, tokens: jax.Array, positions: jax.Array
    ) -> tuple[Caches, jax.Array]:
        """Do the work of `step` on one device."""
        # The only token of a row has index 0.
        inputs = BlockInputs(starts=-positions[:, None])
        counts = [self._count(kind, room) for kind in self.kinds]
        slots = [self._slots(kind, room) for kind in self.kinds]
        held = [self._tokens_in(kind, room, positions) for kind in self.kinds]
        rows = jnp.arange(len(tokens))

        def layer(stack: Stack, w: Params, x: jax.Array, caches: Caches, place: Place) -> tuple[jax.Array, Caches]:
            kind = stack.kinds[place.kind]
            own = slots[kind]
            # A slot that is another device's, or written when it is another rank's turn, is out of bounds and dropped.
            slot = jnp.where(place.counts, positions % counts[kind] - own[0], len(own))

            def write(to: jax.Array, new: jax.Array) -> jax.Array:
                at = to.at[place.chunk, place.of_part, rows, :, slot]
                return at.set(new[:, 0], mode="drop", wrap_negative_indices=False)

            def attend(
                scores: Scores, q: jax.Array, k: jax.Array, v: jax.Array, sinks: Sinks = None
            ) -> tuple[jax.Array, Cache]:
                cache = caches[place.part]
                written = Cache(write(cache.k, k), write(cache.v, v))
                own_k, own_v = (a[place.chunk, place.of_part] for a in written)
                own_v = scores.values(own_k, own_v)
                found = attend_to_slots(scores, q, own_k, own_v, held[kind], positions)
                found = with_sinks(join_over(self.inner.split(SLOTS), found), sinks)
                return found.out.astype(q.dtype), written

            x, cache = self.model.block_with(self._in_use(stack.of(self.layer_places), w), x, inputs, attend, kind)
            return x, _replaced(caches, place.part, cache)

        tops = self._tops(weights)
        x = self._vary(self.model.embed(self._with_blocks(tops), tokens[:, None], inputs))
        x, cache = self._through(layer, weights, x, jax.tree.map(_own_stage, cache))
        return jax.tree.map(lambda a: a[:, None], cache), self._logits(tops, x)

    def _through(
        self, layer: Callable[..., tuple[jax.Array, Caches]], weights: Params, x: jax.Array, cache: Caches
    ) -> tuple[jax.Array, Caches]:
        """Run all layers on the residual stream `x`; `layer` takes the stack that it is in before what `relay` says."""
        made: Caches = ()
        for stack, stages in zip(self.model.stacks, self.stages, strict=True):
            blocks = stack.of(weights[BLOCKS])
            run: Callable[..., tuple[jax.Array, Caches]] = written_out
            if not self.apart:
                run = relay
                blocks = jax.tree.map(_own_stage if self.piped else _as_chunk, blocks)
            own = cache[len(made) : len(made) + len(self._parts(stack, stages))]
            x, own = run(stages, partial(layer, stack), blocks, x, own)
            made += own
        return x, made

    def _logits(self, tops: Params, x: Float[Array, "B 1 D"]) -> Float[Array, "B V"]:
        """Return this device's part of the logits after one token in each row."""
        piped = self.layout.split(STAGES)
        if piped:
            # The stream has come back to the first rank.
            x = region.add_up(jnp.where(lax.axis_index(piped) == 0, x, 0), piped)
        logits = self.model.logits(self._with_blocks(tops), x)[:, 0]
        copies = self.layout.split(SLOTS)
        if copies:
            # All have the same, which types do not show.
            logits = region.add_up(jnp.where(lax.axis_index(copies) == 0, logits, 0), copies)
        return logits

    def _tops(self, weights: Params) -> Params:
        """Return the weights outside the layers, in use."""
        return self._in_use(self.top_places, {name: weights[name] for name in self.top_places})

    def _in_use(self, places: Tree, weights: Tree) -> Tree:
        """Return weights in use: at ZeRO 3 they are gathered here."""
        if self.gathers:
            return jax.tree.map(zero.gather_manual, places, weights)
        return jax.tree.map(lambda place, w: region.vary(w, place.use.reduced), places, weights)

    def _with_blocks(self, tops: Params) -> Params:
        """Return `tops` with shapes in the place of the layers, which embedding and head do not use."""
        return tops | {BLOCKS: self.model.abstract[BLOCKS]}

    def _vary(self, x: jax.Array) -> jax.Array:
        """Return the residual stream, typed as it is after a layer."""
        axes = (*self.layout.split(BATCH), *self.layout.split(SLOTS), *self.layout.split(STAGES))
        return region.vary(x, axes)

    def _count(self, kind: Kind, room: int) -> int:
        """Return the slots of a row in layers of a kind, on all devices, of a cache that holds `room` tokens."""
        return slots_of(kind, room, self.inner.parts(SLOTS))

    def _slots(self, kind: Kind, room: int) -> Int[Array, " C"]:
        """Return the slots that this device holds of layers of a kind."""
        return self.inner.positions(self._count(kind, room) // self.inner.parts(SLOTS), SLOTS)

    def _tokens_in(self, kind: Kind, room: int, positions: Int[Array, " B"]) -> Int[Array, "B C"]:
        """Return which tokens are in these slots, where the last one of a row is at `positions`."""
        return tokens_in(self._slots(kind, room), self._count(kind, room), positions)

    def _empty(self, rows: int, room: int) -> Caches:
        """Return this device's part of caches of zeros, for a number of rows of its own and `room` tokens of each."""
        heads = cached_heads_of(self.config, self.layout.parts("heads"))
        axes = [axis for name in (STAGES, BATCH, SLOTS, "heads") for axis in self.layout.split(name)]

        def empty(stages: Stages, kind: int, layers: int) -> Cache:
            slots = self._count(self.kinds[kind], room) // self.layout.parts(SLOTS)
            shape = (stages.virtual, layers, rows, heads.key_value, slots)
            sizes = (heads.key_size, heads.value_size)
            return Cache(*(region.zeros((*shape, size), self.forward.dtype, axes) for size in sizes))

        stacks = zip(self.model.stacks, self.stages, strict=True)
        return tuple(empty(stages, *part) for stack, stages in stacks for part in self._parts(stack, stages))

    def _parts(self, stack: Stack, stages: Stages) -> list[tuple[int, int]]:
        """Return (number of the kind, layers of a chunk) of each cache of a stack."""
        if self.apart:
            return [(stack.kinds[number % stages.period], 1) for number in range(stages.depth)]
        return [(kind, stages.places_of(number)) for number, kind in enumerate(stack.kinds)]


def _cut(blocks: Tree, layers: int) -> tuple[Tree, ...]:
    """Return the weights of each layer, of [L, ...]."""
    return tuple(jax.tree.map(itemgetter(number), blocks) for number in range(layers))


def _own_stage(a: jax.Array) -> jax.Array:
    """Return [v, depth, ...] of a device's part [v, 1, depth, ...]."""
    return a[:, 0]


def _as_chunk(a: jax.Array) -> jax.Array:
    """Return layers [L, ...] as the only chunk of a rank [1, L, ...]."""
    return a[None]


def _taken(a: Float[Array, "R T ..."], source: Int[Array, "B S"]) -> Float[Array, "B S ..."]:
    """Return for each row the tokens `source`, counted row by row."""
    rows, length, *rest = a.shape
    return a.reshape(rows * length, *rest)[source]


def _replaced(caches: Caches, kind: int, cache: Cache) -> Caches:
    """Return the caches with another one of a kind."""
    return (*caches[:kind], cache, *caches[kind + 1 :])


def _put(to: Float[Array, "v depth ..."], new: Float[Array, "..."], place: Place) -> Float[Array, "v depth ..."]:
    """Return `to` with `new` in a layer's place, if it is this rank's turn."""
    if place.counts is not True:
        new = jnp.where(place.counts, new, to[place.chunk, place.of_part])
    return to.at[place.chunk, place.of_part].set(new)
