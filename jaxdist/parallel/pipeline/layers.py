"""The layers of a chunk that have one form, forward and backward: a `scan` over them each, or over periods of kinds.

In the forward pass, a layer keeps what its `jax.vjp` holds on to, except for what is available again in the backward
pass: its weights and the micro-batch. Where a schedule splits the backward pass, B replaces what was kept by a stash
for W (see `split`). At ZeRO 3 a weight in use is not available again at W: what W needs of one, a bias or a norm's
scale, is stashed like any value, so that W gathers nothing.

Which of its arrays a layer keeps, how its pullback is put together again, and where its backward pass is cut: all that
is found once for each kind of layer, by tracing one on shapes alone (`Backward.of`). It holds for every layer of the
kind and every micro-batch, as these layers have the same shapes and run the same function.

What is kept and stashed lies in rings, with one slot for each micro-batch in flight; a kind has rings of its own, as
deep as a chunk has layers of it. Each layer reads and writes its own place in them, so that nothing of the size of a
slot is made on the way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxdist.mesh import PIPELINE
from jaxdist.parallel import periods, region, zero
from jaxdist.parallel.partial_trees import joined, part_of
from jaxdist.parallel.pipeline.split import Halves, halves
from jaxdist.parallel.pipeline.stages import Stages
from jaxdist.parallel.placement import differentiated
from jaxdist.sharding import Tree, wide

Rings = list[list[Array]]
"""For each kind of layer in a period, arrays [slots, places of this kind, ...]."""
Slot = jax.Array | int
SlotIn = Callable[[jax.Array], Slot]
"""Returns the slot in which a ring is read."""

Shapes = Sequence[jax.ShapeDtypeStruct]
About = TypeVar("About")

Available = tuple[Tree, Tree, Array]
"""(weights, micro-batch, number) of a layer: what its backward pass has again without keeping it."""

Layer = Callable[[Tree, Float[Array, "..."], Tree, Array], tuple[Float[Array, "..."], Tree]]
"""(weights of a layer, residual stream, micro-batch, number of the layer) -> (residual stream, aux)."""

Numbered = tuple[Int[Array, ""], Tree, Int[Array, ""], Bool[Array, ""]]
"""(place, weights, number, valid) of a layer: one step of a scan over `Unit.layers`."""


class Unit(NamedTuple):
    """What F, B and W of a chunk and a micro-batch work with, of one stack of layers."""

    chunk: Slot
    """Which of this rank's chunks."""
    weights: Tree
    """[depth, ...] each."""
    number: Int[Array, " depth"]
    """The number of each layer in the model."""
    valid: Bool[Array, " depth"]
    """Whether it is a layer, and not padding."""
    part: Tree
    """The micro-batch."""

    @property
    def layers(self) -> tuple[Int[Array, " depth"], Tree, Int[Array, " depth"], Bool[Array, " depth"]]:
        """(place, weights, number, valid) of the layers, for a scan over them."""
        return jnp.arange(len(self.number)), self.weights, self.number, self.valid

    @property
    def first(self) -> Available:
        """What is available again of the first layer."""
        return jax.tree.map(lambda w: w[0], self.weights), self.part, self.number[0]


@dataclass(frozen=True)
class Pullback:
    """What the pullback of a layer consists of: arrays that are kept, and arrays that are available again."""

    structure: Any
    """The tree structure of the function that `jax.vjp` returns; its leaves are arrays."""
    sources: tuple[int | None, ...]
    """For each of its arrays, the number of the available array that it is; None for one that is kept."""

    def rebuilt(self, kept: Sequence[jax.Array], available: Tree) -> Callable[..., Any]:
        """Return the pullback of a layer from what `take_apart` kept of it, and what is available again."""
        next_kept = iter(kept)
        leaves = jax.tree.leaves(available)
        arrays = [next(next_kept) if source is None else leaves[source] for source in self.sources]
        return jax.tree.unflatten(self.structure, arrays)


def take_apart(pullback: Callable[..., Any], available: Tree) -> tuple[Pullback, list[jax.Array]]:
    """Return what a pullback consists of, and those of its arrays that have to be kept.

    An array of the pullback is one of `available` if it is the same object: JAX puts a value that the backward pass
    needs into the pullback as it is, and never as a copy of it.
    """
    arrays, structure = jax.tree.flatten(pullback)
    numbers = {id(a): i for i, a in enumerate(jax.tree.leaves(available))}
    sources = tuple(numbers.get(id(a)) for a in arrays)
    kept = [a for a, source in zip(arrays, sources, strict=True) if source is None]
    return Pullback(structure, sources), kept


