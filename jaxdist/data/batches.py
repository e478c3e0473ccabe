"""The data loader: from a step number to arrays on the devices, with batches prefetched by a thread.

The order of the rows is a pure function of (seed, step). It does not depend on meshes, hosts or workers, so a run
resumes anywhere with the same rows, and no loader state has to be saved.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

import jax
import numpy as np
from jaxtyping import Array, Bool, Int, UInt64

from jaxdist.data.tokens import IGNORED, Tokens
from jaxdist.sharding import BATCH, SEQUENCE, Layout

Made = TypeVar("Made")

ROUNDS = 8
"""Feistel rounds. Four are enough for a permutation of a large set to look random (Luby & Rackoff 1988); small sets
need more."""

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


def permute(seed: int, epoch: int, n: int, index: Int[np.ndarray, "..."]) -> Int[np.ndarray, "..."]:
    """Return where a seed and an epoch send the positions `index` of range(n), without storing the permutation.

    A balanced Feistel network (Luby & Rackoff 1988) permutes the 2w-bit numbers, where 4^w is the smallest power of
    four that is at least n. Results outside range(n) go through the network again until they are inside, which keeps
    the map a bijection: cycle walking (Black & Rogaway 2002, "Ciphers with Arbitrary Finite Domains", section 4). It
    takes fewer than 4 passes on average.
    """
    assert n > 0, "an empty set has no permutation"
    assert index.size == 0 or 0 <= index.min() <= index.max() < n, f"position outside range({n})"
    width = max(1, ((int(n) - 1).bit_length() + 1) // 2)
    keys = _round_keys(seed, epoch)
    images = _feistel(index.ravel().astype(np.uint64), width, keys)
    outside = images >= n
    while outside.any():
        images[outside] = _feistel(images[outside], width, keys)
        outside = images >= n
    return images.astype(np.int64).reshape(index.shape)


def global_rows(seed: int, step: int, batch: int, n: int) -> Int[np.ndarray, " batch"]:
    """Return the rows, of n, that make up global batch number `step` (from 0). No row repeats within an epoch.

    Epochs follow each other without a gap: a batch may hold the end of one and the start of the next.
    """
    # A product of numpy's integers would wrap.
    position = int(step) * int(batch) + np.arange(batch, dtype=np.int64)
    epoch, place = np.divmod(position, n)
    rows = np.empty(batch, np.int64)
    for e in range(int(epoch[0]), int(epoch[-1]) + 1):
        rows[epoch == e] = permute(seed, e, n, place[epoch == e])
    return rows


def splitmix64(x: UInt64[np.ndarray, "..."]) -> UInt64[np.ndarray, "..."]:
    """Mix 64 bits into 64, one to one (Steele, Lea & Flood 2014, "Fast Splittable Pseudorandom Number Generators").

    Sums and products are modulo 2^64, as numpy's unsigned arrays compute them without a warning.
    """
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def token_batch(tokens: Tokens, rows: Int[np.ndarray, " batch"], sequence: int, batch_layout: BatchLayout) -> Batch:
    """Return the rows as global arrays of k micro-batches.

    Each process reads only the rows of its own devices. `batch` must divide by k times the number of parts into which
    the layout splits it. A row of -1 is all padding.
    """
    abstract = abstract_batch(rows.size, sequence, batch_layout, apart=tokens.apart)
    return ordered_batch(rows, abstract, batch_layout.layout, partial(_read, tokens, sequence))


def ordered_batch(
    rows: Int[np.ndarray, " batch"],
    abstract: AbstractBatch,
    layout: Layout,
    read: Callable[[Int[np.ndarray, " n"]], dict[str, np.ndarray]],
) -> Batch:
    """Return what `global_batch` does, where `read` returns arrays [n, S] whose tokens are in order."""
    sequence = abstract["tokens"].shape[-1]
    order = layout.order(np.arange(sequence), sequence)

    def read_ordered(rows: Int[np.ndarray, " n"]) -> dict[str, np.ndarray]:
        return {name: a[:, order] for name, a in read(rows).items()}

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


def document_ends(windows: Int[np.ndarray, "n S+1"], begin: int | None, end: int | None) -> Bool[np.ndarray, "n S"]:
    """Return which tokens are the last ones of their documents: each `end`, and each token before a `begin`."""
    ends = np.zeros((windows.shape[0], windows.shape[1] - 1), bool)
    if end is not None:
        ends |= windows[:, :-1] == end
    if begin is not None:
        ends |= windows[:, 1:] == begin
    return ends


def document_starts(ends: Bool[np.ndarray, "n S"]) -> Int[np.ndarray, "n S"]:
    """Return the position in its row where the document of each token starts, from `document_ends`.

    The document of the first token of a row starts at 0.
    """
    # A token after an end starts a document; the running maximum carries its position to the tokens that follow.
    starts = np.zeros(ends.shape, np.int32)
    starts[:, 1:] = np.where(ends[:, :-1], np.arange(1, ends.shape[1]), 0)
    return np.maximum.accumulate(starts, axis=1)


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


def held_out_rows(n: int, batch: int, limit: int) -> Iterator[Int[np.ndarray, " batch"]]:
    """Yield rows 0..n-1 in batches, the last one padded with -1; at most the first `limit` batches unless 0."""
    starts = range(0, n, batch)
    if limit:
        starts = starts[:limit]
    for start in starts:
        rows = np.arange(start, start + batch)
        yield np.where(rows < n, rows, -1)


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


def _read(tokens: Tokens, sequence: int, rows: np.ndarray) -> dict[str, np.ndarray]:
    """Return the tokens [n, S] of these rows and the token after each; a row of -1 has tokens 0 and labels -1."""
    windows = np.zeros((rows.size, sequence + 1), np.int32)
    windows[rows >= 0] = tokens.window(rows[rows >= 0], sequence)
    return labelled(windows, rows[:, None] >= 0, tokens)


def labelled(
    windows: Int[np.ndarray, "n S+1"], counts: Bool[np.ndarray, "n ..."], tokens: Tokens
) -> dict[str, np.ndarray]:
    """Return the arrays of rows from windows of `tokens`; a token has a label where it `counts`, [n, S] or [n, 1]."""
    ids = np.ascontiguousarray(windows[:, :-1])
    labels = np.where(counts, windows[:, 1:], np.int32(IGNORED))
    if not tokens.apart:
        return {"tokens": ids, "labels": labels}
    # If documents are apart, nothing predicts the first token of the next document, so it does not count.
    ends = document_ends(windows, tokens.begin, tokens.end)
    labels[ends] = IGNORED
    return {"tokens": ids, "labels": labels, "starts": document_starts(ends)}


def _feistel(x: UInt64[np.ndarray, "..."], width: int, keys: UInt64[np.ndarray, " rounds"]) -> np.ndarray:
    """Apply a bijection of the numbers of 2 x `width` bits: each round mixes one half into the other."""
    w = np.uint64(width)
    left = x >> w
    right = x & np.uint64((1 << width) - 1)
    for key in keys:
        mixed = left ^ (splitmix64(right + key) >> (np.uint64(64) - w))
        left = right
        right = mixed
    return (left << w) | right


def _round_keys(seed: int, epoch: int) -> UInt64[np.ndarray, " rounds"]:
    state = splitmix64(splitmix64(word(seed)) + word(epoch))
    return splitmix64(state + np.arange(1, ROUNDS + 1, dtype=np.uint64))


def word(number: int) -> UInt64[np.ndarray, " 1"]:
    """Return an integer, of Python or of numpy, as one 64-bit word, modulo 2^64."""
    return np.array([int(number) % 2**64], np.uint64)
