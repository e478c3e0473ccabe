"""PipeDream: a pipeline that is never emptied, and whose stages are updated one by one (Narayanan et al. 2019).

Global batches follow one another as micro-batches do elsewhere. In a round each rank runs one F and one B, in two ticks
(`schedules.pipedream`), and updates its stage with what B has made, without waiting for others. So between F and B of a
batch rank r makes S-1-r updates. F keeps the weights that it has used, and B computes the gradient at those ("weight
stashing", section 3.3): at most S versions of the weights on the first rank, one on the last.

    round q    tick 2q    : even ranks F, odd ranks B; all ranks embed batch q
               tick 2q + 1: odd ranks F, even ranks B; batch q-S+1 is through, and embedding and head are updated

and all ranks together run the head, in the tick of the last rank's F. The embedding and the head belong to all ranks,
each with its part of the vocabulary; their gradients meet, and are used, when a batch is through. F or B is one branch
of each rank, and nothing in there waits for another rank (see `device`).

Between rounds there is what is in flight: every device's own arrays, put together into global ones (`_together`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import P, lax
from jaxtyping import Array, Float, Int

from jaxdist.mesh import AXES, PIPELINE
from jaxdist.parallel import region
from jaxdist.parallel.pipeline.device import Device, Program, Tree, get, own, put
from jaxdist.parallel.pipeline.layers import Unit
from jaxdist.parallel.pipeline.stages import BLOCKS, Stages, of_layers
from jaxdist.sharding import BATCH, Layout, wide

Carry = dict[str, Any]

NOTHING = -1
"""The number of a batch that is none."""


class Through(NamedTuple):
    """The batch that has come through in a round: all its gradients are made and used."""

    number: Int[Array, ""]
    """As it was given; NOTHING where none has."""
    loss: Float[Array, ""]
    """The mean."""
    norm: Float[Array, ""]
    """Of its gradient, each stage's part at the weights that the stage's F had."""
    count: Int[Array, ""]


@dataclass(frozen=True)
class Asynchronous:
    """`places` are those of the folded parameters, `stage` that of ZeRO, `dtype` that of weights in use."""

    stages: Stages
    layout: Layout
    places: Tree
    stage: int
    program: Program
    dtype: Any
    recompute: bool
    """Keep only the input of a stage, and compute it again when its B runs."""
    update: Callable[[Tree, Tree, Tree, Array], tuple[Tree, Tree]]
    """(gradients, optimizer's state, parameters, updates before) -> (parameters, state), of the layers, or of all
    others; elementwise, as each device updates its own part."""

    def empty(self, params: Tree, batch: Tree) -> Tree:
        """What is in flight where nothing is. Of `batch`, [1, B, ...], only the shape counts."""
        types: list[Tree] = []

        def look(*arguments):
            types.append(jax.tree.map(_leading, Round(self, *arguments).start()))
            return jnp.zeros(())

        specs = jax.tree.map(lambda p: p.rest, self.places), self._batch
        jax.eval_shape(jax.shard_map(look, in_specs=specs, out_specs=P()), params, batch)
        start = lambda *arguments: jax.tree.map(_together, Round(self, *arguments).start())
        return jax.shard_map(start, in_specs=specs, out_specs=types[0])(params, batch)

    def round(
        self, params: Tree, optimizer: Tree, in_flight: Tree, batch: Tree, number: Int[Array, ""], count: Int[Array, ""]
    ) -> tuple[Tree, Tree, Tree, Through]:
        """(parameters, optimizer's state, what is in flight, the batch that is through), after `batch` has come in.

        `number` is that of the batch, by which updates are counted; of NOTHING nothing is updated. `count` is what its
        summed loss is divided by.
        """

        def run(params, optimizer, in_flight, batch, number, count):
            this = Round(self, params, batch)
            carry = this.arrive(jax.tree.map(_apart, in_flight), number, count)
            carry |= {"params": _stage(params), "optimizer": _stage(optimizer)}
            for parity in range(2):
                carry = this.tick(carry, parity)
            carry, through = this.through(carry)
            params, optimizer = (_stages(carry.pop(name)) for name in ("params", "optimizer"))
            return params, optimizer, jax.tree.map(_together, carry), through

        lie = lambda tree: jax.tree.map(lambda a: jax.typeof(a).sharding.spec, tree)
        state = lie(params), lie(optimizer), lie(in_flight)
        run = jax.shard_map(run, in_specs=(*state, self._batch, P(), P()), out_specs=(*state, P()))
        return run(params, optimizer, in_flight, batch, number, count)

    @property
    def _batch(self) -> P:
        return self.layout.spec([None, BATCH])


class Round(Device):
    """What one device does in a round. A batch has the same slot in all buffers: its round modulo their depth."""

    def __init__(self, of: Asynchronous, params: Tree, batch: Tree):
        super().__init__(of.program, of.stages, of.layout, of.places, of.stage)
        self.update, self.recompute, self.dtype = of.update, of.recompute, of.dtype
        self.batch, self.params = get(batch, 0), _stage(params)
        self.S, self.rank = of.stages.ranks, lax.axis_index(PIPELINE)
        self.stage_places = jax.tree.map(lambda p: p.layer.layer, self.block_places)
        self.tops = own(self.top_places, self.cast({name: params[name] for name in self.top_places}))
        """Of the whole round: they are updated at its end."""

    def cast(self, weights: Tree) -> Tree:
        return jax.tree.map(lambda w: w.astype(self.dtype), weights)

    def start(self) -> Carry:
        """Nothing in flight."""
        S, zeros = self.S, region.zeros_like
        blocks = self.cast(self.params[BLOCKS])
        x = jax.eval_shape(lambda: region.vary(self.program.embed(self.tops, self.batch), self.stream))
        buffer = lambda a: region.vary(zeros(a, (S,)), (PIPELINE,))
        kept = lambda: self.layers.kept(self.unit(self.in_use(blocks), self.batch), zeros(x), S)
        gradient = lambda w: region.zeros((S // 2 + 1, *w.shape), wide(w.dtype), region.varying(w))
        f32 = wide(self.dtype)
        return {
            "round": jnp.zeros((), jnp.int32),
            "batches": jax.tree.map(lambda a: jnp.repeat(a[None], S, axis=0), self.batch),
            "numbers": jnp.full(S, NOTHING, jnp.int32),
            "counts": jnp.zeros(S, jnp.int32),
            "versions": jax.tree.map(buffer, blocks),
            "residuals": buffer(x) if self.recompute else kept(),
            "sent": zeros(x),
            "returned": zeros(x),
            "losses": jnp.zeros(S, f32),
            "squares": region.zeros((S,), f32, (PIPELINE,)),
            "of_head": jax.tree.map(gradient, self.tops),
        }

    def in_use(self, blocks: Tree) -> Tree:
        """The layers of this rank, gathered; but at stage 3, where that is done layer by layer."""
        return blocks if self.stage == 3 else own(self.stage_places, blocks)

    def unit(self, weights: Tree, part: Tree) -> Unit:
        """The layers of this rank, with the weights in use."""
        return Unit(0, weights, *self.numbers(0), part)

    def arrive(self, carry: Carry, number: jax.Array, count: jax.Array) -> Carry:
        """A batch comes in, in the place of that which came through in the round before."""
        new = {"batches": self.batch, "numbers": number, "counts": count}
        return carry | {name: put(carry[name], a, carry["round"] % self.S) for name, a in new.items()}

    def tick(self, carry: Carry, parity: int) -> Carry:
        """Half of the ranks run F, the others B. What arrives was sent in the tick before."""
        carry, y = self.forward(carry, parity)
        carry, dx = self.backward(carry, parity)
        y, dx = region.after(y, *self.awaited(dx)), region.after(dx, *self.awaited(y))
        carry |= {"sent": lax.ppermute(y, PIPELINE, self.onward), "returned": lax.ppermute(dx, PIPELINE, self.back)}
        if parity == (self.S - 1) % 2:
            carry = self.head(carry, y)
        return carry | {"dx": dx}

    def forward(self, carry: Carry, parity: int) -> tuple[Carry, jax.Array]:
        """F: with the weights as they are now, which are kept."""
        slot = (carry["round"] - (self.rank - parity) // 2) % self.S
        on = ((self.rank - parity) % 2 == 0) & (carry["numbers"][slot] != NOTHING)
        x, part = carry["sent"], get(carry["batches"], slot)
        if parity == 0:
            x = jnp.where(self.rank == 0, self.program.embed(self.tops, self.batch), x)

        def run(versions, residuals, x):
            blocks = self.cast(carry["params"][BLOCKS])
            unit, versions = self.unit(self.in_use(blocks), part), put(versions, blocks, slot)
            if self.recompute:
                return versions, put(residuals, x, slot), self.layers.forward(unit, x)
            return versions, *self.layers.forward_keeping(unit, x, residuals, slot)

        versions, residuals, y = self.alone(on, run, carry["versions"], carry["residuals"], x)
        return carry | {"versions": versions, "residuals": residuals}, y

    def backward(self, carry: Carry, parity: int) -> tuple[Carry, jax.Array]:
        """B, at the weights of F, and the update of the stage."""
        slot = (carry["round"] - (2 * self.S - 1 - self.rank - parity) // 2) % self.S
        on = ((self.rank + parity) % 2 == 1) & (carry["numbers"][slot] != NOTHING)
        part = get(carry["batches"], slot)

        def run(params, optimizer, squares, dy):
            version = get(carry["versions"], slot)
            unit, kept = self.unit(self.in_use(version), part), (carry["residuals"], slot)
            kept = self.layers.again(unit, get(*kept)) if self.recompute else kept
            empty = lambda w: region.zeros((1, *w.shape), wide(w.dtype), region.varying(w))
            sums = jax.tree.map(empty, version if self.stage >= 2 else unit.weights)
            grads, dx = self.layers.backward(unit, dy, *kept, sums, True)
            grads = jax.tree.map(lambda g: g[0], grads)
            if self.stage < 2:  # else they have been
                grads = jax.tree.map(lambda p, g: p.add_up(g), self.stage_places, grads)
            params, optimizer, square = self.updated(carry, slot, {BLOCKS: grads}, optimizer, params)
            return params, optimizer, put(squares, square, slot), dx

        params, optimizer = (_layers(carry[name]) for name in ("params", "optimizer"))
        state = params, optimizer, carry["squares"], carry["returned"]
        params, optimizer, squares, dx = self.alone(on, run, *state)
        made = {"params": _joined(carry["params"], params), "optimizer": _joined(carry["optimizer"], optimizer)}
        return carry | made | {"squares": squares}, dx

    def head(self, carry: Carry, y: jax.Array) -> Carry:
        """The loss of the batch that leaves the last stage, on all ranks together, and its gradient."""
        late, last = (self.S - 1) // 2, self.rank == self.S - 1
        slot = (carry["round"] - late) % self.S
        loss_of = lambda tops, x: self.program.loss(tops, x, get(carry["batches"], slot))
        x = region.add_up(jnp.where(last, y, jnp.zeros((), y.dtype)), (PIPELINE,))
        loss, vjp = jax.vjp(loss_of, self.tops, x)
        grads, dy = vjp(region.vary(jnp.ones_like(loss), region.varying(loss)))
        grads = jax.tree.map(lambda g: g.astype(wide(g.dtype)), grads)
        loss = region.add_up(loss, self.layout.split(BATCH)).astype(wide(loss.dtype))
        return carry | {
            "losses": put(carry["losses"], loss, slot),
            "of_head": put(carry["of_head"], grads, (carry["round"] - late) % (self.S // 2 + 1)),
            "returned": jnp.where(last, region.vary(dy, self.stream), carry["returned"]),
        }

    def through(self, carry: Carry) -> tuple[Carry, Through]:
        """B of the embedding, for the batch that has come back to the first rank, and the update of all but layers."""
        batch = carry["round"] - (self.S - 1)
        slot, dx = batch % self.S, carry.pop("dx")
        part, number, count = (get(carry[name], slot) for name in ("batches", "numbers", "counts"))
        x, vjp = jax.vjp(lambda tops: self.program.embed(tops, part), self.tops)
        first = region.add_up(jnp.where(self.rank == 0, dx, jnp.zeros((), dx.dtype)), (PIPELINE,))
        (grads,) = vjp(region.vary(first, region.varying(x)))
        grads = jax.tree.map(jnp.add, get(carry["of_head"], batch % (self.S // 2 + 1)), grads)
        grads = jax.tree.map(lambda p, g: p.add_up(g), self.top_places, grads)
        state = _tops(carry["optimizer"]), _tops(carry["params"])
        params, optimizer, square = self.updated(carry, slot, grads, *state)
        params, optimizer = _choose(number != NOTHING, (params, optimizer), state[::-1])

        norm = jnp.sqrt(square + lax.psum(get(carry["squares"], slot), PIPELINE))
        loss = get(carry["losses"], slot) / jnp.maximum(count, 1)
        made = {"params": carry["params"] | params, "optimizer": _joined(carry["optimizer"], optimizer)}
        return carry | made | {"round": carry["round"] + 1}, Through(number, loss, norm, count)

    def updated(self, carry: Carry, slot: jax.Array, grads: Tree, optimizer: Tree, params: Tree):
        """(parameters, state, square of the norm) by the summed gradients of the batch in `slot`; but as they were
        where those are not finite."""
        count, number = get(carry["counts"], slot), get(carry["numbers"], slot)
        grads = jax.tree.map(lambda g: g / jnp.maximum(count, 1).astype(g.dtype), grads)
        square = _square(grads, keep={PIPELINE} if BLOCKS in grads else set())
        made = self.update(grads, optimizer, params, number)
        return *_choose(jnp.isfinite(square), made, (params, optimizer)), square


def _square(tree: Tree, keep: set[str]) -> jax.Array:
    """The sum of squares over all devices, but those along `keep`."""
    sums: dict[frozenset[str], jax.Array] = {}
    for a in jax.tree.leaves(tree):
        axes = region.varying(a) - keep
        sums[axes] = sums.get(axes, 0) + jnp.sum(jnp.square(a))
    return sum(region.add_up(square, sorted(axes)) for axes, square in sums.items())


def _choose(condition: jax.Array, yes: Tree, no: Tree) -> Tree:
    return jax.tree.map(lambda a, b: a if a is b else jnp.where(condition, a, b), yes, no)


def _is_model(tree: Tree) -> bool:
    """Whether it is a dict of parameters, or has their names."""
    return isinstance(tree, dict) and BLOCKS in tree


def _stage(tree: Tree) -> Tree:
    """Parameters, or what has their names, with the layers of this rank alone, [depth, ...]."""
    return of_layers(lambda a: a[0, 0], tree)


def _stages(tree: Tree) -> Tree:
    """The inverse of `_stage`."""
    return of_layers(lambda a: a[None, None], tree)


def _layers(tree: Tree) -> Tree:
    return jax.tree.map(lambda t: {BLOCKS: t[BLOCKS]} if _is_model(t) else t, tree, is_leaf=_is_model)


def _tops(tree: Tree) -> Tree:
    without = lambda t: {name: a for name, a in t.items() if name != BLOCKS}
    return jax.tree.map(lambda t: without(t) if _is_model(t) else t, tree, is_leaf=_is_model)


def _joined(tree: Tree, part: Tree) -> Tree:
    """`tree` with what `_layers` or `_tops` has made of it, changed."""
    return jax.tree.map(lambda t, new: t | new if _is_model(t) else t, tree, part, is_leaf=_is_model)


def _leading(a: jax.Array) -> P:
    """Of the global array that `_together` makes."""
    axes = tuple(axis for axis in AXES if axis in region.varying(a))
    return P(axes) if axes else P()


def _together(a: jax.Array) -> jax.Array:
    """A device's own array as its part of a global one, which has one for each device in front."""
    return a[None] if region.varying(a) else a


def _apart(a: jax.Array) -> jax.Array:
    return a[0] if region.varying(a) else a
