"""The layers of a chunk, forward and backward, one `scan` over them each.

In the forward pass, a layer keeps what its `jax.vjp` holds on to, except for what is available again in the backward
pass: its weights and the micro-batch. Where a schedule splits the backward pass, B replaces what was kept by a stash
for W (see `split`). At ZeRO 3 a weight in use is not available again at W: what W needs of one, a bias or a norm's
scale, is stashed like any value, so that W gathers nothing.

Which of its arrays a layer keeps, how its pullback is put together again, and where its backward pass is cut: all that
is found once, by tracing a layer on shapes alone (`Backward.of`). It holds for every layer and micro-batch, as all
layers have the same shapes and run the same function.

What is kept and stashed lies in rings, [slots, depth, ...], with one slot for each micro-batch in flight. Each layer
reads and writes its own place in them, so that nothing of the size of a slot is made on the way.
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
from jaxdist.parallel import region, zero
from jaxdist.parallel.partial_trees import joined, part_of
from jaxdist.parallel.pipeline.split import Halves, halves
from jaxdist.parallel.pipeline.stages import Stages
from jaxdist.parallel.placement import differentiated
from jaxdist.sharding import Tree, wide

Ring = list[Array]
"""Each [slots, depth, ...]."""
Slot = jax.Array | int
Shapes = Sequence[jax.ShapeDtypeStruct]
About = TypeVar("About")

Available = tuple[Tree, Tree, Array]
"""(weights, micro-batch, number) of a layer: what its backward pass has again without keeping it."""

Numbered = tuple[Int[Array, ""], Tree, Int[Array, ""], Bool[Array, ""]]
"""(place, weights, number, valid) of a layer: one step of a scan over `Unit.layers`."""


class Unit(NamedTuple):
    """What F, B and W of a chunk and a micro-batch work with."""

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

    layer: Callable[[Tree, Float[Array, "..."], Tree, Array], tuple[Float[Array, "..."], Tree]]
    """`layer(weights, x, part, number)` is one of them (`device.Program`)."""
    stages: Stages
    places: Tree
    """The placements of the parameters of one layer."""
    stage: int
    """Of ZeRO."""

    def forward(self, unit: Unit, x: jax.Array) -> tuple[jax.Array, Tree]:
        """Return (x after the layers, their aux); nothing is kept for a backward pass."""

        def one(x: jax.Array, layer: Numbered) -> tuple[jax.Array, Tree]:
            _, w, number, valid = layer
            y, aux = self.layer(self.in_use(w), x, unit.part, number)
            return self.where(valid, y, x), self._of_layers(valid, aux)

        return lax.scan(one, x, unit.layers)

    def forward_keeping(self, unit: Unit, x: jax.Array, kept: Ring, slot: Slot) -> tuple[Ring, jax.Array, Tree]:
        """Return (`kept` with what the layers keep in `slot`, x after the layers, their aux)."""

        def one(carry: tuple[Ring, jax.Array], layer: Numbered) -> tuple[tuple[Ring, jax.Array], Tree]:
            kept, x = carry
            place, w, number, valid = layer
            _, made, y, aux = self.forward_of_layer((w, unit.part, number), x)
            return (_put(kept, made, slot, place), self.where(valid, y, x)), self._of_layers(valid, aux)

        (kept, x), aux = lax.scan(one, (kept, x), unit.layers)
        return kept, x, aux

    def aux(self, unit: Unit, x: jax.Array, lead: tuple[int, ...]) -> Tree:
        """Return zeros for the aux of the layers, [*lead, depth, ...] each, in f32 at least."""
        w, part, number = unit.first

        def zeros(a: jax.ShapeDtypeStruct) -> jax.Array:
            shape = (*lead, self.stages.depth, *a.shape)
            return region.zeros(shape, wide(a.dtype), a.manual_axis_type.varying | {PIPELINE})

        return jax.tree.map(zeros, jax.eval_shape(lambda: self.layer(self.in_use(w), x, part, number)[1]))

    def forward_of_layer(self, available: Available, x: jax.Array) -> tuple[Pullback, list[jax.Array], jax.Array, Tree]:
        """Return (what its pullback consists of, what the layer keeps of it, its output, its aux)."""
        w, part, number = available
        w = self.in_use(w)

        def of_learning(own: Tree, x: jax.Array) -> tuple[jax.Array, Tree]:
            return self.layer(joined(w, own), x, part, number)

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


@partial(jax.tree_util.register_dataclass, data_fields=["arrays"], meta_fields=["about"])
@dataclass(frozen=True)
class Traced(Generic[About]):
    """Arrays, which come out of a trace as shapes, and what the trace has found out about them."""

    arrays: Sequence[Any]
    about: About


@dataclass(frozen=True)
class Backward:
    """Backward passes of the layers of a chunk, from what their forward passes have kept."""

    layers: Layers
    pullback: Pullback
    keeps: Shapes
    """What a layer keeps of its pullback."""
    halves: Halves | None = None
    """B and W of a layer, where the schedule splits the backward pass."""
    stashes: Shapes = ()
    """What B of a layer hands to W."""

    @classmethod
    def of(cls, layers: Layers, example: Callable[[], tuple[Unit, jax.Array]], split: bool) -> Backward:
        """Trace a layer on shapes: nothing of it becomes part of the program that is being traced.

        `example` returns a unit and its input, of the types that they have in the region. `split`: B and W apart.
        """

        def forward() -> Traced[Pullback]:
            unit, x = example()
            pullback, kept, _, _ = layers.forward_of_layer(unit.first, x)
            return Traced(kept, pullback)

        traced = jax.eval_shape(forward)
        whole = cls(layers, traced.about, traced.arrays)
        if not split:
            return whole

        def backward() -> Traced[Halves]:
            unit, x = example()
            kept = [_in_ring(a, ()) for a in whole.keeps]
            w, part, number = unit.first
            available = layers.in_use(w), part, number
            again, once = whole._arguments(available, [*kept, x])
            flat = partial(whole._flat_backward, jax.tree.structure(available), len(again))
            both = halves(flat, again, once, now=1)
            return Traced(both.at_once(again, once)[1], both)

        cut = jax.eval_shape(backward)
        return replace(whole, halves=cut.about, stashes=cut.arrays)

    def again(self, unit: Unit, x: jax.Array) -> tuple[Ring, Slot]:
        """Recompute what the layers keep from their input; return a ring of one slot, and the slot."""
        x = lax.optimization_barrier(x)
        return self.layers.forward_keeping(unit, x, self.kept(slots=1), 0)[0], 0

    def backward(
        self, unit: Unit, dy: jax.Array, kept: Ring, slot: Slot, sums: Tree, on: jax.Array | bool
    ) -> tuple[Tree, jax.Array]:
        """Return (`sums` with the gradients of the weights, from ZeRO 2 on reduced; the gradient of x).

        `sums` are [chunks, depth, ...] each. A gradient that is not `on` is not added to them, and may be anything.
        """

        def one(carry: tuple[Tree, jax.Array], layer: Numbered) -> tuple[tuple[Tree, jax.Array], None]:
            sums, dy = carry
            place, w, number, valid = layer
            w = self.layers.in_use(w)
            pullback = self.pullback.rebuilt(_get(kept, slot, place), (w, unit.part, number))
            dw, dx = pullback(dy)
            sums = self._accumulate(sums, dw, (unit.chunk, place), on & valid)
            return (sums, self.layers.where(valid, dx, dy)), None

        return lax.scan(one, (sums, dy), unit.layers, reverse=True)[0]

    def of_input(
        self, unit: Unit, dy: jax.Array, kept: Ring, slot: Slot, stash: Ring, to: Slot
    ) -> tuple[Ring, jax.Array]:
        """Run B alone: return (`stash` with what W needs of each layer in slot `to`, the gradient of x)."""
        halves = self.halves
        assert halves is not None

        def one(carry: tuple[Ring, jax.Array], layer: Numbered) -> tuple[tuple[Ring, jax.Array], None]:
            stash, dy = carry
            place, w, number, valid = layer
            arrays = self._arguments((self.layers.in_use(w), unit.part, number), [*_get(kept, slot, place), dy])
            (dx,), made = halves.at_once(*arrays)
            return (_put(stash, list(made), to, place), self.layers.where(valid, dx, dy)), None

        return lax.scan(one, (stash, dy), unit.layers, reverse=True)[0]

    def of_weights(
        self,
        unit: Unit,
        stash: Ring,
        slot: jax.Array,
        sums: Tree,
        on: jax.Array | bool,
        before: tuple[jax.Array, ...] = (),
    ) -> Tree:
        """Run W, after all of `before` is there: return `sums` with the gradients of the weights."""
        halves = self.halves
        assert halves is not None
        later = region.after(slot, *before)
        # A slot that varies over more axes than a ring would make what is read from it vary too.
        slots = [later if region.varying(later) <= region.varying(a) else slot for a in stash]

        def one(sums: Tree, layer: Numbered) -> tuple[Tree, None]:
            place, w, number, valid = layer
            again, _ = self._arguments((w, unit.part, number), [])
            stashed = [_read(a, at, place) for a, at in zip(stash, slots, strict=True)]
            structure = jax.tree.structure(differentiated(self.layers.places, w))
            dw = jax.tree.unflatten(structure, halves.later(again, stashed))
            return self._accumulate(sums, dw, (unit.chunk, place), on & valid), None

        return lax.scan(one, sums, unit.layers)[0]

    def kept(self, slots: int) -> Ring:
        """Return an empty ring for what `Layers.forward_keeping` keeps."""
        return self._ring(self.keeps, slots)

    def stash(self, slots: int) -> Ring:
        """Return an empty ring for what `of_input` hands to `of_weights`."""
        return self._ring(self.stashes, slots)

    def _ring(self, of_layer: Shapes, slots: int) -> Ring:
        return [_in_ring(a, (slots, self.layers.stages.depth)) for a in of_layer]

    def _arguments(self, available: Available, once: list[jax.Array]) -> tuple[list[jax.Array], list[jax.Array]]:
        """Return (the arrays that W has again, those that it has not)."""
        w = jax.tree.leaves(available[0])
        others = jax.tree.leaves(available[1:])
        if self.layers.stage == 3:
            return others, [*w, *once]
        return [*w, *others], once

    def _flat_backward(self, structure: Any, again: int, *arrays: jax.Array) -> list[jax.Array]:
        """Return [gradient of x, gradients of the weights] of one layer, from the arrays of `_arguments`."""
        leaves = structure.num_leaves
        # At ZeRO 3 the weights stand behind the others.
        others = again if self.layers.stage == 3 else 0
        kept = arrays[leaves:-1]
        dy = arrays[-1]
        w, part, number = jax.tree.unflatten(structure, [*arrays[others:leaves], *arrays[:others]])
        dw, dx = self.pullback.rebuilt(kept, (w, part, number))(dy)
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


def _get(ring: Ring, slot: Slot, place: jax.Array) -> list[jax.Array]:
    """Read what one layer, at `place`, has written to a slot."""
    return [_read(a, slot, place) for a in ring]


def _put(ring: Ring, values: list[jax.Array], slot: Slot, place: jax.Array) -> Ring:
    """Return the ring with what one layer, at `place`, writes to a slot."""
    return [_written(a, value, slot, place) for a, value in zip(ring, values, strict=True)]


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
