"""Runs the table of a schedule: the forward and backward passes of a pipelined model, in one manual region.

Every device does in each tick what its row of the table says, in the order

    messages arrive -> F -> head -> send onward -> B -> send back -> W

F of the first chunk begins with the embedding; the head is the last chunk's loss and its gradient, made at the time of
F. The embedding and the head belong to all ranks, each with its part of the vocabulary. W is there where the schedule
splits the backward pass (Qi et al. 2024, section 2): `split` says how a layer's is cut. A run of ticks with the same
slots is one `lax.scan`.

In uniform schedules it has nothing to branch on: a rank that has nothing to do computes on what is there, and what
comes of it goes to a slot that nobody reads, or is masked where it would be added. In lockstep that takes no time, as
the others would be waited for. The head is the exception where only some of the ticks have one, but all ranks branch
alike. Other schedules have each rank branch for itself on F, B and W, and nothing in there waits for another rank.

Nothing differentiates through the ticks. F keeps what `jax.vjp` of each layer wants to see again, as its policy of
recomputation has it, in a buffer as deep as the schedule needs; so memory does not grow with the micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import P, lax
from jax.sharding import reshard
from jaxtyping import Array, Float

from jaxdist.mesh import PIPELINE
from jaxdist.parallel import region
from jaxdist.parallel.pipeline.device import Device, Program, Tree, get, own, put
from jaxdist.parallel.pipeline.layers import Unit
from jaxdist.parallel.pipeline.stages import BLOCKS, Stages
from jaxdist.parallel.pipeline.table import Table
from jaxdist.sharding import BATCH, Layout, wide

SHARED = "the_same_on_all_ranks"
"""The name in a program of branches that all devices take alike."""

Row = dict[str, Array]
"""One tick of a `Table`, for this rank."""
Carry = dict[str, Any]


@dataclass(frozen=True)
class Executor:
    """`places` are those of the folded parameters, `stage` that of ZeRO.

    Weights are gathered once per step; those of layers at stage 3 when F or B runs the layer. Gradients are added up in
    f32 and reduced once per step; those of layers from stage 2 on when B has made them, and only shards are kept.
    """

    table: Table
    stages: Stages
    layout: Layout
    places: Tree
    stage: int
    program: Program
    recompute: bool
    """Keep only the input of a chunk, and compute it again when its B runs."""

    def __post_init__(self):
        if self.recompute and self.table.schedule.split:
            raise ValueError(
                f"schedule {self.table.schedule.name} splits the backward pass and keeps what both parts need, which "
                "computing the whole stage again would undo; ask for remat block, dots or none, or for another schedule"
            )

    def gradients(self, weights: Tree, batch: Tree) -> tuple[Float[Array, ""], Tree]:
        """(summed loss, its gradient in f32, which lies as parameters do at rest), of micro-batches [M, B, ...]."""
        run = partial(self._run, True)
        return self.in_region(run, (P(), self._rest))(*self.arguments(weights, batch))

    def loss(self, weights: Tree, batch: Tree) -> Float[Array, ""]:
        """The summed loss alone: F and head of the same table."""
        run = lambda *arguments: region.add_up(self._run(False, *arguments), self.layout.split(BATCH))
        return self.in_region(run, P())(*self.arguments(weights, batch))

    def output(self, weights: Tree, batch: Tree, spec: P) -> Float[Array, "..."]:
        """What `program.loss` makes of the only micro-batch, where that is an array that lies as `spec` says."""
        assert self.table.schedule.micro_batches == 1
        return self.in_region(partial(self._run, False), spec)(*self.arguments(weights, batch))

    def in_region(self, run: Callable, out_specs: Any) -> Callable:
        """`run` on every device: it takes its rows of the table, the ticks of all, weights and batch (`arguments`)."""
        specs = (P(None, PIPELINE), P(), self._rest, self.layout.spec([None, BATCH]))
        return jax.shard_map(run, in_specs=specs, out_specs=out_specs)

    @property
    def _rest(self) -> Tree:
        return jax.tree.map(lambda p: p.rest, self.places)

    def arguments(self, weights: Tree, batch: Tree) -> tuple[Row, Row, Tree, Tree]:
        """What `in_region` takes."""
        columns = {name: a for name, a in vars(self.table).items() if hasattr(a, "shape")}
        rows = {name: reshard(jnp.asarray(a), P(None, PIPELINE)) for name, a in columns.items() if a.ndim == 2}
        ticks = {name: jnp.asarray(a) for name, a in columns.items() if a.ndim == 1}
        return rows, ticks, weights, batch

    def _run(self, backward: bool, rows: Row, ticks: Row, weights: Tree, batch: Tree):
        rows = jax.tree.map(lambda a: a[:, 0], rows)
        run = Region(self, weights, batch, backward)
        carry = run.start()
        for first, end, slots in self.table.segments:
            slots = slots if backward else slots & {"F", "H"}
            if slots:
                part = jax.tree.map(lambda a, at=slice(first, end): a[at], rows | ticks)
                heads = bool(self.table.head_on[first:end].all())
                carry = lax.scan(partial(run.tick, slots, heads), carry, part)[0]
        return run.end(carry)


class Region(Device):
    """What one device does: the state of the executor inside the region. Methods of its carry, tick by tick."""

    def __init__(self, of: Executor, weights: Tree, batch: Tree, backward: bool):
        super().__init__(of.program, of.stages, of.layout, of.places, of.stage)
        self.table, self.recompute, self.batch, self.backward = of.table, of.recompute, batch, backward
        self.uniform = self.table.schedule.uniform
        self.tops = own(self.top_places, {name: weights[name] for name in self.top_places})
        blocks = weights[BLOCKS] if of.stage == 3 else own(self.block_places, weights[BLOCKS])
        self.blocks = jax.tree.map(lambda w: w[:, 0], blocks)
        self.at_rest = jax.tree.map(lambda w: w[:, 0], weights[BLOCKS])

    def start(self) -> Carry:
        """Buffers and sums, empty."""
        part = self.part(region.zeros((), jnp.int32, (PIPELINE,)))
        x = jax.eval_shape(lambda: region.vary(self.program.embed(self.tops, part), self.stream))
        ring = lambda name: region.zeros_like(x, (self.table.slots[name],))
        last = lambda: region.add_up(region.zeros_like(x), (PIPELINE,))
        loss = jax.eval_shape(lambda: self.program.loss(self.tops, last(), self.part(jnp.zeros((), jnp.int32))))
        loss = region.zeros(loss.shape, loss.dtype, loss.manual_axis_type.varying)
        carry = dict(acts=ring("acts"), sent=region.zeros_like(x), loss=loss)
        if not self.backward:
            return carry
        blocks = self.at_rest if self.stage >= 2 else self.blocks
        sums = partial(jax.tree.map, lambda w: region.zeros(w.shape, wide(w.dtype), region.varying(w)))
        carry |= dict(cots=ring("cots"), returned=region.zeros_like(x), blocks=sums(blocks), tops=sums(self.tops))
        slots, one = self.table.slots, (self.unit(0, part), region.zeros_like(x))
        carry |= dict(residuals=ring("residuals") if self.recompute else self.layers.kept(*one, slots["residuals"]))
        if self.table.schedule.split:
            carry |= dict(stash=self.layers.stash(*one, carry["residuals"], slots["stash"]))
        return carry

    def tick(self, slots: frozenset[str], heads: bool, carry: Carry, row: Row) -> tuple[Carry, None]:
        """One row of the table. `heads`: the last chunk runs F in every tick of this segment."""
        carry = carry | {"acts": put(carry["acts"], carry["sent"], row["recv_act"])}
        if self.backward:
            carry |= {"cots": put(carry["cots"], carry["returned"], row["recv_cot"])}
        before = ()
        if "F" in slots:
            carry, y = self.forward(carry, row)
            if "H" in slots:
                carry = self.head(carry, row, y, heads)
            carry |= {"sent": lax.ppermute(y, PIPELINE, self.onward)}
            before = self.awaited(y, carry["loss"])
        if "B" in slots:
            carry, dx = self.backwards(carry, row, before)
            carry, done = self.unembed(carry, row, dx)
            carry |= {"returned": lax.ppermute(dx, PIPELINE, self.back)}
            before = self.awaited(dx, done)
        if "W" in slots:
            carry = self.of_weights(carry, row, before)
        return carry, None

    def forward(self, carry: Carry, row: Row) -> tuple[Carry, jax.Array]:
        """F of a chunk."""
        unit = self.unit(row["f_chunk"], self.part(row["f_micro"]))

        def run(residuals, x):
            if self.backward and not self.recompute:
                return self.layers.forward_keeping(unit, x, residuals, row["f_res"])
            residuals = put(residuals, x, row["f_res"]) if self.backward else residuals
            return residuals, self.layers.forward(unit, x)

        x = self.embed(row, get(carry["acts"], row["f_act"]))
        residuals, y = self._own(row["f_on"], run, carry.get("residuals"), x)
        return carry | ({"residuals": residuals} if self.backward else {}), y

    def embed(self, row: Row, x: jax.Array) -> jax.Array:
        """The input of a chunk: `x`, but where it is the first."""

        def run(x):
            return jnp.where(row["f_first"], self.program.embed(self.tops, self.part(row["embed_micro"])), x)

        return self._shared(row["embed_on"], self.uniform, run, x)

    def head(self, carry: Carry, row: Row, y: jax.Array, always: bool) -> Carry:
        """The loss of the micro-batch that leaves the last chunk, on all ranks together, and its gradient."""
        loss_of = lambda tops, x: self.program.loss(tops, x, self.part(row["head_micro"]))

        def run(sums):
            last = region.add_up(jnp.where(row["f_last"], y, jnp.zeros((), y.dtype)), (PIPELINE,))
            if not self.backward:
                return sums | {"loss": sums["loss"] + loss_of(self.tops, last)}
            loss, vjp = jax.vjp(loss_of, self.tops, last)
            tops, dy = vjp(region.vary(jnp.ones_like(loss), region.varying(loss)))
            cots = put(sums["cots"], region.vary(dy, self.stream), row["f_cot"])
            return {"loss": sums["loss"] + loss, "tops": _add(sums["tops"], tops), "cots": cots}

        names = ("loss", "tops", "cots") if self.backward else ("loss",)
        return carry | self._shared(row["head_on"], always, run, {name: carry[name] for name in names})

    def backwards(self, carry: Carry, row: Row, before: tuple[jax.Array, ...]) -> tuple[Carry, jax.Array]:
        """B of a chunk, after what is `before`: the whole backward pass, or where that is split, the gradient of its
        input."""
        unit, kept = self.unit(row["b_chunk"], self.part(row["b_micro"])), (carry["residuals"], row["b_res"])

        def whole(sums, dy):
            again = self.layers.again(unit, region.after(get(*kept), *before)) if self.recompute else kept
            return self.layers.backward(unit, dy, *again, sums, row["b_on"])

        def half(stash, dy):
            return self.layers.of_input(unit, dy, *kept, stash, row["b_wst"])

        dy = get(carry["cots"], region.after(row["b_cot"], *before))
        run, name = (half, "stash") if self.table.schedule.split else (whole, "blocks")
        made, dx = self._own(row["b_on"], run, carry[name], dy)
        return carry | {name: made}, dx

    def unembed(self, carry: Carry, row: Row, dx: jax.Array) -> tuple[Carry, jax.Array]:
        """B of the embedding, where the chunk is the first; and a number that is there when that is done."""
        one = lambda a: region.vary(a[(0,) * a.ndim], self.stream)

        def run(state):
            first = region.add_up(jnp.where(row["b_first"], dx, jnp.zeros((), dx.dtype)), (PIPELINE,))
            embed = lambda tops: self.program.embed(tops, self.part(row["unembed_micro"]))
            x, vjp = jax.vjp(embed, self.tops)
            made = vjp(region.vary(first, region.varying(x)))[0]  # of zeros, where no rank has it
            done = one(first)
            if self.uniform:  # on CPUs: where ranks go their own ways, nothing waits for `done`
                # The gradient moves too, where the sequence is split: W must not begin as soon as `first` is there.
                done = region.after(done, *jax.tree.leaves(made))
            return _add(state[0], made), done

        tops, done = self._shared(row["unembed_on"], self.uniform, run, (carry["tops"], one(dx)))
        return carry | {"tops": tops}, done

    def of_weights(self, carry: Carry, row: Row, before: tuple[jax.Array, ...]) -> Carry:
        """W of a chunk, after what is `before`."""
        unit = self.unit(row["w_chunk"], self.part(row["w_micro"]))

        def run(sums):
            return (self.layers.of_weights(unit, carry["stash"], row["w_wst"], sums, row["w_on"], before),)

        return carry | {"blocks": self._own(row["w_on"], run, carry["blocks"])[0]}

    def _own(self, on: jax.Array, run: Callable, *state: Tree) -> tuple[Tree, ...]:
        """`run(*state)` where this rank has the unit.

        Uniform schedules run it wherever some rank has it: what comes of it is masked, or goes where nobody looks. In
        others each rank goes its own way.
        """
        return run(*state) if self.uniform else self.alone(on, run, *state)

    def _shared(self, on: jax.Array, always: bool, run: Callable, state: Tree) -> Tree:
        """`run(state)` in ticks that are `on`, or in `always` all of them, on all ranks together.

        All have the same `on`, as its type says, and so go the same way: collectives of any group, over the pipeline
        too, are legal.
        """
        if always:
            return run(state)
        assert not region.varying(on)
        with jax.named_scope(SHARED):
            return lax.cond(on, run, lambda state: state, state)

    def end(self, carry: Carry):
        """What is left to add up, once per step; without a backward pass nothing is."""
        if not self.backward:
            return carry["loss"]
        loss = region.add_up(carry["loss"], self.layout.split(BATCH))
        reduce = partial(jax.tree.map, lambda p, g: p.add_up(g))
        blocks = jax.tree.map(lambda g: g[:, None], carry["blocks"])
        blocks = blocks if self.stage >= 2 else reduce(self.block_places, blocks)
        return loss, reduce(self.top_places, carry["tops"]) | {BLOCKS: blocks}

    def part(self, micro: jax.Array) -> Tree:
        return get(self.batch, micro)

    def unit(self, chunk: jax.Array | int, part: Tree) -> Unit:
        """One of this rank's chunks and a micro-batch."""
        chunk = chunk if self.stages.virtual > 1 else 0
        return Unit(chunk, get(self.blocks, chunk), *self.numbers(chunk), part)


def _add(sums: Tree, values: Tree) -> Tree:
    return jax.tree.map(lambda s, x: s + x.astype(s.dtype), sums, values)
