"""The layers of a chunk, forward and backward, one `scan` over them each.

Forward, a layer keeps what its `jax.vjp` holds on to, but for what is there again in the backward pass: its weights and
the micro-batch. Where a schedule splits the backward pass, B takes the place of what was kept by a stash for W (see
`split`). At ZeRO 3 a weight in use is not there again at W: what W needs of one, a bias or a norm's scale, is stashed
like any value, so that W gathers nothing.

What is kept and stashed lies in rings, [slots, depth, ...]: a slot for a micro-batch in flight. Each layer writes and
reads its own place in them, so that nothing of the size of a slot is made on the way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxdist.mesh import PIPELINE
from jaxdist.parallel import region
from jaxdist.parallel.pipeline.split import Halves, halves
from jaxdist.parallel.pipeline.stages import Stages
from jaxdist.sharding import wide

Tree = Any
Ring = list[Array]
"""Each [slots, depth, ...]."""
Slot = jax.Array | int


There = tuple[Tree, Tree, Array]
"""(weights, micro-batch, number) of a layer: what is there in its backward pass again."""


class Unit(NamedTuple):
    """What F, B and W of a chunk and a micro-batch work with."""

    chunk: Slot
    """Which of this rank's."""
    weights: Tree
    """[depth, ...] each."""
    number: Int[Array, " depth"]
    """Of each layer in the model."""
    valid: Bool[Array, " depth"]
    """Whether there is one."""
    part: Tree
    """The micro-batch."""

    @property
    def layers(self) -> tuple[Int[Array, " depth"], Tree, Int[Array, " depth"], Bool[Array, " depth"]]:
        """(place, weights, number, valid), for a scan over them."""
        return jnp.arange(len(self.number)), self.weights, self.number, self.valid

    @property
    def first(self) -> There:
        return jax.tree.map(lambda w: w[0], self.weights), self.part, self.number[0]


