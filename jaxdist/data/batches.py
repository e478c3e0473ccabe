"""The data loader: from the numbers of rows to arrays on the devices, with batches prefetched by a thread."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

import jax
import numpy as np
from jaxtyping import Array, Int

from jaxdist.data.rows import TokenRows
from jaxdist.sharding import BATCH, SEQUENCE, Layout

Made = TypeVar("Made")

AbstractBatch = dict[str, jax.ShapeDtypeStruct]
"""Shapes and shardings of a batch."""

Batch = dict[str, Array]
"""`tokens` [k, B/k, S], `labels` [k, B/k, S] (the next tokens) and `rows` [k, B/k] (place in the global batch); if
documents are apart also `starts` [k, B/k, S] (the position in its row where the document of each token starts)."""


@dataclass(frozen=True)
class BatchLayout:
    """How the rows of a batch lie on the devices."""

    accumulation: int
    """Micro-batches, into which the batch is cut first."""
    mesh: jax.sharding.Mesh
    layout: Layout
    """Says how the mesh splits a micro-batch."""

    def abstract(self, rows: int, row: dict[str, jax.ShapeDtypeStruct], dims: Sequence[str] = ()) -> AbstractBatch:
        """Return the shapes and shardings of a batch of `rows` rows, given those of one `row`.

        `dims` are the logical axes of the first dims of each array of a row; the others are whole on every device. The
        result also has "rows", the place of each row in the global batch.
        """
        batch = {}
        for name, one in {**row, "rows": jax.ShapeDtypeStruct((), np.int32)}.items():
            shape = (self.accumulation, rows // self.accumulation, *one.shape)
            logical = [*dims[: len(one.shape)], *(None for _ in one.shape[len(dims) :])]
            spec = self.layout.spec((None, BATCH, *logical))
            batch[name] = jax.ShapeDtypeStruct(shape, one.dtype, sharding=jax.sharding.NamedSharding(self.mesh, spec))
        return batch


def token_batch(rows: TokenRows, numbers: Int[np.ndarray, " batch"], batch_layout: BatchLayout) -> Batch:
    """Return the rows of these `numbers` as global arrays of k micro-batches.

    Each process reads only the rows of its own devices. `batch` must divide by k times the number of parts into which
    the layout splits it. A row of -1 is all padding.
    """
    abstract = abstract_batch(numbers.size, rows.sequence, batch_layout, rows.apart)
    return ordered_batch(numbers, abstract, batch_layout.layout, rows.read)


def ordered_batch(
    rows: Int[np.ndarray, " batch"],
    abstract: AbstractBatch,
    layout: Layout,
    read: Callable[[Int[np.ndarray, " n"]], dict[str, np.ndarray]],
) -> Batch:
    """Return what `global_batch` does, where `read` returns arrays [n, S] whose tokens are in order, or [n]."""
    sequence = abstract["tokens"].shape[-1]
    as_read = np.arange(sequence)
    order = layout.order(as_read, sequence)
    if np.array_equal(order, as_read):
        # Indexing would copy all arrays, which takes longer than reading them.
        return global_batch(rows, abstract, read)

    def read_ordered(rows: Int[np.ndarray, " n"]) -> dict[str, np.ndarray]:
        # An array with one number for each row has no tokens.
        return {name: a[:, order] if a.ndim > 1 else a for name, a in read(rows).items()}

    return global_batch(rows, abstract, read_ordered)


def abstract_batch(rows: int, sequence: int, batch_layout: BatchLayout, apart: bool = False) -> AbstractBatch:
    """Return the shapes and shardings of a batch of `rows` rows as `token_batch` makes it.

    Set `apart` for tokens whose documents are apart.
    """
    names = ["tokens", "labels"]
    if apart:
        names.append("starts")
    row = dict.fromkeys(names, jax.ShapeDtypeStruct((sequence,), np.int32))
    return batch_layout.abstract(rows, row, dims=(SEQUENCE,))


def global_batch(
    rows: Int[np.ndarray, " batch"],
    abstract: AbstractBatch,
    read: Callable[[Int[np.ndarray, " n"]], dict[str, np.ndarray]],
) -> Batch:
    """Return global arrays with the shapes and shardings of `BatchLayout.abstract`.

    `read` takes the rows of one device and returns arrays [n, ...] by name; it also decides what a row of -1 holds.
    Each process reads the rows of its own devices only, each once.
    """
    grid = rows.reshape(abstract["rows"].shape)
    places = np.arange(rows.size, dtype=np.int32).reshape(grid.shape)
    arrays_read: dict[bytes, dict[str, np.ndarray]] = {}

    def shard(name: str, index: tuple[slice, ...]) -> np.ndarray:
        if name == "rows":
            return places[index]
        wanted = np.ascontiguousarray(grid[index[:2]])
        # Devices that hold the same rows, and the arrays of one row, share a single read.
        key = wanted.tobytes()
        if key not in arrays_read:
            arrays_read[key] = read(wanted.ravel())
        rows_read = arrays_read[key][name].reshape(*wanted.shape, *abstract[name].shape[2:])
        return rows_read[(slice(None), slice(None), *index[2:])]

    # `make_array_from_callback` takes the global shape and passes global indices, so the copies of a row on several
    # processes cannot differ; slicing by process number could make them differ without any error.
    return {
        name: jax.make_array_from_callback(a.shape, a.sharding, partial(shard, name)) for name, a in abstract.items()
    }


class Prefetch(Generic[Made]):
    """Iterate over `make(step)` for the steps `start` to `stop - 1`, made in order by a thread, at most `depth` ahead.

    An exception in `make` is raised again by `next`. While `next` waits, it ends the iteration as soon as `enough()`
    returns True. Close the object, or use it as a context manager, to end the thread. `make` must name its mesh,
    because the caller's `jax.set_mesh` does not apply to the thread.
    """

    def __init__(
        self,
        make: Callable[[int], Made],
        start: int,
        stop: int,
        depth: int,
        enough: Callable[[], bool] | None = None,
    ):
        self._make = make
        self._steps = range(start, stop)
        self._enough = enough or _never
        self._room = threading.Semaphore(depth)
        self._made: queue.SimpleQueue[Made | BaseException] = queue.SimpleQueue()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="jaxdist-prefetch", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        end: BaseException = StopIteration()
        try:
            for step in self._steps:
                # Wait for room before making the batch, because the batch takes device memory.
                self._room.acquire()
                if self._closed.is_set():
                    break
                self._made.put(self._make(step))
        except BaseException as error:
            # Pass on errors of any kind, otherwise the consumer would wait forever.
            end = error
        self._made.put(end)

    def __iter__(self) -> Prefetch[Made]:
        return self

    def __next__(self) -> Made:
        # After an error or the end, the thread puts nothing more into the queue.
        if self._closed.is_set():
            raise StopIteration
        made = self._wait()
        if isinstance(made, BaseException):
            self._closed.set()
            raise made
        self._room.release()
        return made

    def _wait(self) -> Made | BaseException:
        while True:
            try:
                return self._made.get(timeout=0.2)
            except queue.Empty:
                if self._enough():
                    return StopIteration()

    def close(self) -> None:
        """End the thread after the batch that it is making, and drop the batches that are ready."""
        self._closed.set()
        self._room.release()
        # When the run is being stopped early, the read that the thread waits for may never return.
        timeout = 1 if self._enough() else None
        self._thread.join(timeout=timeout)
        self._made = queue.SimpleQueue()

    def __enter__(self) -> Prefetch[Made]:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _never() -> bool:
    return False
