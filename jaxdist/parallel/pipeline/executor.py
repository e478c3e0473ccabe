"""Run the table of a schedule: the forward and backward passes of a pipelined model, in one manual region.

Every device does in each tick what its row of the table says, in the order

    messages arrive -> F -> head -> send onward -> B -> send back -> W

F of the first chunk begins with the embedding. The head is the loss of the last chunk and its gradient, computed along
with F. The embedding and the head belong to all ranks, each with its part of the vocabulary. W is there where the
schedule splits the backward pass (zero bubble, Qi et al. 2024, section 2); `split` cuts the backward pass of a layer. A
run of ticks with the same slots is one `lax.scan`.

Uniform schedules have nothing to branch on: a rank that has nothing to do computes on whatever is there, and the
result goes to a slot that is not read, or is masked where it would be added. In lockstep that takes no time, as the
others would be waited for. The head is the exception where only some of the ticks have one, but all ranks branch alike.
In other schedules each rank branches for itself on F, B and W, and nothing in a branch waits for another rank.

JAX does not differentiate through the ticks. F keeps the residuals of `jax.vjp` of each layer, as the activation
checkpointing policy (remat) of the layer has it, in a buffer as deep as the schedule needs; so memory does not grow
with the micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import P, lax
from jax.sharding import reshard
from jaxtyping import Array, Bool, Float, Int

from jaxdist.mesh import PIPELINE
from jaxdist.parallel import region, zero
from jaxdist.parallel.partial_trees import joined, part_of
from jaxdist.parallel.pipeline.chunk import ChunkBackward, RingsOfStacks, Work
from jaxdist.parallel.pipeline.device import Device, Program, batch_specs, get, own, put
from jaxdist.parallel.pipeline.layers import Slot
from jaxdist.parallel.pipeline.stages import BLOCKS, Stages
from jaxdist.parallel.pipeline.table import Rows, Table
from jaxdist.parallel.placement import Placements, differentiated
from jaxdist.sharding import Layout, Params, Tree, wide

SHARED = "the_same_on_all_ranks"
"""The name in a program of branches that all devices take alike."""

Carry = dict[str, Any]
"""The state of a device from tick to tick: buffers, messages and sums by name."""

READERS = {"acts": "F", "sent": "F", "cots": "B", "returned": "B", "residuals": "B", "stash": "W"}
"""Which unit reads each buffer and message of a carry; all else are sums."""

Row = Rows[Bool[Array, ""], Int[Array, ""]]
"""What the table has for one device in one tick."""

Columns = Rows[Bool[Array, "..."], Int[Array, "..."]]
"""The table on the mesh: [T, S] each, or [T] where all ranks have the same."""


@dataclass(frozen=True)
class Executor:
    """A pipelined model whose micro-batches run as `table` says.

    Weights are gathered once per step; at ZeRO stage 3 a layer's weights when F or B runs the layer. Gradients are
    accumulated in f32 and reduced once per step; from stage 2 on those of layers when B has made them, and only shards
    are kept.
    """

    table: Table
    stages: Stages
    layout: Layout
    places: Placements
    """Placements of the folded parameters."""
    aux_places: Placements
    """Placements of the layers' aux, folded as the layers are; those that are not there are not summed."""
    stage: int
    """Of ZeRO."""
    program: Program
    recompute: bool
    """Keep only the input of a chunk, and recompute the chunk when its B runs."""

    def __post_init__(self) -> None:
        if self.recompute and self.table.schedule.split:
            raise ValueError(
                f"schedule {self.table.schedule.name} splits the backward pass and keeps what both parts need, which "
                "recomputing the whole stage would undo; ask for remat block, dots or none, or for another schedule"
            )

    def gradients(
        self, weights: Params, batch: Tree, scale: Float[Array, ""] | None = None
    ) -> tuple[tuple[Float[Array, ""], Tree], Params, Tree]:
        """Return ((summed loss, further sums), its gradient in f32, aux) of a `batch` [M, B, ...].

        Gradient and aux lie as `Placement.reduced` says. The gradient is that of `scale` times the loss.
        """
        run = partial(self._run, True)
        places = differentiated(self.places, self.places), self.aux_places
        specs = P(), *jax.tree.map(lambda p: p.reduced, places)
        scales = () if scale is None else (scale,)
        return self.in_region(run, specs)(*self.arguments(weights, batch), *scales)

    def loss(self, weights: Params, batch: Tree) -> tuple[Float[Array, ""], Tree]:
        """Return (the summed loss, further sums) alone: F and head of the same table."""

        def run(rows: Columns, weights: Params, batch: Tree) -> tuple[Float[Array, ""], Tree]:
            return _of_all(self.layout, self._run(False, rows, weights, batch))

        return self.in_region(run, P())(*self.arguments(weights, batch))

    def output(self, weights: Params, batch: Tree, spec: P) -> Float[Array, "..."]:
        """Return the sum of what `program.loss` makes of the micro-batches, arrays that lie as `spec` says."""

        def run(rows: Columns, weights: Params, batch: Tree) -> Float[Array, "..."]:
            return self._run(False, rows, weights, batch)[0]

        return self.in_region(run, spec)(*self.arguments(weights, batch))

    def in_region(self, run: Callable[..., Tree], out_specs: Tree) -> Callable[..., Any]:
        """Return a function of `arguments`, and of scalars, that calls `run` with them on every device."""
        columns = jax.tree.map(_column_spec, self.table.rows)

        def call(rows: Columns, weights: Params, batch: Tree, *scalars: Float[Array, ""]) -> Any:
            specs = (columns, self._rest, batch_specs(self.layout, batch), *(P() for _ in scalars))
            return jax.shard_map(run, in_specs=specs, out_specs=out_specs)(rows, weights, batch, *scalars)

        return call

    def arguments(self, weights: Params, batch: Tree) -> tuple[Columns, Params, Tree]:
        """Return the arguments of an `in_region` function: (columns of the table, weights, batch)."""

        def on_mesh(column: np.ndarray) -> jax.Array:
            array = jnp.asarray(column)
            return reshard(array, _column_spec(column)) if column.ndim == 2 else array

        return jax.tree.map(on_mesh, self.table.rows), weights, batch

    @property
    def _rest(self) -> Tree:
        return jax.tree.map(lambda p: p.rest, self.places)

    def _run(
        self, backward: bool, rows: Columns, weights: Params, batch: Tree, scale: Float[Array, ""] | None = None
    ) -> Tree:
        """Run all ticks on one device; without `backward`, only F and the head."""
        rows = jax.tree.map(lambda a: a[:, 0] if a.ndim == 2 else a, rows)
        device = Region(self, weights, batch, backward, scale)
        carry = device.start()
        # Evaluation runs the same table without B and W.
        units = {"F", "H", "B", "W"} if backward else {"F", "H"}
        segments = [(first, end, slots & units) for first, end, slots in self.table.segments if slots & units]
        for number, (first, end, slots) in enumerate(segments):
            part = jax.tree.map(lambda a, at=slice(first, end): a[at], rows)
            always_head = bool(self.table.rows.head.on[first:end].all())
            carry = lax.scan(partial(device.tick, slots, always_head), carry, part)[0]
            if end - first == 1:
                later = frozenset().union(*(slots for *_, slots in segments[number + 1 :]))
                carry, rows = device.after_all_of(carry, rows, later)
        return device.end(carry)