@dataclass(frozen=True)
class Layers:
    """Forward passes of the layers of a chunk."""

    of_kinds: Sequence[Layer]
    """A layer of each kind in a period."""
    stages: Stages
    places: Tree
    """The placements of the parameters of one layer."""
    stage: int
    """Of ZeRO."""
    together: Callable[[Tree], Tree]
    """`Device.together`"""

    def forward(self, unit: Unit, x: jax.Array) -> tuple[jax.Array, Tree]:
        """Return (x after the layers, their aux); nothing is kept for a backward pass."""

        def one(kind: int, x: jax.Array, layer: Numbered) -> tuple[jax.Array, Tree]:
            _, w, number, valid = layer
            y, aux = self.of_kinds[kind](self.in_use(w), x, unit.part, number)
            return self.where(valid, y, x), self._of_layers(valid, aux)

        return self.scan(one, x, unit)

    def forward_keeping(self, unit: Unit, x: jax.Array, kept: Rings, slot: Slot) -> tuple[Rings, jax.Array, Tree]:
        """Return (`kept` with what the layers keep in `slot`, x after the layers, their aux)."""

        def one(kind: int, carry: tuple[Rings, jax.Array], layer: Numbered) -> tuple[tuple[Rings, jax.Array], Tree]:
            kept, x = carry
            place, w, number, valid = layer
            _, made, y, aux = self.forward_of_layer(kind, (w, unit.part, number), x)
            return (self.put(kept, kind, made, slot, place), self.where(valid, y, x)), self._of_layers(valid, aux)

        (kept, x), aux = self.scan(one, (kept, x), unit)
        return kept, x, aux

    def scan(
        self, one: Callable[[int, Any, Numbered], tuple[Any, Any]], carry: Any, unit: Unit, reverse: bool = False
    ) -> tuple[Any, Tree]:
        """Run `one(kind, carry, layer)` for each layer of a chunk; return (the carry, the results of the layers)."""
        bodies = [partial(one, kind) for kind in range(self.stages.period)]
        return periods.scan(bodies, carry, unit.layers, reverse=reverse)

    def aux(self, unit: Unit, x: jax.Array, lead: tuple[int, ...]) -> Tree:
        """Return zeros for the aux of the layers, [*lead, depth, ...] each, in f32 at least."""
        w, part, number = unit.first

        def zeros(a: jax.ShapeDtypeStruct) -> jax.Array:
            shape = (*lead, self.stages.depth, *a.shape)
            return region.zeros(shape, wide(a.dtype), a.manual_axis_type.varying | {PIPELINE})

        return jax.tree.map(zeros, jax.eval_shape(lambda: self.of_kinds[0](self.in_use(w), x, part, number)[1]))

    def forward_of_layer(
        self, kind: int, available: Available, x: jax.Array
    ) -> tuple[Pullback, list[jax.Array], jax.Array, Tree]:
        """Return (what its pullback consists of, what the layer keeps of it, its output, its aux)."""
        w, part, number = available
        w = self.in_use(w)

        def of_learning(own: Tree, x: jax.Array) -> tuple[jax.Array, Tree]:
            return self.of_kinds[kind](joined(w, own), x, part, number)

        y, pullback, aux = jax.vjp(of_learning, differentiated(self.places, w), x, has_aux=True)
        return *take_apart(pullback, (w, part, number)), y, aux

    def in_use(self, w: Tree) -> Tree:
        """Return the weights of a layer in use: at ZeRO 3 they are gathered here."""
        if self.stage < 3:
            return w
        return jax.tree.map(zero.gather_manual, self.places, w)

    def _of_layers(self, valid: jax.Array, aux: Tree) -> Tree:
        """Return the aux of a layer, and zeros for padding."""
        return jax.tree.map(lambda a: self.where(valid, a, jnp.zeros_like(a)), aux)

    def where(self, valid: jax.Array, yes: jax.Array, no: jax.Array) -> jax.Array:
        """Return `yes` for a layer and `no` for padding."""
        if not self.stages.padded:
            return yes
        return jnp.where(valid, yes, no)

    def empty(self, of_kinds: Sequence[Shapes], slots: int) -> Rings:
        """Return empty rings for what a layer of each kind writes."""
        return [
            [_in_ring(a, (slots, self.stages.places_of(kind))) for a in of_layer]
            for kind, of_layer in enumerate(of_kinds)
        ]

    def get(self, rings: Rings, kind: int, slot_in: SlotIn, place: jax.Array) -> list[jax.Array]:
        """Read what a layer of this kind, at `place` of the chunk, has written to a slot."""
        at = self.stages.among_its_kind(place)
        return [_read(a, slot_in(a), at) for a in rings[kind]]

    def put(self, rings: Rings, kind: int, values: list[jax.Array], slot: Slot, place: jax.Array) -> Rings:
        """Return the rings with what a layer of this kind, at `place` of the chunk, writes to a slot."""
        at = self.stages.among_its_kind(place)
        written = [_written(a, value, slot, at) for a, value in zip(rings[kind], values, strict=True)]
        return [*rings[:kind], written, *rings[kind + 1 :]]


