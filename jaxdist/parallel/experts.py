"""Expert parallelism: send each token to the experts it has chosen, wherever they are, and add up what they return.

The devices along `expert` hold different experts of every layer (GShard, Lepikhin et al. 2021, section 3.2). A token
has k choices; the T k choices of a device wait in a queue for each of the E experts. In one round each device

    takes    the next C rows of every queue                     [T, D] -> [n C, E/n, D]
    sends    those of other devices' experts (all-to-all)       [n C, E/n, D] -> [n C, E/n, D]
    computes its own experts, each on its own rows              [n C, E/n, D] -> [n C, E/n, D]
    returns  the results (all-to-all), and adds up the k of each token

The first dim counts devices before rows: what goes to one device lies together, and so does what comes from one. A
matmul takes the experts in the second dim as they lie, so that nothing is ever transposed.

C is fixed, so all shapes are; what has no room in the first round takes further ones of C/4, until no queue of any
device is left. No token is ever dropped: capacity decides how long a step takes and nothing else, so the result is the
same on every mesh. Taking and adding up are both gathers, each the transpose of the other: there is no scatter, and
sums have one order.

All of it runs in a manual region, on arrays of one device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import P, lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from jaxdist.mesh import EXPERT, PIPELINE, REPLICA
from jaxdist.parallel import float8, matmul, region
from jaxdist.parallel.tensor import PRODUCT
from jaxdist.sharding import Layout, Tree, spread, wide

ROUTING = "routing"
"""The checkpoint name of the chosen experts and of the loads of rows.

Every policy of activation checkpointing saves them."""

ALIGNED = 8
"""Rows of a round are a multiple of this, which suits the tiles of a matmul."""

FURTHER = 4
"""A further round has the rows of the first one divided by this: a whole round for a few tokens would double the work.
"""


class Rounds(NamedTuple):
    """How many rows of each queue a round takes, from each device."""

    first: int
    """C"""
    further: int


def rounds_for(tokens: int, per_token: int, experts: int, factor: float) -> Rounds:
    """Return the rounds of a device with T `tokens`, each of which chooses `per_token` (k) of E `experts`.

    The first round has room for `factor` times the even share, T k / E.
    """
    first = _aligned(tokens * per_token / experts * factor)
    return Rounds(first, _aligned(first / FURTHER))


def _aligned(rows: float) -> int:
    return max(1, -int(-rows // ALIGNED)) * ALIGNED


class Queues(NamedTuple):
    """The choices of one device's tokens, in a queue for each expert."""

    choice: Int[Array, "T k"]
    """The experts of each token."""
    order: Int[Array, " Tk"]
    """All choices, numbered token by token, in the order of their experts."""
    start: Int[Array, " E"]
    """Where in `order` each queue begins."""
    length: Int[Array, " E"]
    place: Int[Array, "T k"]
    """The place of each choice in its queue."""


def queues(choice: Int[Array, "T k"], experts: int) -> Queues:
    """Line up the choices of tokens before `experts` experts; a choice of `experts`, one beyond the last, is none."""
    flat = choice.reshape(-1)
    order = jnp.argsort(flat, stable=True)
    length = jnp.sum(flat[:, None] == jnp.arange(experts)[None], 0)
    start = jnp.cumsum(length) - length
    numbers = jnp.arange(len(flat), dtype=flat.dtype)
    rank = jnp.zeros_like(flat).at[order].set(numbers, unique_indices=True)
    return Queues(choice, order, start, length, (rank - start[flat]).reshape(choice.shape))


class Seats(NamedTuple):
    """Who sits where in the seats of one round: tokens, each in up to m = k seats, or choices, in m = 1.

    There are [R, E/n] seats, R = n C: for each of n devices C rows, and in each row a seat for each of its experts.
    """

    sitter: Int[Array, "R E"]
    """Who sits in each seat."""
    taken: Bool[Array, "R E"]
    """Whether anybody does."""
    seat: Int[Array, "T m"]
    """The seats of each sitter; -1 in the place of seats of other rounds."""


