"""What crosses the replicas once in a step, and how: a rule with a state of its own, which may be nothing.

`Crossing` itself is exact and on time: an all-reduce in float32 at the end of each step, or a reduce-scatter where the
replicas split masters and moments. Other rules send fewer bits (`compressed`), wait for the next step (`delayed`) or
for the end of a round of local steps (`outer`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import reshard
from jaxtyping import Array, Int

from jaxdist.mesh import REPLICA
from jaxdist.parallel import zero
from jaxdist.parallel.crossing.replicas import own_parts
from jaxdist.parallel.placement import Placement, Placements
from jaxdist.sharding import Params, Tree

F32 = 4
"""Bytes of a number in float32."""

Numbers = Any
"""A number, or a numpy array of one for each of many meshes."""

Kind = Literal["all-reduce", "all-gather", "all-to-all"]

RESIDUAL = "errors"
"""The item of a checkpoint with what compression has rounded off, of each replica, [..., R]."""


class Message(NamedTuple):
    """A collective over the replicas; elements are counted as `planning.predicted_collectives` counts them."""

    kind: Kind
    elements: int
    width: int
    """Bytes of an element."""
    waits: bool = False
    """Whether it can begin only when the message before it has come."""


class AtRest(NamedTuple):
    """Bytes that a device holds for a rule between steps."""

    errors: Numbers = 0
    """The residual."""
    in_flight: Numbers = 0
    """A gradient that crosses in the next step."""
    common: Numbers = 0
    """What all replicas have in common beside their own."""
    host: Numbers = 0
    """What is in the host's memory, and not on the device."""


class Crossing:
    """The exact sum of the replicas' gradients, at the end of the step that makes them.

    A rule may keep a state from step to step: any tree, or None. `places` are the placements of the trained parameters.
    """

    late = 0
    """Steps by which a gradient, and the metrics of its step, come later than the step."""
    every = 1
    """Steps from one crossing to the next."""
    scalars = 0
    """Bytes of single numbers in the state."""

    def __init__(self, replicas: int = 1):
        self.replicas = replicas

    def start(self, places: Placements, params: Params) -> Any:
        """Return the state before the first step."""
        return None

    def add_up(self, places: Placements, sums: Params, state: Any, step: Int[Array, ""]) -> tuple[Params, Any]:
        """Add up what `zero.reduce` leaves; return (gradients, as parameters lie between steps; the new state)."""
        return jax.tree.map(zero.cross, places, sums), None

    def add_up_kept(self, places: Placements, parts: Params, state: Any, step: Int[Array, ""]) -> tuple[Params, Any]:
        """Do what `add_up` does with gradients that were kept between two steps, as `replicas.kept` returns them."""
        return cross_at_once(places, parts), None

    def saved(self, state: Any) -> dict[str, Tree]:
        """Return what a checkpoint holds of a state, by the names of its items."""
        return {}

    def resumed(self, places: Placements, saved: dict[str, Tree], params: Params) -> Any:
        """Return the inverse of `saved`; the checkpoint may be of any number of replicas."""
        return self.start(places, params)

    def messages(self, shape: tuple[int, ...], stacked: int) -> Iterator[Message]:
        """Yield what a device sends to add up a gradient, of which it has `shape`; `stacked` dims count layers."""
        yield Message("all-reduce", math.prod(shape), F32)

    def at_rest(self, sent: Numbers, learned: Numbers, on_host: bool) -> AtRest:
        """Return the bytes of the state.

        `sent` are the elements that a device has of gradients when they cross, and `learned` of parameters that
        it has between steps; `on_host`: f32 parameters rest in the host's memory.
        """
        return AtRest()

    def has_rest(self, state: Any) -> bool:
        """Return whether a state holds what only the next gradient takes, in a program that no other step needs."""
        return False

    def without_rest(self, state: Any) -> Any:
        """Return such a state after the step that took it."""
        return state


