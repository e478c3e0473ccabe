"""Context parallelism: attention where the devices along `context` hold parts of each row.

Ring attention (Liu et al. 2023) on zigzag chunks (`context.zigzag`): device i of n has the chunks i and 2n - 1 - i of
2n. Keys and values go round; when those of device j arrive, exactly two of the four half-blocks are seen in full,
whichever j it is:

    A = (second queries, first keys)            always
    B = (first queries, first keys)             where j is an earlier device
        (second queries, second keys)           where j is a later one

So half of the square is computed, all devices have equally much to do, and none of them branches: a `where` picks the
operands of B. The backward pass sends keys and values round once more, and the sums of their gradients one step
behind them, until these are home. A device holds keys and values of one other at a time, so memory does not grow with
n.

Ulysses (Jacobs et al. 2023): an all-to-all gives each device whole rows of a part of the heads, and a second one takes
the results back.

All of it runs in a manual region, on arrays of one device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxdist.context import repeated_heads
from jaxdist.mesh import CONTEXT
from jaxdist.sharding import Tree

Starts = Int[Array, "B S"] | None
"""Where in its row the document of each position starts; None: a row is one document."""


class Queries(NamedTuple):
    """The queries of a chunk, or of both of a device's chunks one after the other."""

    q: Float[Array, "B S N H"]
    at: Int[Array, " S"]
    """Their positions in the row."""
    starts: Starts


class Keys(NamedTuple):
    """Keys and values."""

    k: Float[Array, "B T K H"]
    v: Float[Array, "B T K H"]
    at: Int[Array, " T"]
    """Their positions in the row."""


class Attended(NamedTuple):
    """What queries have found among some of the keys that they see."""

    out: Float[Array, "B S N H"]
    sums: Float[Array, "B S N"]
    """The log sum exp of the scores, in f32 at least; -inf where no key was seen."""


class Gradients(NamedTuple):
    """The gradients of a block, those of keys and values in f32 at least."""

    q: Float[Array, "B S N H"]
    k: Float[Array, "B T K H"]
    v: Float[Array, "B T K H"]


class Blocks(Protocol):
    """A kernel: attention of some queries to some keys."""

    def own(self, queries: Queries, keys: Keys) -> Attended:
        """Attend causally to the device's own keys."""

    def visit(self, queries: Queries, keys: Keys) -> Attended:
        """Attend to a chunk that is all earlier: only documents and a window hide keys."""

    def own_gradients(self, queries: Queries, keys: Keys, found: Attended, g: Float[Array, "B S N H"]) -> Gradients:
        """Return the gradients of `own`, where `found` is what queries have found among the keys of all devices."""

    def visit_gradients(self, queries: Queries, keys: Keys, found: Attended, g: Float[Array, "B S N H"]) -> Gradients:
        """Return the gradients of `visit`, as `own_gradients` does."""


def join(a: Attended, b: Attended) -> Attended:
    """Return what queries have found among the keys of both (Dao 2023, section 2.3)."""
    sums = jnp.logaddexp(a.sums, b.sums)
    # A row that has seen nothing has the sum -inf, and no share of anything.
    known = jnp.where(sums == -jnp.inf, 0, sums)

    def share(part: Attended) -> jax.Array:
        return part.out.astype(sums.dtype) * jnp.exp(part.sums - known)[..., None]

    return Attended(share(a) + share(b), sums)