def seats(line: Queues, first: int | Int[Array, ""], size: int, devices: int = 1) -> tuple[Seats, Seats]:
    """Seat the `size` choices of each queue that begin at its place `first`; `devices` devices share the experts.

    Return (the seats of tokens, the seats of choices).
    """
    own = len(line.length) // devices
    expert = own * jnp.arange(devices)[:, None, None] + jnp.arange(own)[None, None]
    turn = first + jnp.arange(size)[None, :, None]
    at = jnp.clip(line.start[expert] + turn, 0, len(line.order) - 1).reshape(-1, own)
    taken = (turn < line.length[expert]).reshape(-1, own)
    choice = line.order[at]
    sits = (line.place >= first) & (line.place < first + size) & (line.choice < len(line.length))
    device, number = jnp.divmod(line.choice, own)
    seat = jnp.where(sits, (device * size + line.place - first) * own + number, -1)
    per_token = seat.shape[1]
    return Seats(choice // per_token, taken, seat), Seats(choice, taken, seat.reshape(-1, 1))


@jax.custom_vjp
def take(x: Float[Array, "T D"], at: Seats) -> Float[Array, "R E D"]:
    """Return the row of `x` for each seat: its sitter's, or zeros where it is empty."""
    return jnp.where(at.taken[..., None], x[at.sitter], 0)


@jax.custom_vjp
def add_up(y: Float[Array, "R E D"], at: Seats) -> Float[Array, "T D"]:
    """Return the sum of each sitter's seats, added in f32 at least."""
    rows = y.reshape(-1, y.shape[-1])
    total = jnp.zeros((), wide(y.dtype))
    for seat in at.seat.T:
        total = total + jnp.where(seat[:, None] >= 0, rows[seat], 0).astype(total.dtype)
    return total.astype(y.dtype)


take.defvjp(lambda x, at: (take(x, at), at), lambda at, g: (add_up(g, at), None))
add_up.defvjp(lambda y, at: (add_up(y, at), at), lambda at, g: (take(g, at), None))


def grouped(layout: Layout, dims: str, x: Float[Array, "R E _"], w: Float[Array, "E _ _"]) -> Float[Array, "R E _"]:
    """Multiply the rows of each expert by its own weight, as the einsum string `dims` says: "RED,EDG->REG"."""
    # Where rows differ from device to device, so do the gradients of the weight, until they are reduced.
    axes = region.varying(x, w)
    x = region.vary(x, axes)
    w = region.vary(w, axes)
    if layout.platform != "cpu":
        return checkpoint_name(_product(layout, dims, x, w), PRODUCT)
    # XLA:CPU multiplies fast only where the experts come first.
    experts_first = dims.replace("RE", "ER")
    y = checkpoint_name(_product(layout, experts_first, jnp.swapaxes(x, 0, 1), w), PRODUCT)
    return jnp.swapaxes(y, 0, 1)


def _shifted(rows: Float[Array, "R E G"], bias: Float[Array, "E G"]) -> Float[Array, "R E G"]:
    """Return the rows of each expert plus its bias."""
    return rows + spread(region.vary(bias, region.varying(rows, bias)), rows)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _product(layout: Layout, dims: str, x: jax.Array, w: jax.Array) -> jax.Array:
    return _dot(layout, dims, *float8.of_operands(layout, x, w))


def _dot(layout: Layout, dims: str, a: jax.Array, b: jax.Array) -> jax.Array:
    out = dims.split("->")[1]
    return matmul.dot(layout, dims, a, b, P(*(None for _ in out)))


def _product_backward(
    layout: Layout, dims: str, saved: tuple[jax.Array, jax.Array], g: jax.Array
) -> tuple[jax.Array, jax.Array]:
    # Written out, because the one that JAX derives makes gradients of weights in another order of dims.
    x, w = float8.of_operands(layout, *saved)
    g = float8.of_gradient(layout, g)
    operands, out = dims.split("->")
    x_dims, w_dims = operands.split(",")
    with float8.backward_sums(layout):
        dx = _dot(layout, f"{out},{w_dims}->{x_dims}", g, w)
        return dx, _dot(layout, f"{x_dims},{out}->{w_dims}", x, g)


_product.defvjp(lambda layout, dims, x, w: (_product(layout, dims, x, w), (x, w)), _product_backward)


class ExpertWeights(NamedTuple):
    """The weights of a device's experts."""

    gate_up: Float[Array, "E D 2 F"]
    down: Float[Array, "E F D"]
    gate_up_bias: Float[Array, "E 2 F"] | None = None


@dataclass(frozen=True)
class Dispatch:
    """The experts of one layer, on one device of a manual region."""

    layout: Layout
    rounds: Rounds
    gating: Callable[[jax.Array, jax.Array], jax.Array]
    """What each expert makes of its gate, and of what it gates."""
    alone: bool = True
    """Whether the region is that of this layer alone, and not a pipeline's, which may put off gradients of weights."""

    def __call__(
        self,
        x: Float[Array, "T D"],
        p: Float[Array, "T k"],
        choice: Int[Array, "T k"],
        w: ExpertWeights,
    ) -> tuple[Float[Array, "T D"], Int[Array, ""]]:
        """Return (what the chosen experts make of each token, weighted by `p`; the number of rounds it took).

        The former is a partial sum over the axes that split F. The weights are this device's experts, of E x n in all.
        """
        experts = len(w.down) * self.layout.size(EXPERT)
        # Experts without biases make zeros of zeros. A pipeline has many, where it is idle or its stages are padded,
        # and all of them would wait for the same experts.
        if w.gate_up_bias is None:
            choice = jnp.where(jnp.any(x != 0, -1, keepdims=True), choice, experts)
        line = queues(choice, experts)
        # As a matrix, XLA takes it as it lies, in the loop too. Of three dims it would make a copy in another order.
        w = w._replace(gate_up=w.gate_up.reshape(*w.gate_up.shape[:2], -1))
        over = jnp.maximum(jnp.max(line.length) - self.rounds.first, 0)
        further = -(-over // self.rounds.further)
        # Devices that exchange rows, and those beside them on fast links, take equally many rounds. The ranks of a
        # pipeline are in other layers.
        together = region.outermost_first(region.varying(further) - {PIPELINE, REPLICA})
        if together:
            further = lax.pmax(further, together)
        rest, *arrays = further_rounds(self, line, further, x, p, w)
        # The first round comes last, and its backward pass first, so that no two exchanges ever run at once.
        line = line._replace(start=region.after(line.start, rest))
        return self.one_round(line, 0, self.rounds.first, *arrays) + rest, 1 + further

    @partial(
        jax.checkpoint,
        prevent_cse=False,
        policy=jax.checkpoint_policies.save_only_these_names(PRODUCT),
        static_argnums=(0, 3),
    )
    def one_round(
        self,
        line: Queues,
        first: int | Int[Array, ""],
        size: int,
        x: Float[Array, "T D"],
        p: Float[Array, "T k"],
        w: ExpertWeights,
    ) -> Float[Array, "T D"]:
        """Return what the experts add to each token in the round of `size` rows from place `first` of each queue.

        G = 2 F: the columns of `w.gate_up`, [E, D, G] here, are first the gates, then the columns that they gate.

        The rows are sent again in the backward pass: f k of them for each token are much to keep.
        """
        tokens, choices = seats(line, first, size, self.layout.size(EXPERT))
        rows = self._exchange(take(x, tokens))
        weight = self._exchange(take(p.reshape(-1, 1), choices))
        products = grouped(self.layout, "RED,EDG->REG", rows, w.gate_up)
        if w.gate_up_bias is not None:
            products = _shifted(products, w.gate_up_bias.reshape(len(w.down), -1))
        gate, up = jnp.split(products, 2, -1)
        # Weighted before the second product, whose result the backward pass then does not need.
        h = self.gating(gate, up) * weight
        return add_up(self._exchange(grouped(self.layout, "REF,EFD->RED", h, w.down)), tokens)

    def _exchange(self, rows: Float[Array, "R E D"]) -> Float[Array, "R E D"]:
        """Exchange rows for other devices' experts for other devices' rows for this device's experts, or back."""
        if self.layout.size(EXPERT) == 1:
            return rows
        return lax.all_to_all(rows, EXPERT, split_axis=0, concat_axis=0, tiled=True)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def further_rounds(
    dispatch: Dispatch,
    line: Queues,
    count: Int[Array, ""],
    x: Float[Array, "T D"],
    p: Float[Array, "T k"],
    w: ExpertWeights,
) -> tuple[Float[Array, "T D"], jax.Array, jax.Array, ExpertWeights]:
    """Return what the experts add to each token in the `count` rounds after the first, zeros if that had room for all.

    The last three are returned too, for the first round: the backward pass can then wait for its gradients.

    A loop of unknown length has no derivative of its own. This one is a sum, and so are its derivatives.
    """
    return _sum(count, lambda i: _further(dispatch, line, i)(x, p, w)), x, p, w


def _further(dispatch: Dispatch, line: Queues, i: Int[Array, ""]) -> Callable[..., jax.Array]:
    """Return the further round number `i`, as a function of tokens and weights."""
    first, size = dispatch.rounds
    return lambda *arrays: dispatch.one_round(line, first + i * size, size, *arrays)


def _sum(count: Int[Array, ""], term: Callable[[Int[Array, ""]], Tree]) -> Tree:
    """Return the sum of `term(i)` for all i below `count`, added in f32 at least."""
    like = jax.eval_shape(lambda: term(jnp.zeros((), count.dtype)))
    zeros = jax.tree.map(lambda a: region.zeros(a.shape, wide(a.dtype), a.manual_axis_type.varying), like)

    def add(carry: tuple[jax.Array, Tree]) -> tuple[jax.Array, Tree]:
        i, total = carry
        return i + 1, jax.tree.map(lambda t, a: t + a.astype(t.dtype), total, term(i))

    _, total = lax.while_loop(lambda carry: carry[0] < count, add, (jnp.zeros((), count.dtype), zeros))
    return jax.tree.map(lambda t, a: t.astype(a.dtype), total, like)


def _further_forward(dispatch: Dispatch, *inputs: Tree) -> tuple[Tree, Tree]:
    return further_rounds(dispatch, *inputs), inputs


def _further_backward(dispatch: Dispatch, inputs: Tree, gradients: Tree) -> tuple[Tree, ...]:
    # Two loops, each of which sends the rows, so that a pipeline may put off that of the weights' gradients. They come
    # one after the other, after the first round's, and before what follows (`region.after`).
    line, count, x, p, w = inputs
    g, *of_first = gradients
    first_ones = jax.tree.leaves(of_first)

    def of_tokens(i: jax.Array) -> Tree:
        turn = _further(dispatch, line, i)
        return jax.vjp(lambda x, p: turn(x, p, w), x, p)[1](g)

    def of_weights(i: jax.Array) -> Tree:
        turn = _further(dispatch, line, i)
        return jax.vjp(lambda w: turn(x, p, w), w)[1](g)

    # In a pipeline the gradients of tokens must not wait for the gradients of weights.
    awaited = first_ones if dispatch.alone else of_first[:2]
    tokens = _sum(region.after(count, *awaited), of_tokens)
    weights = _sum(region.after(count, *tokens, *first_ones), of_weights)
    dx, dp, dw = jax.tree.map(jnp.add, of_first, [*tokens, *weights])
    if dispatch.alone:
        dx = region.after(dx, *jax.tree.leaves(dw))
    return None, None, dx, dp, dw


further_rounds.defvjp(_further_forward, _further_backward)
