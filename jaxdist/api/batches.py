"""The batches that are given to `Parallel`: checked, and put on the mesh as micro-batches or for an evaluation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdist.api.request import Batch, check_numbers, rows_of
from jaxdist.data.batches import BatchLayout, global_batch
from jaxdist.output.units import counted
from jaxdist.parallel.arranged import Arranged, BatchDims, arrange
from jaxdist.sharding import BATCH, Tree, named
from jaxdist.training.engine import Engine


class Batches:
    """Lays batches out for the steps of an engine."""

    def __init__(self, engine: Engine, accumulation: int, dims: BatchDims):
        """`dims` says which dim of an array counts rows."""
        self._engine = engine
        self._accumulation = accumulation
        self.dims = dims
        self._pipelined = engine.step.forward.stages is not None

    def checked(self, batch: Batch) -> Arranged:
        """Return a batch for a step. Raises `ValueError` where its rows do not divide."""
        arranged = self._arranged(batch)
        rows = rows_of(arranged.rows)
        ranks = self._engine.layout.ranks
        unit = ranks * self._accumulation
        rest = rows % unit
        if rest:
            near = f"{rows - rest} or {rows - rest + unit}" if rows > unit else f"{unit}"
            raise ValueError(
                f"a batch of {rows} rows does not divide by {counted(self._accumulation, 'micro-batch')} x "
                f"{counted(ranks, 'part')} of the batch; give {near} rows, or change the mesh or accumulation"
            )
        return arranged

    def check_rows(self, batch: Batch) -> None:
        """Raise `ValueError` for what is no batch of any number of rows."""
        rows_of(self._arranged(batch).rows)

    def micro_batches(self, batch: Arranged) -> Tree:
        """Return a batch, the same in all processes or a global array, as micro-batches [k, B/k, ...] on the mesh."""
        engine = self._engine
        k = self._accumulation

        def split(a: Any) -> jax.Array:
            if not _is_global(a):
                return engine.micro_batches(a, k)
            a = jax.device_put(a, engine.sharding((BATCH,)))
            # The rows of a micro-batch lie on other devices than those of the batch.
            return jax.jit(_cut, static_argnums=(1, 2))(a, k, engine.layout.spec((None, BATCH)))

        def repeat(a: Any) -> jax.Array:
            a = a if isinstance(a, jax.Array) else np.asarray(a)
            whole = jnp.broadcast_to if isinstance(a, jax.Array) else np.broadcast_to
            return engine.put(whole(a, (k, *a.shape)), ())

        return self._for_forward(Arranged(jax.tree.map(split, batch.rows), jax.tree.map(repeat, batch.shared)))

    def abstract_micro_batches(self, batch: Arranged) -> Tree:
        """Return shapes and shardings of `micro_batches`; of `batch` only shapes and dtypes are looked at."""
        k = self._accumulation

        def repeat(a: Any) -> jax.ShapeDtypeStruct:
            a = a if hasattr(a, "dtype") else np.asarray(a)
            dtype = jax.dtypes.canonicalize_dtype(a.dtype, allow_extended_dtype=True)
            return jax.ShapeDtypeStruct((k, *a.shape), dtype, sharding=self._engine.sharding(()))

        rows = self._engine.abstract_micro_batches(batch.rows, k)
        return self._for_forward(Arranged(rows, jax.tree.map(repeat, batch.shared)))

    def of_own_rows(self, numbers: np.ndarray, read: Callable[[np.ndarray], Batch]) -> Tree:
        """Return the rows of these `numbers` as micro-batches, of which each process reads those of its devices alone.

        `read` returns rows as arrays that have them first. Their count divides, as `checked` has found.
        """
        engine = self._engine
        leaves, structure = jax.tree.flatten(read(numbers[:1]))
        row = {str(place): jax.ShapeDtypeStruct(a.shape[1:], a.dtype) for place, a in enumerate(leaves)}
        layout = BatchLayout(self._accumulation, engine.mesh, engine.layout)

        def read_leaves(rows: np.ndarray) -> dict[str, np.ndarray]:
            return dict(zip(row, jax.tree.leaves(read(rows)), strict=True))

        found = global_batch(numbers, layout.abstract(numbers.size, row), read_leaves)
        rows = jax.tree.unflatten(structure, [found[place] for place in row])
        return self._for_forward(Arranged(rows, jax.tree.map(lambda a: None, rows)))

    def parts(self, batch: Batch) -> Iterator[Tree]:
        """Yield the parts of a batch for an evaluation, each as one micro-batch.

        The first has the rows that the devices divide; the rest lie on all of them. Raises `ValueError` for such a rest
        where the mesh has a pipeline.
        """
        arranged = self._arranged(batch)
        rows = rows_of(arranged.rows)
        ranks = self._engine.layout.ranks
        even = rows - rows % ranks
        if even < rows and self._pipelined:
            near = f"{even} or {even + ranks}" if even else ranks
            raise ValueError(f"{rows} rows do not divide by the {ranks} parts of a batch; give {near}")
        if even:
            yield self._part(arranged, slice(0, even), (None, BATCH))
        if even < rows:
            yield self._part(arranged, slice(even, rows), ())

    def _part(self, batch: Arranged, rows: slice, dims: tuple[str | None, ...]) -> Tree:
        """Return some rows of a batch on the mesh, laid out by `dims`, as one micro-batch."""
        some = jax.tree.map(lambda a: self._engine.put(a[rows][None], dims), batch.rows)
        shared = jax.tree.map(lambda a: self._engine.put(jnp.asarray(a)[None], ()), batch.shared)
        return self._for_forward(Arranged(some, shared))

    def _arranged(self, batch: Batch) -> Arranged:
        """Return a batch with its rows first. Raises `ValueError` for what the dims of rows do not fit."""
        leaves = named(batch)
        for name, dim in self.dims.items():
            if name not in leaves:
                raise ValueError(f"batch_dims names {name}, but a batch holds {', '.join(leaves) or 'nothing'}")
            if dim is not None and not 0 <= dim < np.ndim(leaves[name]):
                raise ValueError(
                    f"batch_dims says that dim {dim} of {name} counts rows, but its shape is {np.shape(leaves[name])}"
                )
        arranged = arrange(batch, self.dims)
        shared = sorted(named(arranged.shared))
        if shared and self._pipelined:
            raise ValueError(f"{shared[0]} of the batch has no rows, which a pipeline needs of every array")
        if leaves and not jax.tree.leaves(arranged.rows):
            raise ValueError(f"no array of the batch ({', '.join(leaves)}) has rows; give one that counts them")
        check_numbers(arranged.shared)
        return arranged

    def _for_forward(self, batch: Arranged) -> Tree:
        """Return the batch as the forward pass reads it."""
        return batch.rows if self._pipelined else batch


def _is_global(a: Any) -> bool:
    """Return whether an array lies on several devices already, some of them perhaps of other processes."""
    return isinstance(a, jax.Array) and len(a.sharding.device_set) > 1


def _cut(a: jax.Array, k: int, spec: Any) -> jax.Array:
    """Return an array [B, ...] as [k, B/k, ...], laid out by `spec`."""
    reshape = jax.sharding.auto_axes(lambda a: a.reshape(k, -1, *a.shape[1:]), out_sharding=spec)
    return reshape(a)