@dataclass(frozen=True)
class Ring:
    """Ring attention over n = `ranks` devices."""

    ranks: int
    blocks: Blocks
    unroll: bool = False
    """Whether the steps are written out, and not a loop."""

    def attend(self, queries: Queries, keys: Keys) -> Attended:
        """Return what this device's queries find among the keys of all devices, `out` in the dtype of the values."""
        dtype = keys.v.dtype
        coming = self._onward(keys)
        one, two = halves(self._wide(self.blocks.own(queries, keys)))
        first, second = halves(queries)

        def visit(found: tuple[Attended, Attended], keys: Keys, step: Int[Array, ""]) -> tuple[Attended, Attended]:
            one, two = found
            pick = partial(_pick, self._earlier(step))
            keys1, keys2 = halves(keys)
            two = join(two, self.blocks.visit(second, keys1))
            new = join(pick(one, two), self.blocks.visit(pick(first, second), pick(keys1, keys2)))
            return pick(new, one), pick(two, new)

        def step(
            carry: tuple[Keys, tuple[Attended, Attended]], number: Int[Array, ""]
        ) -> tuple[tuple[Keys, tuple[Attended, Attended]], None]:
            keys, found = carry
            # Sent before they are used: so the next keys travel while these are worked on.
            coming = self._onward(keys)
            return (coming, visit(found, keys, number)), None

        keys, found = self._loop(step, (coming, (one, two)))
        found = joined(*visit(found, keys, jnp.asarray(self.ranks - 1)))
        return Attended(found.out.astype(dtype), found.sums)

    def gradients(self, queries: Queries, keys: Keys, found: Attended, g: Float[Array, "B S N H"]) -> Gradients:
        """Return the gradients of queries, keys and values where `g` is that of the result."""
        coming = self._onward(keys)
        dq, dk, dv = self.blocks.own_gradients(queries, keys, found, g)
        dq = dq.astype(dk.dtype)
        of_first, of_second = halves((queries, found, g))

        def visit(keys: Keys, step: Int[Array, ""]) -> Gradients:
            pick = partial(_pick, self._earlier(step))
            keys1, keys2 = halves(keys)

            def gradients(of: Tree, keys: Keys) -> Gradients:
                queries, found, g = of
                made = self.blocks.visit_gradients(queries, keys, found, g)
                return Gradients(made.q.astype(made.k.dtype), made.k, made.v)

            a = gradients(of_second, keys1)
            b = gradients(pick(of_first, of_second), pick(keys1, keys2))

            def placed(in_a: jax.Array, a_is_first: bool, in_b: jax.Array) -> jax.Array:
                zeros = jnp.zeros_like(in_b)
                parts = [pick(in_b, zeros), pick(zeros, in_b)]
                place = 0 if a_is_first else 1
                parts[place] = parts[place] + in_a
                return jnp.concatenate(parts, axis=1)

            return Gradients(placed(a.q, False, b.q), placed(a.k, True, b.k), placed(a.v, True, b.v))

        def step(
            carry: tuple[Keys, tuple[jax.Array, jax.Array], jax.Array], number: Int[Array, ""]
        ) -> tuple[tuple[Keys, tuple[jax.Array, jax.Array], jax.Array], None]:
            keys, sums, dq = carry
            coming = self._onward(keys)
            dk, dv = self._onward(sums)
            made = visit(keys, number)
            return (coming, (dk + made.k, dv + made.v), dq + made.q), None

        keys, sums, dq = self._loop(step, (coming, (dk, dv), dq))
        dk, dv = self._onward(sums)
        made = visit(keys, jnp.asarray(self.ranks - 1))
        # The sums are complete: they go home in the dtype of keys and values.
        dk, dv = self._onward(((dk + made.k).astype(keys.k.dtype), (dv + made.v).astype(keys.v.dtype)))
        return Gradients((dq + made.q).astype(queries.q.dtype), dk, dv)

    def _loop(self, step: Callable[..., tuple[Tree, None]], carry: Tree) -> Tree:
        """Run all steps but the last one, after which nothing is sent on."""
        if self.ranks == 2:
            return carry
        return lax.scan(step, carry, jnp.arange(1, self.ranks - 1), unroll=self.unroll)[0]

    def _earlier(self, step: Int[Array, ""]) -> jax.Array:
        """Return whether the keys that are here at this step are those of an earlier device."""
        rank = lax.axis_index(CONTEXT)
        return (rank - step) % self.ranks < rank

    def _onward(self, x: Tree) -> Tree:
        """Send each device's `x` to the next one."""
        ring = [(i, (i + 1) % self.ranks) for i in range(self.ranks)]
        return jax.tree.map(partial(lax.ppermute, axis_name=CONTEXT, perm=ring), x)

    def _wide(self, found: Attended) -> Attended:
        return Attended(found.out.astype(found.sums.dtype), found.sums)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def with_gradient(ring: Ring, queries: Queries, keys: Keys, found: Attended) -> Float[Array, "B S N H"]:
    """Return what `ring.attend` has `found`, whose gradient goes to queries, keys and values."""
    return found.out


def _with_gradient_forward(
    ring: Ring, queries: Queries, keys: Keys, found: Attended
) -> tuple[jax.Array, tuple[Queries, Keys, Attended]]:
    return found.out, (queries, keys, found)


def _with_gradient_backward(
    ring: Ring, saved: tuple[Queries, Keys, Attended], g: jax.Array
) -> tuple[Queries, Keys, None]:
    dq, dk, dv = ring.gradients(*saved, g)
    no_gradient: Any = None
    return Queries(dq, no_gradient, None), Keys(dk, dv, no_gradient), None


with_gradient.defvjp(_with_gradient_forward, _with_gradient_backward)


def halves(tree: Tree) -> tuple[Tree, Tree]:
    """Cut the tokens of every array in two; they are its first dim if it has one dim, else its second."""

    def cut(a: jax.Array) -> list[jax.Array]:
        return jnp.split(a, 2, axis=min(a.ndim - 1, 1))

    pairs = jax.tree.map(cut, tree)
    return tuple(jax.tree.transpose(jax.tree.structure(tree), jax.tree.structure([0, 0]), pairs))


def joined(one: Tree, two: Tree) -> Tree:
    """Undo `halves`, for arrays of at least two dims."""
    return jax.tree.map(lambda a, b: jnp.concatenate([a, b], axis=1), one, two)


def _pick(condition: jax.Array, yes: Tree, no: Tree) -> Tree:
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), yes, no)


def ulysses(
    attend: Callable[[jax.Array, jax.Array, jax.Array, Starts], Float[Array, "B S N H"]],
    q: Float[Array, "B S N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    starts: Starts,
    saved: Callable[[jax.Array], jax.Array],
) -> Float[Array, "B S N H"]:
    """Attend with `attend`, which takes whole rows; `saved` marks what activation checkpointing may keep.

    Where the devices do not divide the key/value heads, each of these is sent to several devices.
    """
    ranks = lax.axis_size(CONTEXT)
    repeated = repeated_heads(k.shape[2], ranks) // k.shape[2]
    k, v = (jnp.repeat(a, repeated, axis=2) for a in (k, v))
    to_heads = partial(lax.all_to_all, axis_name=CONTEXT, split_axis=2, concat_axis=1, tiled=True)
    back = partial(lax.all_to_all, axis_name=CONTEXT, split_axis=1, concat_axis=2, tiled=True)
    if starts is not None:
        starts = lax.all_gather(starts, CONTEXT, axis=1, tiled=True)
    q, k, v = (saved(to_heads(a)) for a in (q, k, v))
    return saved(back(attend(q, k, v, starts)))
