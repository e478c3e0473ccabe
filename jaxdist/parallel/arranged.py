"""A batch of one's own: arrays with a dim of rows, which devices and micro-batches split, and arrays that all share."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxdist.sharding import Tree, name_of

BatchDims = Mapping[str, int | None]
"""By the path of an array of a batch, such as "graph.mask", its dim of rows; None: it has none.

An array without an entry has its rows first, or none if it is a number or a random key.
"""

ROWS_FIRST: BatchDims = MappingProxyType({})
"""No array has an entry."""


class Arranged(NamedTuple):
    """A batch in two trees like it, with None in the place of the arrays of the other one."""

    rows: Tree
    """The arrays with rows, which are their first dim here."""
    shared: Tree
    """The arrays without rows."""


def arrange(batch: Tree, dims: BatchDims) -> Arranged:
    """Return a batch, or one of abstract arrays, as `Arranged`."""
    rows = jax.tree.map_with_path(lambda path, a: _rows_first(a, _dim(path, a, dims)), batch)
    shared = jax.tree.map_with_path(lambda path, a: a if _dim(path, a, dims) is None else None, batch)
    return Arranged(rows, shared)


def rejoin(arranged: Arranged, dims: BatchDims) -> Tree:
    """Return the batch, or a part of its rows, that `arrange` has taken apart."""

    def join(path: tuple[Any, ...], rows: Any, shared: Any) -> Any:
        if rows is None:
            return shared
        dim = dims.get(name_of(path))
        return jnp.moveaxis(rows, 0, dim) if dim else rows

    return jax.tree.map_with_path(join, *arranged, is_leaf=lambda leaf: leaf is None)


def _dim(path: tuple[Any, ...], a: Any, dims: BatchDims) -> int | None:
    """Return the dim of rows of an array."""
    return dims.get(name_of(path), 0 if np.ndim(a) else None)


def _rows_first(a: Any, dim: int | None) -> Any:
    """Return an array with its rows first; None where it has none."""
    if dim is None:
        return None
    if dim == 0:
        return a
    if isinstance(a, jax.ShapeDtypeStruct):
        shape = list(a.shape)
        shape.insert(0, shape.pop(dim))
        return jax.ShapeDtypeStruct(tuple(shape), a.dtype)
    return jnp.moveaxis(a, dim, 0) if isinstance(a, jax.Array) else np.moveaxis(np.asarray(a), dim, 0)
