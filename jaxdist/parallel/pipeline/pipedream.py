"""PipeDream: a pipeline that is never emptied, and whose stages are updated one by one (Narayanan et al. 2019).

Global batches follow one another as micro-batches do elsewhere. In a round each rank runs one F and one B, in two ticks
(`schedules.pipedream`), and updates its stage with the gradients of B without waiting for others. So rank r makes S-1-r
updates between F and B of a batch. Weight stashing (section 3.3): F keeps the weights that it has used, and B computes
the gradient at those; the first rank holds at most S versions of its weights, the last one.

    round q    tick 2q    : even ranks F, odd ranks B; all ranks embed batch q
               tick 2q + 1: odd ranks F, even ranks B; batch q-S+1 is through, and embedding and head are updated

All ranks together run the head, in the tick of the last rank's F. The embedding and the head belong to all ranks, each
with its part of the vocabulary; their gradients meet, and are used, when a batch is through. F or B is one branch of
each rank, and nothing in it waits for another rank (see `device`).

Which batch a rank works on: `schedules.pipedream` has F of batch m on rank r in tick 2m + r, and its B in tick
2m + 2S - 1 - r. In tick 2q + p that is batch m = q - (r - p) / 2 for F, and m = q - (2S - 1 - r - p) / 2 for B; where
the division is not even, the rank has the other of the two.

Between rounds the state holds what is in flight: every device's own arrays, put together into global ones
(`_together`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import P, lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxdist.mesh import AXES, PIPELINE
from jaxdist.parallel import region, zero
from jaxdist.parallel.partial_trees import part_of
from jaxdist.parallel.pipeline.chunk import ChunkBackward, Work
from jaxdist.parallel.pipeline.device import Device, Program, batch_specs, get, own, put
from jaxdist.parallel.pipeline.layers import Slot
from jaxdist.parallel.pipeline.stages import BLOCKS, Stages, of_layers
from jaxdist.parallel.placement import Placements, differentiated
from jaxdist.sharding import Layout, Params, Tree, wide

Carry = dict[str, Any]
"""The state of a device from tick to tick: buffers, messages and sums by name."""

NOTHING = -1
"""The number of a batch that is none: it fills the pipeline, or empties it."""


class Through(NamedTuple):
    """The batch that has come through in a round: all its gradients are made and used."""

    number: Int[Array, ""]
    """As it was given; NOTHING where none has come through."""
    loss: Float[Array, ""]
    """The mean over its labels."""
    norm: Float[Array, ""]
    """Norm of its gradient, each stage's part at the weights that the stage's F had."""
    count: Int[Array, ""]  # type: ignore[assignment]  # a tuple has a method of this name, which is not called here


@dataclass(frozen=True)
class PipeDream:
    """A pipelined model that takes one batch per round, and updates its stages as their gradients come."""

    stages: Stages
    layout: Layout
    places: Placements
    """Placements of the folded parameters."""
    aux_places: Placements
    """Placements of the layers' aux, folded as the layers are; those that are not there are not used."""
    stage: int
    """Of ZeRO."""
    program: Program
    dtype: DTypeLike
    """The compute dtype."""
    cast: Callable[[Tree], Tree]
    """Brings parameters, of the model or of layers, into the dtype that they have in use (mixed precision)."""
    positions: int | None
    """What gradients are divided by; None where that is the number of labels (`training.forward.balance`)."""
    recompute: bool
    """Keep only the input of a stage, and recompute the stage when its B runs."""
    update: Callable[[Tree, Tree, Tree, Tree, Array], tuple[Tree, Tree]]
    """(gradients, aux, optimizer state, parameters, updates before) -> (parameters, state), of the layers, or of all
    others, which have no aux; elementwise, as each device updates its own part."""

    def empty(self, params: Params, batch: Tree) -> Tree:
        """Return the state of an empty pipeline; of `batch`, [1, B, ...], only the shape counts."""
        types: list[Tree] = []

        def look(params: Params, batch: Tree) -> jax.Array:
            # The specs of the state depend on what varies inside the region, so it is traced once to see them.
            types.append(jax.tree.map(_leading, Round(self, params, batch).start()))
            return jnp.zeros(())

        def start(params: Params, batch: Tree) -> Carry:
            return jax.tree.map(_together, Round(self, params, batch).start())

        specs = jax.tree.map(lambda p: p.rest, self.places), batch_specs(self.layout, batch)
        jax.eval_shape(jax.shard_map(look, in_specs=specs, out_specs=P()), params, batch)
        return jax.shard_map(start, in_specs=specs, out_specs=types[0])(params, batch)

    def round(
        self,
        params: Params,
        optimizer: Tree,
        in_flight: Carry,
        batch: Tree,
        number: Int[Array, ""],
        count: Int[Array, ""],
    ) -> tuple[Params, Tree, Carry, Through]:
        """Return (parameters, optimizer state, what is in flight, the batch that is through) after `batch` came in.

        `number` is that of the batch, by which updates are counted; a batch NOTHING updates nothing. `count` is what
        its summed loss is divided by.
        """

        def run(
            params: Params, optimizer: Tree, in_flight: Carry, batch: Tree, number: jax.Array, count: jax.Array
        ) -> tuple[Params, Tree, Carry, Through]:
            device = Round(self, params, batch)
            carry = device.arrive(jax.tree.map(_apart, in_flight), number, count)
            carry |= {"params": _stage(params), "optimizer": _stage(optimizer)}
            for parity in range(2):
                carry = device.tick(carry, parity)
            carry, through = device.through(carry)
            params = _stages(carry.pop("params"))
            optimizer = _stages(carry.pop("optimizer"))
            return params, optimizer, jax.tree.map(_together, carry), through

        def specs_of(tree: Tree) -> Tree:
            return jax.tree.map(lambda a: jax.typeof(a).sharding.spec, tree)

        state = specs_of(params), specs_of(optimizer), specs_of(in_flight)
        on_mesh = jax.shard_map(
            run, in_specs=(*state, batch_specs(self.layout, batch), P(), P()), out_specs=(*state, P())
        )
        return on_mesh(params, optimizer, in_flight, batch, number, count)