@partial(jax.tree_util.register_dataclass, data_fields=["arrays"], meta_fields=["about"])
@dataclass(frozen=True)
class Traced(Generic[About]):
    """Arrays, which come out of a trace as shapes, and what the trace has found out about them."""

    arrays: Sequence[Any]
    about: About


@dataclass(frozen=True)
class Backward:
    """Backward passes of the layers of a chunk, from what their forward passes have kept.

    What tracing a layer of each kind has found stands in lists, by the number of the kind in the period.
    """

    layers: Layers
    pullbacks: Sequence[Pullback]
    keeps: Sequence[Shapes]
    """What a layer keeps of its pullback."""
    halves: Sequence[Halves] = ()
    """B and W of a layer, where the schedule splits the backward pass."""
    stashes: Sequence[Shapes] = ()
    """What B of a layer hands to W."""

    @classmethod
    def of(cls, layers: Layers, example: Callable[[], tuple[Unit, jax.Array]], split: bool) -> Backward:
        """Trace layers on shapes: nothing of it becomes part of the program that is being traced.

        `example` returns a unit and its input, of the types that they have in the region. `split`: B and W apart.
        """
        kinds = range(layers.stages.period)

        def forward(kind: int) -> Traced[Pullback]:
            unit, x = example()
            pullback, kept, _, _ = layers.forward_of_layer(kind, unit.first, x)
            return Traced(kept, pullback)

        traced = [jax.eval_shape(partial(forward, kind)) for kind in kinds]
        whole = cls(layers, [one.about for one in traced], [one.arrays for one in traced])
        if not split:
            return whole

        def backward(kind: int) -> Traced[Halves]:
            unit, x = example()
            kept = [_in_ring(a, ()) for a in whole.keeps[kind]]
            w, part, number = unit.first
            available = layers.in_use(w), part, number
            again, once = whole._arguments(available, [*kept, x])
            flat = partial(whole._flat_backward, kind, jax.tree.structure(available), len(again))
            both = halves(flat, again, once, now=1)
            return Traced(both.at_once(again, once)[1], both)

        cut = [jax.eval_shape(partial(backward, kind)) for kind in kinds]
        return replace(whole, halves=[one.about for one in cut], stashes=[one.arrays for one in cut])

    def backward(
        self,
        unit: Unit,
        dy: jax.Array,
        kept: Rings,
        slot: Slot,
        sums: Tree,
        on: jax.Array | bool,
        before: tuple[jax.Array, ...] = (),
    ) -> tuple[Tree, jax.Array]:
        """Return (`sums` with the gradients of the weights, from ZeRO 2 on reduced; the gradient of x).

        `sums` are [chunks, depth, ...] each. A gradient that is not `on` is not added to them, and may be anything.
        What is kept is read after all of `before` is there.
        """
        slot_in = _not_before(before, slot)

        def one(kind: int, carry: tuple[Tree, jax.Array], layer: Numbered) -> tuple[tuple[Tree, jax.Array], None]:
            sums, dy = carry
            place, w, number, valid = layer
            w = self.layers.in_use(w)
            own = self.layers.get(kept, kind, slot_in, place)
            gradients = self.pullbacks[kind].rebuilt(own, (w, unit.part, number))(dy)
            # Some of them may be there while others are in a loop of collectives.
            dw, dx = self.layers.together(gradients)
            sums = self._accumulate(sums, dw, (unit.chunk, place), on & valid)
            return (sums, self.layers.where(valid, dx, dy)), None

        return self.layers.scan(one, (sums, dy), unit, reverse=True)[0]

    def of_input(
        self,
        unit: Unit,
        dy: jax.Array,
        kept: Rings,
        slot: Slot,
        stash: Rings,
        to: Slot,
        before: tuple[jax.Array, ...] = (),
    ) -> tuple[Rings, jax.Array]:
        """Run B alone: return (`stash` with what W needs of each layer in slot `to`, the gradient of x).

        What is kept is read after all of `before` is there.
        """
        slot_in = _not_before(before, slot)

        def one(kind: int, carry: tuple[Rings, jax.Array], layer: Numbered) -> tuple[tuple[Rings, jax.Array], None]:
            stash, dy = carry
            place, w, number, valid = layer
            own = self.layers.get(kept, kind, slot_in, place)
            arrays = self._arguments((self.layers.in_use(w), unit.part, number), [*own, dy])
            (dx,), made = self.halves[kind].at_once(*arrays)
            return (self.layers.put(stash, kind, list(made), to, place), self.layers.where(valid, dx, dy)), None

        return self.layers.scan(one, (stash, dy), unit, reverse=True)[0]

    def of_weights(
        self,
        unit: Unit,
        stash: Rings,
        slot: jax.Array,
        sums: Tree,
        on: jax.Array | bool,
        before: tuple[jax.Array, ...] = (),
    ) -> Tree:
        """Run W, after all of `before` is there: return `sums` with the gradients of the weights."""
        slot_in = _not_before(before, slot)

        def one(kind: int, sums: Tree, layer: Numbered) -> tuple[Tree, None]:
            place, w, number, valid = layer
            again, _ = self._arguments((w, unit.part, number), [])
            stashed = self.layers.get(stash, kind, slot_in, place)
            structure = jax.tree.structure(differentiated(self.layers.places, w))
            dw = self.layers.together(jax.tree.unflatten(structure, self.halves[kind].later(again, stashed)))
            return self._accumulate(sums, dw, (unit.chunk, place), on & valid), None

        return self.layers.scan(one, sums, unit)[0]

    def kept(self, slots: int) -> Rings:
        """Return empty rings for what `Layers.forward_keeping` keeps."""
        return self.layers.empty(self.keeps, slots)

    def stash(self, slots: int) -> Rings:
        """Return empty rings for what `of_input` hands to `of_weights`."""
        return self.layers.empty(self.stashes, slots)

    def _arguments(self, available: Available, once: list[jax.Array]) -> tuple[list[jax.Array], list[jax.Array]]:
        """Return (the arrays that W has again, those that it has not)."""
        w = jax.tree.leaves(available[0])
        others = jax.tree.leaves(available[1:])
        if self.layers.stage == 3:
            return others, [*w, *once]
        return [*w, *others], once

    def _flat_backward(self, kind: int, structure: Any, again: int, *arrays: jax.Array) -> list[jax.Array]:
        """Return [gradient of x, gradients of the weights] of one layer, from the arrays of `_arguments`."""
        leaves = structure.num_leaves
        # At ZeRO 3 the weights stand behind the others.
        others = again if self.layers.stage == 3 else 0
        kept = arrays[leaves:-1]
        dy = arrays[-1]
        w, part, number = jax.tree.unflatten(structure, [*arrays[others:leaves], *arrays[:others]])
        dw, dx = self.pullbacks[kind].rebuilt(kept, (w, part, number))(dy)
        return [dx, *jax.tree.leaves(dw)]

    def _accumulate(self, sums: Tree, dw: Tree, at: tuple[Slot, Array], on: jax.Array) -> Tree:
        """Add a layer's gradients to `sums` where they are `on`; from ZeRO 2 on they are reduced first."""

        def masked(g: jax.Array) -> jax.Array:
            # A `where`, not a product: what is masked may be NaN.
            return jnp.where(on, g, jnp.zeros((), g.dtype)).astype(wide(g.dtype))

        def add(s: jax.Array, g: jax.Array) -> jax.Array:
            return _written(s, _read(s, *at) + g.astype(s.dtype), *at)

        dw = jax.tree.map(masked, dw)
        if self.layers.stage >= 2:
            dw = jax.tree.map(zero.reduce_manual, part_of(self.layers.places, dw), dw)
        return jax.tree.map(add, sums, dw)