def _column_spec(column: np.ndarray) -> P:
    """Return how a column of the table lies: [T, S] split over ranks, [T] on all of them."""
    return P(None, PIPELINE) if column.ndim == 2 else P()


class Region(Device):
    """One device inside the region: the methods take its carry from tick to tick."""

    def __init__(
        self, of: Executor, weights: Params, batch: Tree, backward: bool, scale: Float[Array, ""] | None = None
    ):
        super().__init__(of.program, of.stages, of.layout, of.places, of.stage)
        self.table = of.table
        self.recompute = of.recompute
        self.batch = batch
        self.differentiates = backward
        self.scale = scale
        self.uniform = self.table.schedule.uniform
        self.tops = own(self.top_places, {name: weights[name] for name in self.top_places})
        self.aux_places = of.aux_places
        self.learning_tops = differentiated(self.top_places, self.tops)
        blocks = weights[BLOCKS] if of.stage == 3 else own(self.block_places, weights[BLOCKS])
        self.blocks = jax.tree.map(lambda w: w[:, 0], blocks)
        self.at_rest = jax.tree.map(lambda w: w[:, 0], weights[BLOCKS])
        if backward:
            self.layers_backward = ChunkBackward.of(self.layers, self.example, self.table.schedule.split)

    def example(self) -> tuple[Work, jax.Array]:
        """Return what a chunk works with, and its input, for their types."""
        part = self.part(region.zeros((), jnp.int32, (PIPELINE,)))
        return self.unit(0, part), region.vary(self.program.embed(self.tops, part), self.stream)

    def start(self) -> Carry:
        """Return empty buffers and sums."""
        # Everything that the loop over ticks carries must begin with the type that it has after a tick, so the model is
        # traced for the axes over which each value varies.
        part = self.part(region.zeros((), jnp.int32, (PIPELINE,)))
        x = jax.eval_shape(lambda: region.vary(self.program.embed(self.tops, part), self.stream))
        depths = self.table.slots

        def ring(name: str) -> jax.Array:
            return region.zeros_like(x, (depths[name],))

        def loss_of_zeros() -> tuple[jax.Array, Tree]:
            last = region.add_up(region.zeros_like(x), (PIPELINE,))
            return self.program.loss(self.tops, last, self.part(jnp.zeros((), jnp.int32)))

        def sums(places: Placements, weights: Tree) -> Tree:
            # What is not summed over the replicas differs from one to the next.
            return jax.tree.map(
                lambda p, w: region.zeros(w.shape, wide(w.dtype), region.varying(w) | p.deferred),
                differentiated(places, places),
                differentiated(places, weights),
            )

        # Sums begin with zeros; all else is written before it is read, whatever `zeros_like` has put there.
        shapes = jax.eval_shape(loss_of_zeros)
        loss = jax.tree.map(lambda a: region.zeros(a.shape, a.dtype, a.manual_axis_type.varying), shapes)
        carry: Carry = dict(acts=ring("acts"), sent=region.zeros_like(x), loss=loss)
        if not self.differentiates:
            return carry
        # From ZeRO 2 on, B reduces the gradients of layers, and shards of them are summed.
        blocks = self.at_rest if self.stage >= 2 else self.blocks
        carry |= dict(cots=ring("cots"), returned=region.zeros_like(x))
        carry |= dict(blocks=sums(self.block_places, blocks), tops=sums(self.top_places, self.tops))
        unit = self.unit(0, part)
        x = region.zeros_like(x)
        carry["aux"] = self._summed(self.layers.aux(unit, x, (self.stages.virtual,)))
        if self.recompute:
            carry["residuals"] = region.zeros_like(x, (depths["residuals"],))
        else:
            carry["residuals"] = self.layers_backward.kept(depths["residuals"])
        if self.table.schedule.split:
            carry["stash"] = self.layers_backward.stash(depths["stash"])
        return carry

    def after_all_of(self, carry: Carry, rows: Columns, later: frozenset[str]) -> tuple[Carry, Columns]:
        """Return the carry after a tick, and the rows of the table: on CPUs, what is read of them waits for all of it.

        XLA writes a loop of one turn out, and what follows would wait for what it needs of the tick alone. `later` are
        the slots of the ticks that follow.
        """
        sums = {name: a for name, a in carry.items() if name not in READERS}
        # XLA does not send what nobody reads, and this must not change that.
        read = {name: carry[name] for name, unit in READERS.items() if unit in later and name in carry}
        # Buffers are not copied: whoever reads them waits for the index.
        sums, rows = self.together((sums, rows), read)
        return carry | sums, rows

    def tick(self, slots: frozenset[str], always_head: bool, carry: Carry, row: Row) -> tuple[Carry, None]:
        """Run one row of the table; `always_head`: the last chunk runs F in every tick of this segment."""
        carry = carry | {"acts": put(carry["acts"], carry["sent"], row.arrivals.act)}
        if self.differentiates:
            carry |= {"cots": put(carry["cots"], carry["returned"], row.arrivals.cot)}
        # On CPUs each unit waits for the one before it: see `region.after`.
        before: tuple[jax.Array, ...] = ()
        if "F" in slots:
            carry, y = self.forward(carry, row)
            if "H" in slots:
                carry = self.head(carry, row, y, always_head)
            carry |= {"sent": lax.ppermute(y, PIPELINE, self.onward)}
            before = self.awaited(y, carry["loss"][0])
        if "B" in slots:
            carry, dx = self.backward(carry, row, before)
            carry, done = self.unembed(carry, row, dx)
            carry |= {"returned": lax.ppermute(dx, PIPELINE, self.back)}
            before = self.awaited(dx, done)
        if "W" in slots:
            carry = self.weight(carry, row, before)
        return carry, None

    def forward(self, carry: Carry, row: Row) -> tuple[Carry, jax.Array]:
        """Run F of a chunk; return the carry and the output of the chunk."""
        unit = self.unit(row.F.chunk, self.part(row.F.micro))

        def run(residuals: Tree, sums: Tree, x: jax.Array) -> tuple[Tree, Tree, jax.Array]:
            if not self.differentiates:
                return residuals, sums, self.layers.forward(unit, x)[0]
            if self.recompute:
                residuals = put(residuals, x, row.F.res)
                y, aux = self.layers.forward(unit, x)
            else:
                residuals, y, aux = self.layers.forward_keeping(unit, x, residuals, row.F.res)
            return residuals, self._add_aux(sums, self._summed(aux), unit.chunk, row.F.on), y

        x = self.embed(row, get(carry["acts"], row.F.act))
        residuals, aux, y = self._own(row.F.on, run, carry.get("residuals"), carry.get("aux"), x)
        if self.differentiates:
            carry = carry | {"residuals": residuals, "aux": aux}
        return carry, y

    def _summed(self, aux: Tree) -> Tree:
        """Return what is summed of aux."""
        return {name: aux[name] for name in self.aux_places}

    def _add_aux(self, sums: Tree, aux: Tree, chunk: Slot, on: jax.Array) -> Tree:
        """Return `sums` with the aux of a chunk's layers, if it is `on`."""

        def add(total: jax.Array, a: jax.Array) -> jax.Array:
            # A `where`, not a product: what is masked may be NaN.
            own = jnp.where(on, a, jnp.zeros((), a.dtype)).astype(total.dtype)
            return put(total, get(total, chunk) + own, chunk)

        return jax.tree.map(add, sums, aux)

    def embed(self, row: Row, x: jax.Array) -> jax.Array:
        """Return the input of a chunk: the embedding for the first chunk, `x` for others."""

        def run(x: jax.Array) -> jax.Array:
            return jnp.where(row.F.first, self.program.embed(self.tops, self.part(row.embed.micro)), x)

        return self._shared(row.embed.on, self.uniform, run, x)

    def head(self, carry: Carry, row: Row, y: jax.Array, always: bool) -> Carry:
        """Run the head: all ranks together compute the loss of the micro-batch that leaves the last chunk.

        Its gradient goes to the last rank's `cots`.
        """

        def loss_of(tops: Params, x: jax.Array) -> tuple[jax.Array, Tree]:
            return self.program.loss(joined(self.tops, tops), x, self.part(row.head.micro))

        def run(sums: Carry) -> Carry:
            # Only one rank has run the last chunk: the sum brings its output to all ranks.
            last = region.add_up(jnp.where(row.F.last, y, jnp.zeros((), y.dtype)), (PIPELINE,))
            if not self.differentiates:
                return sums | {"loss": _add(sums["loss"], loss_of({}, last))}
            loss, vjp, further = jax.vjp(loss_of, self.learning_tops, last, has_aux=True)
            scale = jnp.ones_like(loss) if self.scale is None else self.scale.astype(loss.dtype)
            tops, dy = vjp(region.vary(scale, region.varying(loss)))
            cots = put(sums["cots"], region.vary(dy, self.stream), row.F.cot)
            return {
                "loss": _add(sums["loss"], (loss, further)),
                "tops": _add(sums["tops"], tops),
                "cots": cots,
            }

        names = ("loss", "tops", "cots") if self.differentiates else ("loss",)
        return carry | self._shared(row.head.on, always, run, {name: carry[name] for name in names})

    def backward(self, carry: Carry, row: Row, before: tuple[jax.Array, ...]) -> tuple[Carry, jax.Array]:
        """Run B of a chunk, after all of `before` is there; return the carry and the gradient of the chunk's input.

        Where the schedule splits the backward pass, B leaves what W needs in the stash; else it adds the gradients of
        the weights.
        """
        unit = self.unit(row.B.chunk, self.part(row.B.micro))
        kept: tuple[Tree, Slot] = (carry["residuals"], row.B.res)

        def whole(sums: Tree, dy: jax.Array) -> tuple[Tree, jax.Array]:
            if self.recompute:
                # What was kept is the input of the chunk.
                rings, slot = self.layers_backward.again(unit, region.after(get(*kept), *before))
                # A layer that is alone in its chunk may begin with its backward pass while it is made again.
                rings = self.together(rings)
                return self.layers_backward.backward(unit, dy, rings, slot, sums, row.B.on)
            # A layer that is alone in its chunk may recompute some of it, for which it does not need `dy`.
            return self.layers_backward.backward(unit, dy, *kept, sums, row.B.on, before)

        def half(stash: RingsOfStacks, dy: jax.Array) -> tuple[RingsOfStacks, jax.Array]:
            return self.layers_backward.of_input(unit, dy, *kept, stash, row.B.wst, before)

        dy = get(carry["cots"], region.after(row.B.cot, *before))
        if self.table.schedule.split:
            stash, dx = self._own(row.B.on, half, carry["stash"], dy)
            return carry | {"stash": stash}, dx
        blocks, dx = self._own(row.B.on, whole, carry["blocks"], dy)
        return carry | {"blocks": blocks}, dx

    def unembed(self, carry: Carry, row: Row, dx: jax.Array) -> tuple[Carry, jax.Array]:
        """Run B of the embedding, where the chunk is the first; return the carry and a number that is there then."""

        def one_number(a: jax.Array) -> jax.Array:
            return region.vary(a[(0,) * a.ndim], self.stream)

        if not self.learning_tops:
            return carry, one_number(dx)

        def embed(tops: Params) -> jax.Array:
            return self.program.embed(joined(self.tops, tops), self.part(row.unembed.micro))

        def run(state: tuple[Params, jax.Array]) -> tuple[Params, jax.Array]:
            sums, _ = state
            first = region.add_up(jnp.where(row.B.first, dx, jnp.zeros((), dx.dtype)), (PIPELINE,))
            x, vjp = jax.vjp(embed, self.learning_tops)
            # A gradient of zeros, where no rank has the first chunk.
            grads = vjp(region.vary(first, region.varying(x)))[0]
            done = one_number(first)
            if self.uniform:  # on CPUs: where ranks go their own ways, nothing waits for `done`
                # The gradient moves too, where the sequence is split: W must not begin as soon as `first` is there.
                done = region.after(done, *jax.tree.leaves(grads))
            return _add(sums, grads), done

        state = (carry["tops"], one_number(dx))
        tops, done = self._shared(row.unembed.on, self.uniform, run, state)
        return carry | {"tops": tops}, done

    def weight(self, carry: Carry, row: Row, before: tuple[jax.Array, ...]) -> Carry:
        """Run W of a chunk, after all of `before` is there."""
        unit = self.unit(row.W.chunk, self.part(row.W.micro))

        def run(sums: Tree) -> tuple[Tree]:
            return (self.layers_backward.of_weights(unit, carry["stash"], row.W.wst, sums, row.W.on, before),)

        (blocks,) = self._own(row.W.on, run, carry["blocks"])
        return carry | {"blocks": blocks}

    def _own(self, on: jax.Array, run: Callable[..., Any], *state: Tree) -> tuple[Tree, ...]:
        """Return `run(*state)` where this rank has the unit.

        Uniform schedules run it wherever some rank has it: the result is masked, or goes where it is not read. In
        others each rank takes its own branch.
        """
        if self.uniform:
            return run(*state)
        return self.alone(on, run, *state)

    def _shared(self, on: jax.Array, always: bool, run: Callable[[Tree], Tree], state: Tree) -> Tree:
        """Return `run(state)` in ticks that are `on`, or in `always` all of them, on all ranks together.

        All ranks have the same `on`, as its type says, and so take the same branch: collectives of any group are legal
        in it, over the pipeline too.
        """
        if always:
            return run(state)
        assert not region.varying(on)
        with jax.named_scope(SHARED):
            return lax.cond(on, run, lambda state: state, state)

    def end(self, carry: Carry) -> Tree:
        """Return the loss and further sums, or these, gradients and aux, with what is left to reduce once per step.

        Sums over the replicas stay partial: `zero.cross` adds them up.
        """
        if not self.differentiates:
            return carry["loss"]
        loss = _of_all(self.layout, carry["loss"])
        blocks = jax.tree.map(lambda g: g[:, None], carry["blocks"])
        if self.stage < 2:  # from stage 2 on, B has reduced them
            blocks = _reduced(part_of(self.block_places, blocks), blocks)
        tops = _reduced(part_of(self.top_places, carry["tops"]), carry["tops"])
        grads = tops | ({BLOCKS: blocks} if blocks else {})
        aux = _reduced(self.aux_places, jax.tree.map(lambda a: a[:, None], carry["aux"]))
        sums = grads, aux
        places = part_of(self.places, grads), self.aux_places
        return loss, *jax.tree.map(lambda p, g: region.partial_sum(g, p.deferred), places, sums)

    def part(self, micro: jax.Array) -> Tree:
        """Return one micro-batch."""
        return get(self.batch, micro)

    def unit(self, chunk: jax.Array | int, part: Tree) -> Work:
        """Return what F, B or W works with, for one of this rank's chunks and a micro-batch."""
        if self.stages.virtual == 1:
            # A constant, so that the only chunk is not looked up in each tick.
            chunk = 0
        return Work(chunk, get(self.blocks, chunk), part)


def _add(sums: Tree, values: Tree) -> Tree:
    return jax.tree.map(lambda s, x: s + x.astype(s.dtype), sums, values)


def _of_all(layout: Layout, sums: Tree) -> Tree:
    """Return sums of all devices from each one's own parts."""
    return jax.tree.map(lambda a: region.add_up(a, layout.tokens_over), sums)


def _reduced(places: Tree, grads: Tree) -> Tree:
    return jax.tree.map(zero.reduce_manual, places, grads)
