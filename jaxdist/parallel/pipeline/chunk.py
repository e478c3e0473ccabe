"""The layers of a chunk, stack after stack: each stack has layers of one form (`layers`).

All ranks run one program, so every chunk has places for layers of each form; most chunks have none of the first forms,
and hand the residual stream on as it is (`Stages`). Most models have a single stack.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxdist.mesh import PIPELINE
from jaxdist.parallel.pipeline.layers import Backward, Layers, Rings, Slot, Unit
from jaxdist.parallel.pipeline.stages import of_stack
from jaxdist.sharding import Tree

RingsOfStacks = dict[str, Rings]
"""The rings of each stack, by its name."""


class Work(NamedTuple):
    """What F, B and W of a chunk and a micro-batch work with."""

    chunk: Slot
    """Which of this rank's chunks."""
    weights: Tree
    """Of all its layers, [depth, ...] each, in the stacks of the model."""
    part: Tree
    """The micro-batch."""


@dataclass(frozen=True)
class Chunk:
    """Forward passes of a chunk."""

    stacks: Mapping[str, Layers]
    """By their names, first to last."""

    def units(self, work: Work) -> dict[str, Unit]:
        """Return what each stack works with."""
        rank = lax.axis_index(PIPELINE)
        found = {}
        for name, layers in self.stacks.items():
            stages = layers.stages
            number = stages.first + jnp.asarray(stages.layer)[work.chunk, rank]
            valid = jnp.asarray(stages.valid)[work.chunk, rank]
            found[name] = Unit(work.chunk, of_stack(name, work.weights), number, valid, work.part)
        return found

    def forward(self, work: Work, x: Float[Array, "..."]) -> tuple[Float[Array, "..."], Tree]:
        """Return (x after the layers, their aux); nothing is kept for a backward pass."""
        found: Tree = {}
        for name, unit in self.units(work).items():
            x, aux = self.stacks[name].forward(unit, x)
            found |= aux
        return x, found

    def forward_keeping(
        self, work: Work, x: Float[Array, "..."], kept: RingsOfStacks, slot: Slot
    ) -> tuple[RingsOfStacks, Float[Array, "..."], Tree]:
        """Return (`kept` with what the layers keep in `slot`, x after the layers, their aux)."""
        found: Tree = {}
        written = {}
        for name, unit in self.units(work).items():
            written[name], x, aux = self.stacks[name].forward_keeping(unit, x, kept[name], slot)
            found |= aux
        return written, x, found

    def aux(self, work: Work, x: Float[Array, "..."], lead: tuple[int, ...]) -> Tree:
        """Return zeros for the aux of the layers, as `Layers.aux` does."""
        found: Tree = {}
        for name, unit in self.units(work).items():
            found |= self.stacks[name].aux(unit, x, lead)
        return found


@dataclass(frozen=True)
class ChunkBackward:
    """Backward passes of a chunk, from what its forward passes have kept."""

    chunk: Chunk
    stacks: Mapping[str, Backward]

    @classmethod
    def of(cls, chunk: Chunk, example: Callable[[], tuple[Work, jax.Array]], split: bool) -> ChunkBackward:
        """Trace the layers on shapes, as `Backward.of` does; `example` returns a chunk's work, and its input."""

        def of_stack(name: str) -> Callable[[], tuple[Unit, jax.Array]]:
            def unit() -> tuple[Unit, jax.Array]:
                work, x = example()
                return chunk.units(work)[name], x

            return unit

        return cls(chunk, {name: Backward.of(layers, of_stack(name), split) for name, layers in chunk.stacks.items()})

    def again(self, work: Work, x: Float[Array, "..."]) -> tuple[RingsOfStacks, Slot]:
        """Recompute what the layers keep from their input; return rings of one slot, and the slot."""
        x = lax.optimization_barrier(x)
        return self.chunk.forward_keeping(work, x, self.kept(slots=1), 0)[0], 0

    def backward(
        self,
        work: Work,
        dy: Float[Array, "..."],
        kept: RingsOfStacks,
        slot: Slot,
        sums: Tree,
        on: jax.Array | bool,
        before: tuple[jax.Array, ...] = (),
    ) -> tuple[Tree, Float[Array, "..."]]:
        """Return (`sums` with the gradients of the weights, as `Backward.backward` adds them; the gradient of x)."""
        units = self.chunk.units(work)
        for name in reversed(units):
            own = _sums_of(name, sums)
            own, dy = self.stacks[name].backward(units[name], dy, kept[name], slot, own, on, before)
            sums = _with_sums(name, sums, own)
        return sums, dy

    def of_input(
        self,
        work: Work,
        dy: Float[Array, "..."],
        kept: RingsOfStacks,
        slot: Slot,
        stash: RingsOfStacks,
        to: Slot,
        before: tuple[jax.Array, ...] = (),
    ) -> tuple[RingsOfStacks, Float[Array, "..."]]:
        """Run B alone: return (`stash` with what W needs of each layer in slot `to`, the gradient of x)."""
        units = self.chunk.units(work)
        written = dict(stash)
        for name in reversed(units):
            of_input = self.stacks[name].of_input
            written[name], dy = of_input(units[name], dy, kept[name], slot, stash[name], to, before)
        return written, dy

    def of_weights(
        self,
        work: Work,
        stash: RingsOfStacks,
        slot: jax.Array,
        sums: Tree,
        on: jax.Array | bool,
        before: tuple[jax.Array, ...] = (),
    ) -> Tree:
        """Run W, after all of `before` is there: return `sums` with the gradients of the weights."""
        for name, unit in self.chunk.units(work).items():
            own = self.stacks[name].of_weights(unit, stash[name], slot, _sums_of(name, sums), on, before)
            sums = _with_sums(name, sums, own)
        return sums

    def kept(self, slots: int) -> RingsOfStacks:
        """Return empty rings for what `Chunk.forward_keeping` keeps."""
        return {name: stack.kept(slots) for name, stack in self.stacks.items()}

    def stash(self, slots: int) -> RingsOfStacks:
        """Return empty rings for what `of_input` hands to `of_weights`."""
        return {name: stack.stash(slots) for name, stack in self.stacks.items()}


def _sums_of(name: str, sums: Tree) -> Tree:
    """Return the sums of a stack; none where none of its weights is trained."""
    return sums.get(name, {}) if name else sums


def _with_sums(name: str, sums: Tree, own: Tree) -> Tree:
    """Return `sums` with those of a stack."""
    if not name:
        return own
    return sums | {name: own} if name in sums else sums