def _in_ring(a: jax.ShapeDtypeStruct, lead: tuple[int, ...]) -> jax.Array:
    """Return zeros of the type of `a` in a ring, where everything is a rank's own, with leading dims `lead`."""
    return region.vary(region.zeros_like(a, lead), (PIPELINE,))


def _not_before(before: tuple[jax.Array, ...], slot: Slot) -> SlotIn:
    """Return the slot in which a ring is read after all of `before` is there."""
    later = region.after(jnp.asarray(slot), *before)

    def slot_in(ring: jax.Array) -> Slot:
        # A slot that varies over more axes than a ring would make what is read from it vary too.
        return later if region.varying(later) <= region.varying(ring) else slot

    return slot_in


def _read(a: jax.Array, slot: Slot, place: jax.Array) -> jax.Array:
    """Return a[slot, place]."""
    shape = a.shape[2:]
    return lax.dynamic_slice(a, _start(slot, place, shape), (1, 1, *shape)).reshape(shape)


def _written(a: jax.Array, value: jax.Array, slot: Slot, place: jax.Array) -> jax.Array:
    """Return `a` with `value` at [slot, place]."""
    return lax.dynamic_update_slice(a, value[None, None], _start(slot, place, value.shape))


def _start(slot: Slot, place: jax.Array, shape: tuple[int, ...]) -> list[jax.Array]:
    """Return the start of a slice of `shape` at [slot, place]."""
    # Slices want indices of one type, in 64-bit mode too.
    return [jnp.asarray(index, jnp.int32) for index in (slot, place, *(0 for _ in shape))]