class Round(Device):
    """What one device does in a round. A batch has the same slot in all buffers of depth S."""

    def __init__(self, of: PipeDream, params: Params, batch: Tree):
        super().__init__(of.program, of.stages, of.layout, of.places, of.stage)
        self.update = of.update
        self.aux_places = of.aux_places
        self.recompute = of.recompute
        self.dtype = of.dtype
        self.cast = of.cast
        self.positions = of.positions
        self.batch = get(batch, 0)
        self.params = _stage(params)
        self.S = of.stages.ranks
        self.rank = lax.axis_index(PIPELINE)
        self.stage_places = jax.tree.map(lambda p: p.layer.layer, self.block_places)
        self.tops = own(self.top_places, self.cast({name: params[name] for name in self.top_places}))
        """The weights outside the layers, the same for the whole round: they are updated at its end."""
        self.layers_backward = ChunkBackward.of(self.layers, self.example, split=False)

    def example(self) -> tuple[Work, jax.Array]:
        """Return what a stage works with, and its input, for their types."""
        unit = self.unit(self.in_use(self.cast(self.params[BLOCKS])), self.batch)
        return unit, region.vary(self.program.embed(self.tops, self.batch), self.stream)

    def slot_of(self, batch: jax.Array) -> jax.Array:
        """Return the slot of the batch of round `batch`: S rounds later it is through, and another may have it."""
        return batch % self.S

    def head_slot_of(self, batch: jax.Array) -> jax.Array:
        """Return the slot of a batch in `of_head`, whose gradients wait from the head to the end of the batch."""
        return batch % (self.S // 2 + 1)

    def start(self) -> Carry:
        """Return the state with nothing in flight."""
        S = self.S
        zeros = region.zeros_like
        f32 = wide(self.dtype)
        blocks = self.cast(self.params[BLOCKS])
        x = jax.eval_shape(lambda: region.vary(self.program.embed(self.tops, self.batch), self.stream))

        def buffer(a: jax.Array | jax.ShapeDtypeStruct) -> jax.Array:
            return region.vary(zeros(a, (S,)), (PIPELINE,))

        def head_gradients(w: jax.Array) -> jax.Array:
            return region.zeros((S // 2 + 1, *w.shape), wide(w.dtype), region.varying(w))

        unit = self.unit(self.in_use(blocks), self.batch)

        def residuals() -> Tree:
            if self.recompute:
                return buffer(x)
            return self.layers_backward.kept(S)

        return {
            "round": jnp.zeros((), jnp.int32),
            "batches": jax.tree.map(lambda a: jnp.repeat(a[None], S, axis=0), self.batch),
            "numbers": jnp.full(S, NOTHING, jnp.int32),
            "counts": jnp.zeros(S, jnp.int32),
            "versions": jax.tree.map(buffer, blocks),
            "residuals": residuals(),
            "aux": self._used(self.layers.aux(unit, zeros(x), (S,))),
            "sent": zeros(x),
            "returned": zeros(x),
            "losses": jnp.zeros(S, f32),
            "squares": region.zeros((S,), f32, (PIPELINE,)),
            "of_head": jax.tree.map(head_gradients, self.tops),
        }

    def in_use(self, blocks: Tree) -> Tree:
        """Return the layers of this rank, gathered; at ZeRO 3 that is done layer by layer."""
        if self.stage == 3:
            return blocks
        return own(self.stage_places, blocks)

    def unit(self, weights: Tree, part: Tree) -> Work:
        """Return what F or B works with: the layers of this rank with the weights in use, and a batch."""
        return Work(0, weights, part)

    def arrive(self, carry: Carry, number: jax.Array, count: jax.Array) -> Carry:
        """Take in a batch, in the slot of the one that came through in the round before.

        `number` is the number of the batch, and `count` what its summed loss is divided by.
        """
        slot = self.slot_of(carry["round"])
        new = {"batches": self.batch, "numbers": number, "counts": count}
        return carry | {name: put(carry[name], a, slot) for name, a in new.items()}

    def tick(self, carry: Carry, parity: int) -> Carry:
        """Run one tick: half of the ranks run F, the others B. What arrives was sent in the tick before."""
        carry, y = self.forward(carry, parity)
        carry, dx = self.backward(carry, parity)
        # On CPUs no message is sent while the other unit may still be in a collective: see `region.after`.
        y, dx = region.after(y, *self.awaited(dx)), region.after(dx, *self.awaited(y))
        carry |= {"sent": lax.ppermute(y, PIPELINE, self.onward), "returned": lax.ppermute(dx, PIPELINE, self.back)}
        # F of the last rank has run in this tick if the parities agree.
        if parity == (self.S - 1) % 2:
            carry = self.head(carry, y)
        return carry | {"dx": dx}

    def forward(self, carry: Carry, parity: int) -> tuple[Carry, jax.Array]:
        """Run F with the weights as they are now, and keep these (weight stashing)."""
        slot = self.slot_of(carry["round"] - (self.rank - parity) // 2)
        on = ((self.rank - parity) % 2 == 0) & (carry["numbers"][slot] != NOTHING)
        x = carry["sent"]
        part = get(carry["batches"], slot)
        if parity == 0:
            # Rank 0 runs F in even ticks; the others take part in the embedding with their part of the vocabulary.
            x = jnp.where(self.rank == 0, self.program.embed(self.tops, self.batch), x)

        def run(versions: Tree, residuals: Tree, sums: Tree, x: jax.Array) -> tuple[Tree, Tree, Tree, jax.Array]:
            blocks = self.cast(carry["params"][BLOCKS])
            unit = self.unit(self.in_use(blocks), part)
            versions = put(versions, blocks, slot)
            if self.recompute:
                residuals = put(residuals, x, slot)
                y, aux = self.layers.forward(unit, x)
            else:
                residuals, y, aux = self.layers.forward_keeping(unit, x, residuals, slot)
            return versions, residuals, put(sums, self._used(aux), slot), y

        state = carry["versions"], carry["residuals"], carry["aux"]
        versions, residuals, aux, y = self.alone(on, run, *state, x)
        return carry | {"versions": versions, "residuals": residuals, "aux": aux}, y

    def _used(self, aux: Tree) -> Tree:
        """Return what is used of aux."""
        return {name: aux[name].astype(wide(aux[name].dtype)) for name in self.aux_places}

    def backward(self, carry: Carry, parity: int) -> tuple[Carry, jax.Array]:
        """Run B at the weights that F of the batch has used, and update the stage."""
        slot = self.slot_of(carry["round"] - (2 * self.S - 1 - self.rank - parity) // 2)
        on = ((self.rank + parity) % 2 == 1) & (carry["numbers"][slot] != NOTHING)
        part = get(carry["batches"], slot)

        def run(
            params: Params, optimizer: Tree, squares: jax.Array, dy: jax.Array
        ) -> tuple[Params, Tree, jax.Array, jax.Array]:
            version = get(carry["versions"], slot)
            unit = self.unit(self.in_use(version), part)
            kept: tuple[Tree, Slot] = (carry["residuals"], slot)
            if self.recompute:
                rings, first = self.layers_backward.again(unit, get(*kept))
                kept = self.together(rings), first
            grads, dx = self.layers_backward.backward(unit, dy, *kept, self._empty_sums(version, unit), True)
            grads = jax.tree.map(lambda g: g[0], grads)
            grads, aux, dx = self.together((grads, get(carry["aux"], slot), dx))
            if self.stage < 2:  # from stage 2 on, `Backward.backward` has reduced them
                grads = jax.tree.map(zero.reduce_manual, part_of(self.stage_places, grads), grads)
            aux = jax.tree.map(zero.reduce_manual, self.aux_places, aux)
            params, optimizer, square = self.updated(carry, slot, {BLOCKS: grads}, aux, optimizer, params)
            return params, optimizer, put(squares, square, slot), dx

        state = _layers(carry["params"]), _layers(carry["optimizer"]), carry["squares"], carry["returned"]
        params, optimizer, squares, dx = self.alone(on, run, *state)
        carry = carry | {
            "params": _joined(carry["params"], params),
            "optimizer": _joined(carry["optimizer"], optimizer),
            "squares": squares,
        }
        return carry, dx

    def _empty_sums(self, version: Tree, unit: Work) -> Tree:
        """Return zeros to accumulate the gradients of a stage in: shards from ZeRO 2 on, else of weights in use."""

        def empty(w: jax.Array) -> jax.Array:
            return region.zeros((1, *w.shape), wide(w.dtype), region.varying(w))

        return jax.tree.map(empty, differentiated(self.stage_places, version if self.stage >= 2 else unit.weights))

    def head(self, carry: Carry, y: jax.Array) -> Carry:
        """Run the head: all ranks together compute the loss of the batch that leaves the last stage, and its gradient.

        F of the last rank, S - 1, is (S - 1) // 2 rounds behind that of the first.
        """
        batch = carry["round"] - (self.S - 1) // 2
        last = self.rank == self.S - 1
        slot = self.slot_of(batch)

        def loss_of(tops: Params, x: jax.Array) -> jax.Array:
            # A check has refused objectives with sums beside the loss.
            loss, _ = self.program.loss(tops, x, get(carry["batches"], slot))
            return loss

        # The sum brings the output of the last rank to all ranks.
        x = region.add_up(jnp.where(last, y, jnp.zeros((), y.dtype)), (PIPELINE,))
        loss, vjp = jax.vjp(loss_of, self.tops, x)
        grads, dy = vjp(region.vary(jnp.ones_like(loss), region.varying(loss)))
        grads = jax.tree.map(lambda g: g.astype(wide(g.dtype)), grads)
        loss = region.add_up(loss, self.layout.tokens_over).astype(wide(loss.dtype))
        return carry | {
            "losses": put(carry["losses"], loss, slot),
            "of_head": put(carry["of_head"], grads, self.head_slot_of(batch)),
            # The last rank's B follows in the next tick, on the gradient that the head has made.
            "returned": jnp.where(last, region.vary(dy, self.stream), carry["returned"]),
        }

    def through(self, carry: Carry) -> tuple[Carry, Through]:
        """End the round: run B of the embedding for the batch that is back at rank 0, and update the tops."""
        batch = carry["round"] - (self.S - 1)
        slot = self.slot_of(batch)
        dx = carry.pop("dx")
        part = get(carry["batches"], slot)
        number = get(carry["numbers"], slot)
        count = get(carry["counts"], slot)
        # The gradients of the tops come from the embedding, and from the head, whose gradients have waited.
        x, vjp = jax.vjp(lambda tops: self.program.embed(tops, part), self.tops)
        first = region.add_up(jnp.where(self.rank == 0, dx, jnp.zeros((), dx.dtype)), (PIPELINE,))
        (grads,) = vjp(region.vary(first, region.varying(x)))
        grads = jax.tree.map(jnp.add, get(carry["of_head"], self.head_slot_of(batch)), grads)
        grads = jax.tree.map(zero.reduce_manual, self.top_places, grads)
        old_optimizer = _tops(carry["optimizer"])
        old_params = _tops(carry["params"])
        params, optimizer, square = self.updated(carry, slot, grads, {}, old_optimizer, old_params)
        # While the pipeline fills, no batch is through and nothing is updated.
        params, optimizer = _choose(number != NOTHING, (params, optimizer), (old_params, old_optimizer))

        norm = jnp.sqrt(square + lax.psum(get(carry["squares"], slot), PIPELINE))
        loss = get(carry["losses"], slot) / jnp.maximum(count, 1)
        carry = carry | {
            "params": carry["params"] | params,
            "optimizer": _joined(carry["optimizer"], optimizer),
            "round": carry["round"] + 1,
        }
        return carry, Through(number, loss, norm, count)

    def updated(
        self, carry: Carry, slot: jax.Array, grads: Params, aux: Tree, optimizer: Tree, params: Params
    ) -> tuple[Params, Tree, jax.Array]:
        """Return (parameters, optimizer state, squared norm) after an update with the sums of a batch.

        Where the gradients are not finite, parameters and state stay as they were.
        """
        number = get(carry["numbers"], slot)
        divisor = self.positions or jnp.maximum(get(carry["counts"], slot), 1)
        grads = jax.tree.map(lambda g: g / jnp.asarray(divisor, g.dtype), grads)
        # The gradients of a stage come from its rank alone.
        square = _square(grads, keep={PIPELINE} if BLOCKS in grads else set())
        made = self.update(grads, aux, optimizer, params, number)
        return *_choose(jnp.isfinite(square), made, (params, optimizer)), square


def _square(tree: Tree, keep: set[str]) -> jax.Array:
    """Return the sum of squares over all devices, but not over those along the axes `keep`."""
    sums: dict[frozenset[str], jax.Array] = {}
    for a in jax.tree.leaves(tree):
        axes = region.varying(a) - keep
        sums[axes] = sums.get(axes, 0) + jnp.sum(jnp.square(a))
    return reduce(add, [region.add_up(square, sorted(axes)) for axes, square in sums.items()])


def _choose(condition: jax.Array, yes: Tree, no: Tree) -> Tree:
    return jax.tree.map(lambda a, b: a if a is b else jnp.where(condition, a, b), yes, no)


def _is_model(tree: Tree) -> bool:
    """Return whether a node is a dict of parameters, or has their names, as in an optimizer state."""
    return isinstance(tree, dict) and BLOCKS in tree


def _stage(tree: Tree) -> Tree:
    """Return parameters, or what has their names, with the layers of this rank alone, [depth, ...]."""
    return of_layers(lambda a: a[0, 0], tree)


def _stages(tree: Tree) -> Tree:
    """Return the inverse of `_stage`."""
    return of_layers(lambda a: a[None, None], tree)


def _layers(tree: Tree) -> Tree:
    """Return the part of parameters, or of what has their names, that belongs to layers."""

    def part(node: Tree) -> Tree:
        return {BLOCKS: node[BLOCKS]} if _is_model(node) else node

    return jax.tree.map(part, tree, is_leaf=_is_model)


def _tops(tree: Tree) -> Tree:
    """Return the part of parameters, or of what has their names, that belongs to all ranks."""

    def part(node: Tree) -> Tree:
        if not _is_model(node):
            return node
        return {name: a for name, a in node.items() if name != BLOCKS}

    return jax.tree.map(part, tree, is_leaf=_is_model)


def _joined(tree: Tree, part: Tree) -> Tree:
    """Return `tree` with a changed part that `_layers` or `_tops` took out of it."""
    return jax.tree.map(lambda node, new: node | new if _is_model(node) else node, tree, part, is_leaf=_is_model)


def _leading(a: jax.Array) -> P:
    """Return the spec of the global array that `_together` makes."""
    axes = tuple(axis for axis in AXES if axis in region.varying(a))
    return P(axes) if axes else P()


def _together(a: jax.Array) -> jax.Array:
    """Return a device's own array as its part of a global one, which has a leading dim over the devices."""
    return a[None] if region.varying(a) else a


def _apart(a: jax.Array) -> jax.Array:
    """Return the inverse of `_together`."""
    return a[0] if region.varying(a) else a
