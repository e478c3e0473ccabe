"""The layers of a chunk, forward and backward, one `scan` over them each.

In the forward pass, a layer keeps what its `jax.vjp` holds on to, except for what is available again in the backward
pass: its weights and the micro-batch. Where a schedule splits the backward pass, B replaces what was kept by a stash
for W (see `split`). At ZeRO 3 a weight in use is not available again at W: what W needs of one, a bias or a norm's
scale, is stashed like any value, so that W gathers nothing.

What is kept and stashed lies in rings, [slots, depth, ...], with one slot for each micro-batch in flight. Each layer
reads and writes its own place in them, so that nothing of the size of a slot is made on the way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxdist.mesh import PIPELINE
from jaxdist.parallel import region
from jaxdist.parallel.partial_trees import joined, part_of
from jaxdist.parallel.pipeline.split import Halves, halves
from jaxdist.parallel.pipeline.stages import Stages
from jaxdist.parallel.zero import differentiated
from jaxdist.sharding import Tree, wide

Ring = list[Array]
"""Each [slots, depth, ...]."""
Slot = jax.Array | int

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


class VJP(NamedTuple):
    """The pullback of a layer as a tree of arrays, for those that are kept and those that are available again."""

    structure: Any
    """The tree structure of the function that `jax.vjp` returns; its leaves are arrays."""
    sources: list[int | None]
    """For each of its arrays, the number of the available array that it is; None for one that is kept."""


def take_apart(pullback: Callable[..., Any], available: Tree) -> tuple[VJP, list[jax.Array]]:
    """Return the description of a pullback, and the arrays that have to be kept to rebuild it.

    An array of the pullback is one of `available` if it is the same object: JAX puts a value that the backward pass
    needs into the pullback as it is, and never as a copy of it.
    """
    arrays, structure = jax.tree.flatten(pullback)
    numbers = {id(a): i for i, a in enumerate(jax.tree.leaves(available))}
    sources = [numbers.get(id(a)) for a in arrays]
    kept = [a for a, source in zip(arrays, sources, strict=True) if source is None]
    return VJP(structure, sources), kept


def rebuild(vjp: VJP, kept: Sequence[jax.Array], available: Tree) -> Callable[..., Any]:
    """Return the pullback that `take_apart` has taken apart, from arrays kept and available.

    `kept` are in the order of `take_apart`; the others are leaves of `available`, such as weights, which need no copy.
    """
    next_kept = iter(kept)
    leaves = jax.tree.leaves(available)
    arrays = [next(next_kept) if source is None else leaves[source] for source in vjp.sources]
    return jax.tree.unflatten(vjp.structure, arrays)


@dataclass
class Layers:
    """Forward and backward passes of the layers of a chunk."""

    layer: Callable[[Tree, Float[Array, "..."], Tree, Array], tuple[Float[Array, "..."], Tree]]
    """`layer(weights, x, part, number)` is one of them (`device.Program`)."""
    stages: Stages
    places: Tree
    """The placements of the parameters of one layer."""
    stage: int
    """Of ZeRO."""
    # These two are set when F is traced and read when B and W are. That is safe because every trace of a layer gives
    # the same structure: all layers have the same shapes and run the same function, in every loop of the region.
    _vjp: VJP | None = field(default=None, init=False)
    _halves: Halves | None = field(default=None, init=False)
    """B and W of a layer, where the schedule splits the backward pass."""

    def forward(self, unit: Unit, x: jax.Array) -> tuple[jax.Array, Tree]:
        """Return (x after the layers, their aux); nothing is kept for a backward pass."""

        def one(x: jax.Array, layer: Numbered) -> tuple[jax.Array, Tree]:
            _, w, number, valid = layer
            y, aux = self.layer(self._in_use(w), x, unit.part, number)
            return self._where(valid, y, x), self._of_layers(valid, aux)

        return lax.scan(one, x, unit.layers)

    def forward_keeping(self, unit: Unit, x: jax.Array, kept: Ring, slot: Slot) -> tuple[Ring, jax.Array, Tree]:
        """Return (`kept` with what the layers keep in `slot`, x after the layers, their aux)."""

        def one(carry: tuple[Ring, jax.Array], layer: Numbered) -> tuple[tuple[Ring, jax.Array], Tree]:
            kept, x = carry
            place, w, number, valid = layer
            made, y, aux = self._forward_of_layer((w, unit.part, number), x)
            return (_put(kept, made, slot, place), self._where(valid, y, x)), self._of_layers(valid, aux)

        (kept, x), aux = lax.scan(one, (kept, x), unit.layers)
        return kept, x, aux

    def aux(self, unit: Unit, x: jax.Array, lead: tuple[int, ...]) -> Tree:
        """Return zeros for the aux of the layers, [*lead, depth, ...] each, in f32 at least."""
        w, part, number = unit.first

        def zeros(a: jax.ShapeDtypeStruct) -> jax.Array:
            shape = (*lead, self.stages.depth, *a.shape)
            return region.zeros(shape, wide(a.dtype), a.manual_axis_type.varying | {PIPELINE})

        return jax.tree.map(zeros, jax.eval_shape(lambda: self.layer(self._in_use(w), x, part, number)[1]))

    def again(self, unit: Unit, x: jax.Array) -> tuple[Ring, Slot]:
        """Recompute what the layers keep from their input; return a ring of one slot, and the slot."""
        x = lax.optimization_barrier(x)
        return self.forward_keeping(unit, x, self.kept(unit, x, slots=1), 0)[0], 0

    def backward(
        self, unit: Unit, dy: jax.Array, kept: Ring, slot: Slot, sums: Tree, on: jax.Array | bool
    ) -> tuple[Tree, jax.Array]:
        """Return (`sums` with the gradients of the weights, from ZeRO 2 on reduced; the gradient of x).

        `sums` are [chunks, depth, ...] each. A gradient that is not `on` is not added to them, and may be anything.
        """

        def one(carry: tuple[Tree, jax.Array], layer: Numbered) -> tuple[tuple[Tree, jax.Array], None]:
            sums, dy = carry
            place, w, number, valid = layer
            w = self._in_use(w)
            pullback = self._pullback(_get(kept, slot, place), (w, unit.part, number))
            dw, dx = pullback(dy)
            sums = self._accumulate(sums, dw, (unit.chunk, place), on & valid)
            return (sums, self._where(valid, dx, dy)), None

        return lax.scan(one, (sums, dy), unit.layers, reverse=True)[0]

    def of_input(
        self, unit: Unit, dy: jax.Array, kept: Ring, slot: Slot, stash: Ring, to: Slot
    ) -> tuple[Ring, jax.Array]:
        """Run B alone: return (`stash` with what W needs of each layer in slot `to`, the gradient of x)."""

        def one(carry: tuple[Ring, jax.Array], layer: Numbered) -> tuple[tuple[Ring, jax.Array], None]:
            stash, dy = carry
            place, w, number, valid = layer
            made, dx = self._input_gradient_of_layer((w, unit.part, number), _get(kept, slot, place), dy)
            return (_put(stash, made, to, place), self._where(valid, dx, dy)), None

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
        halves = self._halves
        assert halves is not None
        later = region.after(slot, *before)
        # A slot that varies over more axes than a ring would make what is read from it vary too.
        slots = [later if region.varying(later) <= region.varying(a) else slot for a in stash]

        def one(sums: Tree, layer: Numbered) -> tuple[Tree, None]:
            place, w, number, valid = layer
            again, _ = self._arguments((w, unit.part, number), [])
            stashed = [_read(a, at, place) for a, at in zip(stash, slots, strict=True)]
            dw = jax.tree.unflatten(jax.tree.structure(differentiated(self.places, w)), halves.later(again, stashed))
            return self._accumulate(sums, dw, (unit.chunk, place), on & valid), None

        return lax.scan(one, sums, unit.layers)[0]

    def kept(self, unit: Unit, x: jax.Array, slots: int) -> Ring:
        """Return an empty ring for what `forward_keeping` keeps."""
        return self._ring(slots, jax.eval_shape(lambda: self._forward_of_layer(unit.first, x)[0]))

    def stash(self, unit: Unit, x: jax.Array, kept: Ring, slots: int) -> Ring:
        """Return an empty ring for what `of_input` hands to `of_weights`."""

        def of_layer() -> list[jax.Array]:
            return self._input_gradient_of_layer(unit.first, [a[0, 0] for a in kept], x)[0]

        return self._ring(slots, jax.eval_shape(of_layer))

    def _ring(self, slots: int, of_layer: list[jax.ShapeDtypeStruct]) -> Ring:
        return [region.vary(region.zeros_like(a, (slots, self.stages.depth)), (PIPELINE,)) for a in of_layer]

    def _forward_of_layer(self, available: Available, x: jax.Array) -> tuple[list[jax.Array], jax.Array, Tree]:
        """Return (what the layer keeps, its output, its aux)."""
        w, part, number = available
        w = self._in_use(w)

        def of_learning(own: Tree, x: jax.Array) -> tuple[jax.Array, Tree]:
            return self.layer(joined(w, own), x, part, number)

        y, pullback, aux = jax.vjp(of_learning, differentiated(self.places, w), x, has_aux=True)
        self._vjp, kept = take_apart(pullback, (w, part, number))
        return kept, y, aux

    def _input_gradient_of_layer(
        self, available: Available, kept: list[jax.Array], dy: jax.Array
    ) -> tuple[list[jax.Array], jax.Array]:
        """Return (what W needs of the layer, the gradient of its input)."""
        w, part, number = available
        available = self._in_use(w), part, number
        again, once = self._arguments(available, [*kept, dy])
        if self._halves is None:
            backward = partial(self._flat_backward, jax.tree.structure(available), len(again))
            self._halves = halves(backward, again, once, now=1)
        (dx,), stash = self._halves.at_once(again, once)
        return list(stash), dx

    def _arguments(self, available: Available, once: list[jax.Array]) -> tuple[list[jax.Array], list[jax.Array]]:
        """Return (the arrays that W has again, those that it has not)."""
        w = jax.tree.leaves(available[0])
        others = jax.tree.leaves(available[1:])
        if self.stage == 3:
            return others, [*w, *once]
        return [*w, *others], once

    def _flat_backward(self, structure: Any, again: int, *arrays: jax.Array) -> list[jax.Array]:
        """Return [gradient of x, gradients of the weights] of one layer, from the arrays of `_arguments`."""
        leaves = structure.num_leaves
        # At ZeRO 3 the weights stand behind the others.
        others = again if self.stage == 3 else 0
        kept = arrays[leaves:-1]
        dy = arrays[-1]
        w, part, number = jax.tree.unflatten(structure, [*arrays[others:leaves], *arrays[:others]])
        dw, dx = self._pullback(kept, (w, part, number))(dy)
        return [dx, *jax.tree.leaves(dw)]

    def _pullback(self, kept: Sequence[jax.Array], available: Available) -> Callable[..., Any]:
        """Return the pullback of a layer, of the structure that F has left."""
        assert self._vjp is not None
        return rebuild(self._vjp, kept, available)

    def _in_use(self, w: Tree) -> Tree:
        """Return the weights of a layer in use: at ZeRO 3 they are gathered here."""
        if self.stage < 3:
            return w
        return jax.tree.map(lambda p, w: p.gather_manual(w), self.places, w)

    def _accumulate(self, sums: Tree, dw: Tree, at: tuple[Slot, Array], on: jax.Array) -> Tree:
        """Add a layer's gradients to `sums` where they are `on`; from ZeRO 2 on they are reduced first."""

        def masked(g: jax.Array) -> jax.Array:
            # A `where`, not a product: what is masked may be NaN.
            return jnp.where(on, g, jnp.zeros((), g.dtype)).astype(wide(g.dtype))

        def add(s: jax.Array, g: jax.Array) -> jax.Array:
            return _written(s, _read(s, *at) + g.astype(s.dtype), *at)

        dw = jax.tree.map(masked, dw)
        if self.stage >= 2:
            dw = jax.tree.map(lambda p, g: p.reduce_manual(g), part_of(self.places, dw), dw)
        return jax.tree.map(add, sums, dw)

    def _of_layers(self, valid: jax.Array, aux: Tree) -> Tree:
        """Return the aux of a layer, and zeros for padding."""
        return jax.tree.map(lambda a: self._where(valid, a, jnp.zeros_like(a)), aux)

    def _where(self, valid: jax.Array, yes: jax.Array, no: jax.Array) -> jax.Array:
        """Return `yes` for a layer and `no` for padding."""
        if not self.stages.padded:
            return yes
        return jnp.where(valid, yes, no)


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