@dataclass
class Layers:
    """`layer(weights, x, part, number)` is one of them; `places` are those of one layer's parameters."""

    layer: Callable[[Tree, Float[Array, "..."], Tree, Array], Float[Array, "..."]]
    stages: Stages
    places: Tree
    stage: int
    """Of ZeRO."""
    _vjp: tuple[Any, list[int | None]] | None = field(default=None, init=False)
    """Structure of a layer's VJP, and for each of its arrays, which one of those that are there again it is."""
    _halves: Halves | None = field(default=None, init=False)
    """B and W of a layer."""

    def forward(self, unit: Unit, x: jax.Array) -> jax.Array:
        """x after the layers, of which nothing is kept."""

        def one(x, layer):
            _, w, number, valid = layer
            return self._where(valid, self.layer(self._in_use(w), x, unit.part, number), x), None

        return lax.scan(one, x, unit.layers)[0]

    def forward_keeping(self, unit: Unit, x: jax.Array, kept: Ring, slot: Slot) -> tuple[Ring, jax.Array]:
        """(`kept` with what the layers keep, x after them)."""

        def one(carry, layer):
            (kept, x), (place, w, number, valid) = carry, layer
            made, y = self._one_forward((w, unit.part, number), x)
            return (_put(kept, made, slot, place), self._where(valid, y, x)), None

        return lax.scan(one, (kept, x), unit.layers)[0]

    def again(self, unit: Unit, x: jax.Array) -> tuple[Ring, Slot]:
        """What the layers keep, computed anew from their input: a ring of one slot, and the slot."""
        x = lax.optimization_barrier(x)
        return self.forward_keeping(unit, x, self.kept(unit, x, slots=1), 0)[0], 0

    def backward(
        self, unit: Unit, dy: jax.Array, kept: Ring, slot: Slot, sums: Tree, on: jax.Array | bool
    ) -> tuple[Tree, jax.Array]:
        """(`sums` with the gradients of the weights, from ZeRO 2 on reduced; the gradient of x).

        `sums` are [chunks, depth, ...] each; what is not `on` is not added to them, and may be anything.
        """

        def one(carry, layer):
            (sums, dy), (place, w, number, valid) = carry, layer
            w = self._in_use(w)
            dw, dx = self._rebuilt(_get(kept, slot, place), (w, unit.part, number))(dy)
            sums = self._add(sums, dw, (unit.chunk, place), on & valid)
            return (sums, self._where(valid, dx, dy)), None

        return lax.scan(one, (sums, dy), unit.layers, reverse=True)[0]

    def of_input(
        self, unit: Unit, dy: jax.Array, kept: Ring, slot: Slot, stash: Ring, to: Slot
    ) -> tuple[Ring, jax.Array]:
        """B alone: (`stash` with what W wants to see of each layer, the gradient of x)."""

        def one(carry, layer):
            (stash, dy), (place, w, number, valid) = carry, layer
            made, dx = self._one_of_input((w, unit.part, number), _get(kept, slot, place), dy)
            return (_put(stash, made, to, place), self._where(valid, dx, dy)), None

        return lax.scan(one, (stash, dy), unit.layers, reverse=True)[0]

    def of_weights(
        self, unit: Unit, stash: Ring, slot: Slot, sums: Tree, on: jax.Array | bool, before: tuple[jax.Array, ...] = ()
    ) -> Tree:
        """W: `sums` with the gradients of the weights, as `backward` has them; after what is `before`."""
        later = region.after(slot, *before)
        slots = [later if region.varying(later) <= region.varying(a) else slot for a in stash]

        def one(sums, layer):
            place, w, number, valid = layer
            again, _ = self._arguments((w, unit.part, number), [])
            stashed = [_get_one(a, at, place) for a, at in zip(stash, slots, strict=True)]
            dw = jax.tree.unflatten(jax.tree.structure(w), self._halves.later(again, stashed))
            return self._add(sums, dw, (unit.chunk, place), on & valid), None

        return lax.scan(one, sums, unit.layers)[0]

    def kept(self, unit: Unit, x: jax.Array, slots: int) -> Ring:
        """An empty ring for what `forward_keeping` keeps."""
        return self._ring(slots, jax.eval_shape(lambda: self._one_forward(unit.first, x)[0]))

    def stash(self, unit: Unit, x: jax.Array, kept: Ring, slots: int) -> Ring:
        """An empty ring for what `of_input` hands to `of_weights`."""
        of_one = lambda: self._one_of_input(unit.first, [a[0, 0] for a in kept], x)[0]
        return self._ring(slots, jax.eval_shape(of_one))

    def _ring(self, slots: int, of_one: list[jax.ShapeDtypeStruct]) -> Ring:
        return [region.vary(region.zeros_like(a, (slots, self.stages.depth)), (PIPELINE,)) for a in of_one]

    def _one_forward(self, there: There, x: jax.Array) -> tuple[list[jax.Array], jax.Array]:
        w, part, number = there
        w = self._in_use(w)
        y, vjp = jax.vjp(lambda w, x: self.layer(w, x, part, number), w, x)
        return self._kept(vjp, (w, part, number)), y

    def _one_of_input(self, there: There, kept: list[jax.Array], dy: jax.Array) -> tuple[list[jax.Array], jax.Array]:
        w, part, number = there
        there = self._in_use(w), part, number
        again, once = self._arguments(there, [*kept, dy])
        if self._halves is None:
            backward = partial(self._flat_backward, jax.tree.structure(there))
            self._halves = halves(partial(backward, len(again)), again, once, now=1)
        (dx,), stash = self._halves.at_once(again, once)
        return list(stash), dx

    def _arguments(self, there: There, once: list) -> tuple[list, list]:
        """(what is there again at W, what is not)."""
        w, others = jax.tree.leaves(there[0]), jax.tree.leaves(there[1:])
        return (others, [*w, *once]) if self.stage == 3 else ([*w, *others], once)

    def _flat_backward(self, structure: Any, again: int, *arrays: jax.Array) -> list[jax.Array]:
        """[gradient of x, those of the weights] of one layer, from `_arguments`."""
        leaves = structure.num_leaves
        others = again if self.stage == 3 else 0  # the weights stand behind the others then
        kept, dy = arrays[leaves:-1], arrays[-1]
        w, part, number = jax.tree.unflatten(structure, [*arrays[others:leaves], *arrays[:others]])
        dw, dx = self._rebuilt(kept, (w, part, number))(dy)
        return [dx, *jax.tree.leaves(dw)]

    def _in_use(self, w: Tree) -> Tree:
        return jax.tree.map(lambda p, w: p.own(w), self.places, w) if self.stage == 3 else w

    def _add(self, sums: Tree, dw: Tree, at: tuple[Slot, Array], on: jax.Array) -> Tree:
        """What is masked may be anything, NaN too."""
        dw = jax.tree.map(lambda g: jnp.where(on, g, jnp.zeros((), g.dtype)).astype(wide(g.dtype)), dw)
        dw = jax.tree.map(lambda p, g: p.add_up(g), self.places, dw) if self.stage >= 2 else dw
        add = lambda s, g: _put_one(s, _get_one(s, *at) + g.astype(s.dtype), *at)
        return jax.tree.map(add, sums, dw)

    def _where(self, valid: jax.Array, yes: jax.Array, no: jax.Array) -> jax.Array:
        return jnp.where(valid, yes, no) if self.stages.padded else yes

    def _kept(self, vjp: Callable, again: Tree) -> list[jax.Array]:
        arrays, structure = jax.tree.flatten(vjp)
        known = {id(a): i for i, a in enumerate(jax.tree.leaves(again))}
        self._vjp = structure, [known.get(id(a)) for a in arrays]
        return [a for a in arrays if id(a) not in known]

    def _rebuilt(self, kept: list[jax.Array], again: Tree) -> Callable:
        structure, places = self._vjp
        kept, known = iter(kept), jax.tree.leaves(again)
        return jax.tree.unflatten(structure, [next(kept) if i is None else known[i] for i in places])


def _get(ring: Ring, slot: Slot, place: jax.Array) -> list[jax.Array]:
    return [_get_one(a, slot, place) for a in ring]


def _put(ring: Ring, values: list[jax.Array], slot: Slot, place: jax.Array) -> Ring:
    return [_put_one(a, v, slot, place) for a, v in zip(ring, values, strict=True)]


def _get_one(a: jax.Array, slot: Slot, place: jax.Array) -> jax.Array:
    shape = a.shape[2:]
    return lax.dynamic_slice(a, _at(slot, place, shape), (1, 1, *shape)).reshape(shape)


def _put_one(a: jax.Array, value: jax.Array, slot: Slot, place: jax.Array) -> jax.Array:
    return lax.dynamic_update_slice(a, value[None, None], _at(slot, place, value.shape))


def _at(slot: Slot, place: jax.Array, shape: tuple[int, ...]) -> list[jax.Array]:
    """Of one type, as the slices want it, in 64 bits too."""
    return [jnp.asarray(index, jnp.int32) for index in (slot, place, *[0] * len(shape))]
