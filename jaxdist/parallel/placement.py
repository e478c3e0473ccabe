"""Where a parameter and its gradient lie in the course of a step: the shardings between which `parallel.zero` moves."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from jax import P

from jaxdist.optimizers.rule import Role
from jaxdist.parallel import heads
from jaxdist.parallel.heads import HeadDeal
from jaxdist.parallel.partial_trees import part_of, selected
from jaxdist.sharding import Params, axes_of, partition

Placements = dict[str, Any]
"""A `Placement` for every parameter, nested as the parameters are."""


@dataclass(frozen=True)
class Placement:
    """Where one parameter lies, and its gradient. Each arrow is a collective, or nothing where both ends are alike.

    weights    held    -- gather_replicas -->  rest     -- gather -->  use
    gradient   partial -- reduce -->           reduced  -- cross -->   held
    """

    held: P
    """Between steps: as at rest, or split over the replicas too. The optimizer state lies alike."""
    rest: P
    """At rest in each replica."""
    use: P
    """In the forward and backward pass; `reduced` over the axes that split tokens."""
    reduced: P
    """Of the gradient, before it crosses the replicas: `unreduced` over the axes whose sum is deferred until then."""
    group: tuple[str, ...] = ()
    """Its ZeRO group, outermost first: the axes over which ZeRO shards it, if a dim divides. None splits it in use."""
    deal: HeadDeal | None = None
    """How its key/value heads are dealt in use; None where the heads of the mesh split them evenly."""
    role: Role = field(default_factory=Role)
    """What it is, wherever it lies. A frozen parameter lies as it would if it were trained."""

    @property
    def layer(self) -> Placement:
        """The placement of one layer of a stack."""
        rest = _without_first_dim(self.rest)
        return replace(
            self,
            # Between steps, and over the replicas, layers move as one stack.
            held=rest,
            rest=rest,
            use=_without_first_dim(self.use),
            reduced=_without_first_dim(self.reduced),
            deal=None if self.deal is None else self.deal.layer,
            role=replace(self.role, stacked=self.role.stacked - 1),
        )

    @property
    def partial(self) -> P:
        """How a gradient lies in use: every device has its own partial sum."""
        return P(*self.use.partitions, unreduced=self.use.reduced)

    @property
    def deferred(self) -> frozenset[str]:
        """The axes over which `reduce` leaves partial sums, for `cross` to add up: `replica`, or none."""
        return self.reduced.unreduced

    @property
    def replica_dim(self) -> int | None:
        """The dim that `replica` splits between steps; None where each replica holds the parameter."""
        return _first_that_differs(self.held, self.rest)

    @property
    def crossing_dim(self) -> int | None:
        """The dim that the group splits while a gradient crosses, where nothing is sharded at rest (stage 0)."""
        return _first_that_differs(self.reduced, self.rest)

    @cached_property
    def shard_dim(self) -> int | None:
        """The dim that the group splits at rest, or None.

        None means that every rank of the group holds all of the parameter: at ZeRO 0, or where no dim divides.
        """
        if not self.group:
            return None
        # Inside of an axis that splits the dim in use, as `expert` does: a shard is a part of what a rank uses.
        inside = [axes_of(part)[-len(self.group) :] for part in self.rest.partitions]
        return inside.index(self.group) if self.group in inside else None

    @property
    def scatter_dim(self) -> int | None:
        """The dim along which the group scatters a gradient; None where it is all-reduced over the group."""
        return self.crossing_dim if self.shard_dim is None else self.shard_dim

    @property
    def exchanged(self) -> bool:
        """Whether an all-to-all deals the heads: at rest, the model axis splits the size of each head."""
        if self.deal is None:
            return False
        return self.rest.partitions[self.deal.size_dim] == self.use.partitions[self.deal.dim]

    def in_use(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape in use of a parameter of `shape`.

        It differs from the shape at rest only where key and value heads are repeated for the ranks of the model axis.
        """
        if self.deal is None:
            return shape
        return heads.dealt(shape, self.deal)


def split_further(spec: P, dim: int, axes: tuple[str, ...]) -> P:
    """Return `spec` with `dim` split over `axes` too, inside of the axes that split it already."""
    split = list(spec.partitions)
    split[dim] = partition((*axes_of(split[dim]), *axes))
    return P(*split)


def trained(places: Placements, tree: Params) -> Params:
    """Return the leaves of `tree`, which is nested as `places` are, that belong to trained parameters."""
    return part_of(tree, selected(places, lambda place: place.role.trained))


def differentiated(places: Placements, tree: Params) -> Params:
    """Return the leaves of `tree`, which is nested as `places` are, that belong to parameters with a gradient."""
    return part_of(tree, selected(places, lambda place: place.role.differentiated))


def _first_that_differs(one: P, other: P) -> int | None:
    """Return the first dim that two specs split differently, or None."""
    pairs = zip(one.partitions, other.partitions, strict=True)
    return next((dim for dim, (a, b) in enumerate(pairs) if a != b), None)


def _without_first_dim(spec: P) -> P:
    return P(*spec.partitions[1:], unreduced=spec.unreduced, reduced=spec.reduced)