class Later(Crossing):
    """A rule that adds up later than at the end of a step; how, is another rule's affair: that of its `sums`."""

    def __init__(self, sums: Crossing):
        """Take the rule by which parts are added up."""
        super().__init__(sums.replicas)
        self.sums = sums

    def messages(self, shape: tuple[int, ...], stacked: int) -> Iterator[Message]:
        """Yield the transfers of the sums."""
        yield from self.sums.messages(shape, stacked)

    def at_rest(self, sent: Numbers, learned: Numbers, on_host: bool) -> AtRest:
        """Return the bytes of the state of the sums."""
        return self.sums.at_rest(sent, learned, on_host)


class Alone(Crossing):
    """The rule of a mesh without replicas: nothing crosses.

    A run that had replicas may bring a residual, [..., 1], which the first gradient gets; then there is no state.
    """

    def add_up(self, places: Placements, sums: Params, state: Any, step: Int[Array, ""]) -> tuple[Params, Any]:
        """Return the gradients as they are, with the residual of other replicas where there is one."""
        if state is None:
            return super().add_up(places, sums, state, step)
        grads = jax.tree.map(lambda g, residual: g + residual.sum(-1), sums, state)
        return grads, jax.tree.map(jnp.zeros_like, state)

    def saved(self, state: Any) -> dict[str, Tree]:
        """Return the residual, if no gradient has taken it yet."""
        return {} if state is None else {RESIDUAL: state}

    def resumed(self, places: Placements, saved: dict[str, Tree], params: Params) -> Any:
        """Return the residual of a run that had replicas."""
        residual = saved.get(RESIDUAL)
        return None if residual is None else dealt(places, residual, self.replicas)

    def has_rest(self, state: Any) -> bool:
        """Return whether there is a residual."""
        return state is not None

    def without_rest(self, state: Any) -> None:
        """Return that there is none."""


def no_residual(places: Placements, params: Params, count: int) -> Params:
    """Return a residual of zero, which is also no gradient at all, for each of `count` replicas, [..., R] in f32."""

    def zeros(place: Placement, w: jax.Array) -> jax.Array:
        return reshard(jnp.zeros((*w.shape, count), jnp.float32), own_parts(place))

    return jax.tree.map(zeros, places, params)


def dealt(places: Placements, residual: Params, count: int) -> Params:
    """Return the residual of any number of replicas as that of `count`.

    Only its sum counts for what is still to arrive: on another number of replicas it is dealt out evenly.
    """

    def deal(place: Placement, own: jax.Array) -> jax.Array:
        if own.shape[-1] != count:
            share = own.sum(-1, keepdims=True) / count
            own = jnp.broadcast_to(share, (*own.shape[:-1], count))
        return reshard(own, own_parts(place))

    return jax.tree.map(deal, places, residual)


def cross_at_once(places: Placements, parts: Params) -> Params:
    """Do what `zero.cross` does for all gradients in one all-reduce; `parts` are what `replicas.kept` returns.

    One, because XLA puts a loop of matmuls beside a collective, but seldom beside each of several. It is for gradients
    that all wait for the replicas, which split none of them between steps.
    """
    leaves, tree = jax.tree.flatten(parts)
    all_places = jax.tree.leaves(places)
    assert all(place.deferred and place.replica_dim is None for place in all_places)

    def add(*own: jax.Array) -> tuple[jax.Array, ...]:
        total = jax.lax.psum(jnp.concatenate([part.ravel() for part in own]), REPLICA)
        ends = [0]
        found = []
        for place, part in zip(all_places, own, strict=True):
            ends.append(ends[-1] + math.prod(part.shape))
            g = total[ends[-2] : ends[-1]].reshape(part.shape[:-1])
            if place.crossing_dim is not None:
                g = jax.lax.all_gather(g, place.group, axis=place.crossing_dim, tiled=True)
            found.append(g)
        return tuple(found)

    before = tuple(own_parts(place) for place in all_places)
    after = tuple(place.rest for place in all_places)
    crossed = jax.shard_map(add, in_specs=before, out_specs=after, check_vma=False)(*leaves)
    return jax.tree.unflatten(tree, crossed)
