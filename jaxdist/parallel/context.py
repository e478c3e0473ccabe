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

from jaxdist.mesh import CONTEXT
from jaxdist.mesh.context import repeated_heads, zigzag
from jaxdist.parallel.region import to_next
from jaxdist.sharding import Tree, wide

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
    v: Float[Array, "B T K U"]
    at: Int[Array, " T"]
    """Their positions in the row."""


class Attended(NamedTuple):
    """What queries have found among some of the keys that they see."""

    out: Float[Array, "B S N U"]
    sums: Float[Array, "B S N"]
    """The log sum exp of the scores, in f32 at least; -inf where no key was seen."""


class Gradients(NamedTuple):
    """The gradients of a block."""

    q: Float[Array, "B S N H"]
    k: Float[Array, "B T K H"]
    v: Float[Array, "B T K U"]


class Blocks(Protocol):
    """A kernel: attention of some queries to some keys."""

    def own(self, queries: Queries, keys: Keys) -> Attended:
        """Attend causally to the device's own keys."""

    def visit(self, queries: Queries, keys: Keys) -> Attended:
        """Attend to a chunk that is all earlier: only documents and a window hide keys."""

    def own_gradients(self, queries: Queries, keys: Keys, found: Attended, g: Float[Array, "B S N U"]) -> Gradients:
        """Return the gradients of `own`, where `found` is what queries have found among the keys of all devices."""

    def visit_gradients(self, queries: Queries, keys: Keys, found: Attended, g: Float[Array, "B S N U"]) -> Gradients:
        """Return the gradients of `visit`, as `own_gradients` does."""


def join(a: Attended, b: Attended) -> Attended:
    """Return what queries have found among the keys of both (Dao 2023, section 2.3)."""
    sums = jnp.logaddexp(a.sums, b.sums)
    # A row that has seen nothing has the sum -inf, and no share of anything.
    known = jnp.where(sums == -jnp.inf, 0, sums)

    def share(part: Attended) -> jax.Array:
        return part.out.astype(sums.dtype) * jnp.exp(part.sums - known)[..., None]

    return Attended(share(a) + share(b), sums)


def join_over(axes: tuple[str, ...], found: Attended) -> Attended:
    """Return what queries have found among the keys of all devices along `axes`; all of them get it.

    Some device must have seen a key.
    """
    if not axes:
        return found
    highest = lax.pmax(found.sums, axes)
    share = jnp.exp(found.sums - highest)
    total = lax.psum(share, axes)
    out = lax.psum(found.out.astype(share.dtype) * share[..., None], axes)
    return Attended(out / total[..., None], highest + jnp.log(total))


Pair = tuple[jax.Array, jax.Array]
"""Keys [B, T, K, H] and values [B, T, K, U], or their gradients: what goes round."""


