"""Rows that are added to the embedding tables so that the mesh divides them.

A vocabulary of V tokens that is split into n parts is held as V' rows, V' being the next multiple of n. The added rows
come last and exist in memory only: new parameters and checkpoints have V rows, whatever the mesh.

Added rows are zero. Their logits are minus infinity, so that they have no part in the loss, get no gradient, and stay
zero in every update.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import P
from jaxtyping import Array, Float, Int

from jaxdist.parallel.placement import Placements
from jaxdist.sharding import Layout, Tree, axes_of, partition

TABLES = ("table", "output")
"""The names of the parameters [V, D] with a row for each token."""


@dataclass(frozen=True)
class Vocabulary:
    """The tokens of a model, and the rows that a mesh holds for them."""

    layout: Layout
    size: int
    """V: the tokens."""

    @property
    def rows(self) -> int:
        """V': the rows of a table on the mesh."""
        parts = self.layout.parts("vocab")
        return -(-self.size // parts) * parts

    @property
    def added(self) -> int:
        """The rows that belong to no token."""
        return self.rows - self.size

    def pad(self, tree: Tree) -> Tree:
        """Add the rows to new parameters."""
        return of_tables(self._pad, tree) if self.added else tree

    def abstract(self, tree: Tree) -> Tree:
        """Return the shapes of `pad(tree)`, from shapes."""
        return of_tables(lambda a: jax.ShapeDtypeStruct((self.rows, *a.shape[1:]), a.dtype), tree)

    def places(self, tree: Placements) -> Placements:
        """Return the placements of parameters that have the rows, of which an update rule then knows."""
        return of_tables(lambda place: replace(place, role=replace(place.role, added=self.added)), tree)

    def padded(self, tree: Tree) -> Tree:
        """Add the rows to arrays on the mesh: to parameters, or to what has their names, such as an optimizer state."""

        def padded(a: Array) -> Array:
            # An update rule may keep a mean over all rows.
            return _relaid(a, self._pad, self._split_rows(a)) if a.shape[0] == self.size else a

        return of_tables(padded, tree) if self.added else tree

    def cut(self, tree: Tree) -> Tree:
        """Return the inverse of `padded`: what checkpoints hold."""

        def cut(a: Array) -> Array:
            return _relaid(a, self._cut, self._split_columns(a)) if a.shape[0] == self.rows else a

        return of_tables(cut, tree) if self.added else tree

    def _pad(self, a: Float[Array, "V ..."]) -> Float[Array, "V ..."]:
        return jnp.pad(a, [(0, self.added), *((0, 0) for _ in a.shape[1:])])

    def _cut(self, a: Float[Array, "V ..."]) -> Float[Array, "V ..."]:
        return a[: self.size]

    def _split_rows(self, a: jax.Array) -> P:
        """Return the layout of a table [V', D, ...] whose rows the mesh splits, from that of [V, D, ...]."""
        _, columns, *rest = jax.typeof(a).sharding.spec.partitions
        rows = self.layout.split("vocab")
        others = tuple(axis for axis in axes_of(columns) if axis not in rows)
        return P(partition(rows), partition(others), *rest)

    def _split_columns(self, a: jax.Array) -> P:
        """Return the layout of a table [V, D, ...]: what split its rows splits D too, or nothing where D is too small.

        The mesh does not divide V, and a whole table on every device could exceed its memory.
        """
        rows, columns, *rest = jax.typeof(a).sharding.spec.partitions
        both = axes_of(columns) + axes_of(rows)
        if a.shape[1] % self.layout.pieces(P(both)):
            return P(None, columns, *rest)
        return P(None, partition(both), *rest)


def of_tables(f: Callable[[Any], Any], tree: Tree) -> Tree:
    """Apply `f` to everything that belongs to a table of the vocabulary, and leave the rest as it is."""

    def apply(path: tuple[Any, ...], a: Any) -> Any:
        # An optimizer state wraps the names of parameters in its own, and so does what a crossing saves.
        names = [key.key for key in path if isinstance(key, jax.tree_util.DictKey)]
        return f(a) if names and names[-1] in TABLES else a

    return jax.tree.map_with_path(apply, tree)


def first_token(layout: Layout, columns: int) -> Int[Array, ""] | int:
    """Return the token of a device's first logit, where it has this number of columns of them."""
    split = layout.split("vocab")
    if not (layout.manual and split):
        return 0
    return columns * jax.lax.axis_index(split)


def tokens_of(layout: Layout, logits: Float[Array, "B S V"]) -> Int[Array, "B S V"]:
    """Return the token that each logit belongs to; that of an added row is V or more."""
    return jax.lax.broadcasted_iota(jnp.int32, logits.shape, 2) + first_token(layout, logits.shape[2])


def without_added(layout: Layout, logits: Float[Array, "B S V"], size: int) -> Float[Array, "B S V"]:
    """Set the logits of rows beyond the vocabulary's `size` to minus infinity."""
    if not Vocabulary(layout, size).added:
        return logits
    return jnp.where(tokens_of(layout, logits) < size, logits, -jnp.inf)


def _relaid(a: Array, f: Callable[[Array], Array], spec: P) -> Array:
    """Return `f(a)`, laid out by `spec`."""
    return jax.sharding.auto_axes(f, out_sharding=spec)(a)
