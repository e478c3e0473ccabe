"""Gradients that cross in fewer bits, with error feedback (`codes`): the residual is state.

A checkpoint holds it, and a mesh with other replicas takes the same in all.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
from jax import P
from jaxtyping import Array, Float, Int

from jaxdist.parallel.crossing.base import F32, RESIDUAL, AtRest, Crossing, Message, Numbers, dealt, no_residual
from jaxdist.parallel.crossing.codes import Compression
from jaxdist.parallel.crossing.replicas import own_parts, partial_sums
from jaxdist.parallel.placement import Placement, Placements
from jaxdist.sharding import Params, Tree


class Compressed(Crossing):
    """Sums in fewer bits, with error feedback: the state is the residual of each replica, [..., R] in f32."""

    def __init__(self, rule: Compression, replicas: int):
        """Take how the sums are sent, and between how many replicas."""
        super().__init__(replicas)
        self.rule = rule

    def start(self, places: Placements, params: Params) -> Params:
        """Return that nothing is rounded off yet."""
        return no_residual(places, params, self.replicas)

    def add_up(self, places: Placements, sums: Params, state: Any, step: Int[Array, ""]) -> tuple[Params, Any]:
        """Return (the sums, the new residual)."""
        both = jax.tree.map(partial(cross, self.rule, step), places, sums, state)
        return jax.tree.transpose(jax.tree.structure(sums), jax.tree.structure((0, 0)), both)

    def add_up_kept(self, places: Placements, parts: Params, state: Any, step: Int[Array, ""]) -> tuple[Params, Any]:
        """Round when a gradient crosses, not when it is made."""
        return self.add_up(places, jax.tree.map(partial_sums, places, parts), state, step)

    def saved(self, state: Params) -> dict[str, Tree]:
        """Return the residual."""
        return {RESIDUAL: state}

    def resumed(self, places: Placements, saved: dict[str, Tree], params: Params) -> Params:
        """Return the residual, dealt to the replicas of this mesh; zero where a run without replicas has saved none."""
        residual = saved.get(RESIDUAL)
        if residual is None:
            return self.start(places, params)
        return dealt(places, residual, self.replicas)

    def messages(self, shape: tuple[int, ...], stacked: int) -> Iterator[Message]:
        """Yield what the rule sends."""
        yield from self.rule.messages(shape, stacked, self.replicas)

    def at_rest(self, sent: Numbers, learned: Numbers, on_host: bool) -> AtRest:
        """Return a residual of what is sent, in f32."""
        return AtRest(errors=F32 * sent)


def cross(
    rule: Compression, step: Int[Array, ""], place: Placement, g: Float[Array, "..."], residual: Float[Array, "... R"]
) -> tuple[Float[Array, "..."], Float[Array, "... R"]]:
    """Do what `zero.cross` does, in fewer bits; return (the sum, the new residual of each replica)."""

    def add(g: jax.Array, residual: jax.Array, step: jax.Array) -> tuple[jax.Array, jax.Array]:
        total, new = rule.add_up(g, residual[..., 0], place.role.stacked, step)
        if place.crossing_dim is not None:
            total = jax.lax.all_gather(total, place.group, axis=place.crossing_dim, tiled=True)
        return total, new[..., None]

    own = own_parts(place)
    # Unchecked, because there a partial sum is what it is, the device's own part; checked, it can only be added up.
    crossed = jax.shard_map(add, in_specs=(place.reduced, own, P()), out_specs=(place.rest, own), check_vma=False)
    return crossed(g, residual, step)