@dataclass(frozen=True)
class Ring:
    """Ring attention over n = `ranks` devices."""

    ranks: int
    blocks: Blocks
    unroll: bool = False
    """Whether the steps are written out, and not a loop."""

    def attend(self, queries: Queries, keys: Keys) -> Attended:
        """Return what this device's queries find among the keys of all devices, `out` in the dtype of the values."""
        coming = self._onward((keys.k, keys.v))
        own = self.blocks.own(queries, keys)
        own = Attended(own.out.astype(own.sums.dtype), own.sums)
        first, second = halves(queries)

        def visit(found: tuple[Attended, Attended], pair: Pair, step: Int[Array, ""]) -> tuple[Attended, Attended]:
            one, two = found
            pick = partial(_pick, self._earlier(step))
            keys1, keys2 = halves(self._visitors(pair, step))
            two = join(two, self.blocks.visit(second, keys1))
            new = join(pick(one, two), self.blocks.visit(pick(first, second), pick(keys1, keys2)))
            return pick(new, one), pick(two, new)

        def step(
            carry: tuple[Pair, tuple[Attended, Attended]], number: Int[Array, ""]
        ) -> tuple[tuple[Pair, tuple[Attended, Attended]], None]:
            pair, found = carry
            # Sent before they are used: so the next keys travel while these are worked on.
            coming = self._onward(pair)
            return (coming, visit(found, pair, number)), None

        pair, found = self._loop(step, (coming, halves(own)))
        found = joined(*visit(found, pair, jnp.asarray(self.ranks - 1)))
        return Attended(found.out.astype(keys.v.dtype), found.sums)

    def gradients(self, queries: Queries, keys: Keys, found: Attended, g: Float[Array, "B S N U"]) -> Gradients:
        """Return the gradients of queries, keys and values where `g` is that of what `attend` has `found`."""
        coming = self._onward((keys.k, keys.v))
        own = _wide(self.blocks.own_gradients(queries, keys, found, g))
        of_first, of_second = halves((queries, found, g))

        def visit(pair: Pair, step: Int[Array, ""]) -> Gradients:
            pick = partial(_pick, self._earlier(step))
            keys1, keys2 = halves(self._visitors(pair, step))

            def gradients(of: tuple[Queries, Attended, jax.Array], keys: Keys) -> Gradients:
                queries, found, g = of
                return _wide(self.blocks.visit_gradients(queries, keys, found, g))

            a = gradients(of_second, keys1)
            b = gradients(pick(of_first, of_second), pick(keys1, keys2))
            # B is about the first queries and keys, or about the second ones.
            zeros = jax.tree.map(jnp.zeros_like, b)
            one = pick(b, zeros)
            two = pick(zeros, b)
            return joined(Gradients(one.q, a.k + one.k, a.v + one.v), Gradients(a.q + two.q, two.k, two.v))

        def step(
            carry: tuple[Pair, Pair, jax.Array], number: Int[Array, ""]
        ) -> tuple[tuple[Pair, Pair, jax.Array], None]:
            pair, sums, dq = carry
            coming = self._onward(pair)
            dk, dv = self._onward(sums)
            made = visit(pair, number)
            return (coming, (dk + made.k, dv + made.v), dq + made.q), None

        pair, sums, dq = self._loop(step, (coming, (own.k, own.v), own.q))
        # XLA joins permutes of which none needs the other, and sends what it has joined when all of it is known. So
        # the keys of a ring of two would wait for the first sums, and the last sums for the gradients that go home.
        pair, sums = lax.optimization_barrier((pair, sums))
        dk, dv = lax.optimization_barrier(self._onward(sums))
        made = visit(pair, jnp.asarray(self.ranks - 1))
        # The sums are complete: they go home in the dtype of keys and values.
        dk, dv = self._onward(((dk + made.k).astype(keys.k.dtype), (dv + made.v).astype(keys.v.dtype)))
        return Gradients((dq + made.q).astype(queries.q.dtype), dk, dv)

    def _loop(self, step: Callable[..., tuple[Tree, None]], carry: Tree) -> Tree:
        """Run all steps but the last one, after which nothing is sent on."""
        if self.ranks == 2:
            return carry
        return lax.scan(step, carry, jnp.arange(1, self.ranks - 1), unroll=self.unroll)[0]

    def _visitors(self, pair: Pair, step: Int[Array, ""]) -> Keys:
        """Return the keys and values that are here at this step, with their positions."""
        length = pair[0].shape[1]
        index = self._source(step) * length + jnp.arange(length, dtype=jnp.int32)
        return Keys(*pair, zigzag(index, self.ranks * length, self.ranks))

    def _earlier(self, step: Int[Array, ""]) -> jax.Array:
        """Return whether the keys that are here at this step come from an earlier device."""
        return self._source(step) < lax.axis_index(CONTEXT)

    def _source(self, step: Int[Array, ""]) -> jax.Array:
        """Return the device whose keys are here at this step."""
        return (lax.axis_index(CONTEXT) - step) % self.ranks

    def _onward(self, x: Pair) -> Pair:
        """Send each device's `x` to the next one."""
        return jax.tree.map(partial(lax.ppermute, axis_name=CONTEXT, perm=to_next(self.ranks)), x)


def _wide(gradients: Gradients) -> Gradients:
    """Return gradients in f32 at least, to be added up."""
    return jax.tree.map(lambda a: a.astype(wide(a.dtype)), gradients)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def with_gradient(ring: Ring, queries: Queries, keys: Keys, found: Attended) -> Float[Array, "B S N U"]:
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
    attend: Callable[[jax.Array, jax.Array, jax.Array, Starts], Float[Array, "B S N U"]],
    q: Float[Array, "B S N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K U"],
    starts: Starts,
    saved: Callable[[jax.Array], jax.Array],
) -> Float[Array, "B S N U"]:
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
