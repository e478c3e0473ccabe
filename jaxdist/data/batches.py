"""From a step number to arrays on the devices: which rows, in which order, on which device.

The order is a pure function of (seed, step). It knows nothing of meshes, hosts or workers, so that a run goes on
anywhere with the same rows, and nothing about it has to be saved.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Generic, TypeVar

import jax
import numpy as np
from jaxtyping import Array, Int, UInt64

from jaxdist.data.tokens import Tokens
from jaxdist.sharding import Layout

Made = TypeVar("Made")

ROUNDS = 8
"""Feistel rounds. Four make a permutation of a large set look random (Luby & Rackoff 1988); small sets need more."""

IGNORED = -1
"""The label of a position that does not count."""

Batch = dict[str, Array]
"""`tokens` [k, B/k, S], `labels` [k, B/k, S] (the next tokens) and `rows` [k, B/k] (place in the global batch); where
documents are apart, `starts` [k, B/k, S] too (where in its row the document of each token starts)."""


def permute(seed: int, epoch: int, n: int, index: Int[np.ndarray, "..."]) -> Int[np.ndarray, "..."]:
    """Where positions of range(n) go under the permutation of this seed and epoch, without holding one.

    A balanced Feistel network (Luby & Rackoff 1988) permutes the 2w-bit numbers, 4^w being the smallest power of four
    from n. A result outside range(n) is sent through it again until it is inside, which keeps it a bijection: cycle
    walking (Black & Rogaway 2002, "Ciphers with Arbitrary Finite Domains", section 4). Fewer than 4 turns on average.
    """
    assert n > 0, "an empty set has no permutation"
    assert index.size == 0 or 0 <= index.min() <= index.max() < n, f"position outside range({n})"
    width = max(1, ((n - 1).bit_length() + 1) // 2)
    keys = _round_keys(seed, epoch)
    found = _feistel(index.ravel().astype(np.uint64), width, keys)
    while (outside := found >= n).any():
        found[outside] = _feistel(found[outside], width, keys)
    return found.astype(np.int64).reshape(index.shape)


def global_rows(seed: int, step: int, batch: int, n: int) -> Int[np.ndarray, " batch"]:
    """The rows, of n, that make global batch number `step` (from 0). No row comes twice within an epoch.

    Epochs follow each other without a gap: a batch may hold the end of one and the start of the next.
    """
    position = step * batch + np.arange(batch, dtype=np.int64)
    epoch, place = np.divmod(position, n)
    rows = np.empty(batch, np.int64)
    for e in range(int(epoch[0]), int(epoch[-1]) + 1):
        rows[epoch == e] = permute(seed, e, n, place[epoch == e])
    return rows


def splitmix64(x: UInt64[np.ndarray, "..."]) -> UInt64[np.ndarray, "..."]:
    """Steele, Lea & Flood 2014, "Fast Splittable Pseudorandom Number Generators": 64 bits to 64, one to one."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def train_batch(
    tokens: Tokens,
    rows: Int[np.ndarray, " batch"],
    sequence: int,
    accumulation: int,
    mesh: jax.sharding.Mesh,
    layout: Layout,
) -> Batch:
    """The rows as k = `accumulation` micro-batches of global arrays; each process reads the rows of its own devices.

    `batch` must divide by k times the parts that the layout splits it into. A row of -1 is all padding.
    """
    abstract = abstract_batch(rows.size, sequence, accumulation, mesh, layout, apart=tokens.end is not None)
    return global_batch(rows, abstract, lambda wanted: _read(tokens, wanted, sequence))


def abstract_batch(
    rows: int, sequence: int, accumulation: int, mesh: jax.sharding.Mesh, layout: Layout, apart: bool = False
) -> Batch:
    """Shapes and shardings of a batch of that many rows, as `train_batch` makes it; `apart`: of tokens with an end."""
    names = ("tokens", "labels", *(["starts"] if apart else []))
    row = dict.fromkeys(names, jax.ShapeDtypeStruct((sequence,), np.int32))
    return abstract_rows(row, rows, accumulation, mesh, layout)


def validation_batches(
    tokens: Tokens,
    sequence: int,
    batch: int,
    limit: int,
    accumulation: int,
    mesh: jax.sharding.Mesh,
    layout: Layout,
) -> Iterator[Batch]:
    """Every held-out row once, in order, `batch` at a time as `train_batch` has them; at most `limit` batches,
    where that is not 0.

    The last batch is filled up with rows whose labels are all -1: they count for nothing.
    """
    for rows in held_out_rows(tokens.rows(sequence), batch, limit):
        yield train_batch(tokens, rows, sequence, accumulation, mesh, layout)


def document_starts(ids: Int[np.ndarray, "n S"], end: int) -> Int[np.ndarray, "n S"]:
    """Where in its row the document of each token starts, if documents end with `end`; that of the first token at 0."""
    starts = np.zeros(ids.shape, np.int32)
    starts[:, 1:] = np.where(ids[:, :-1] == end, np.arange(1, ids.shape[1]), 0)
    return np.maximum.accumulate(starts, axis=1)


def global_batch(
    rows: Int[np.ndarray, " batch"], abstract: Batch, read: Callable[[Int[np.ndarray, " n"]], dict[str, np.ndarray]]
) -> Batch:
    """Global arrays like those of `abstract_rows`; `read` gets the rows of one device, and gives [n, ...] by name.

    Each process reads the rows of its own devices only, each once. What a row of -1 holds is for `read` to say.
    """
    grid = rows.reshape(abstract["rows"].shape)
    place = np.arange(rows.size, dtype=np.int32).reshape(grid.shape)
    found: dict[bytes, dict[str, np.ndarray]] = {}

    def part(name: str, index: tuple[slice, ...]) -> np.ndarray:
        if name == "rows":
            return place[index]
        wanted = np.ascontiguousarray(grid[index[:2]])
        key = wanted.tobytes()  # devices that hold the same rows, and the arrays of a row, share one reading
        if key not in found:
            found[key] = read(wanted.ravel())
        return found[key][name].reshape(*wanted.shape, *abstract[name].shape[2:])

    # Sharding by callback asks for the global shape and hands out global indices, so that the copies of a row on
    # several processes cannot differ; slicing by process number can, silently.
    return {
        name: jax.make_array_from_callback(a.shape, a.sharding, partial(part, name)) for name, a in abstract.items()
    }


def abstract_rows(
    row: dict[str, jax.ShapeDtypeStruct], rows: int, accumulation: int, mesh: jax.sharding.Mesh, layout: Layout
) -> Batch:
    """Shapes and shardings of that many rows in `accumulation` micro-batches, with their places, from those of one."""

    def array(one: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        spec = layout.spec((None, "batch", *(None for _ in one.shape)))
        shape = accumulation, rows // accumulation, *one.shape
        return jax.ShapeDtypeStruct(shape, one.dtype, sharding=jax.sharding.NamedSharding(mesh, spec))

    return {name: array(one) for name, one in {**row, "rows": jax.ShapeDtypeStruct((), np.int32)}.items()}


def held_out_rows(n: int, batch: int, limit: int) -> Iterator[Int[np.ndarray, " batch"]]:
    """Rows 0..n-1 in batches, the last one filled up with -1; at most the first `limit`, where that is not 0."""
    starts = range(0, n, batch)
    for start in starts[:limit] if limit else starts:
        rows = np.arange(start, start + batch)
        yield np.where(rows < n, rows, -1)


class Prefetch(Generic[Made]):
    """`make(step)` for every step from `start` to `stop - 1`, made in order by a thread, at most `depth` ahead.

    An exception of `make` is raised again by `next`, whose wait ends, with no batch, as soon as `enough()`. Close it,
    or use it as a context manager, to end the thread. `make` must name its mesh: `jax.set_mesh` of the caller does not
    hold in the thread.
    """

    def __init__(
        self,
        make: Callable[[int], Made],
        start: int,
        stop: int,
        depth: int,
        enough: Callable[[], bool] = lambda: False,
    ):
        self._make, self._steps, self._enough = make, range(start, stop), enough
        self._room, self._made = threading.Semaphore(depth), queue.SimpleQueue()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="jaxdist-prefetch", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        end: BaseException = StopIteration()
        try:
            for step in self._steps:
                self._room.acquire()  # before the batch is made: it takes device memory
                if self._closed.is_set():
                    break
                self._made.put(self._make(step))
        except BaseException as error:  # of any kind: the consumer would wait for ever
            end = error
        self._made.put(end)

    def __iter__(self) -> Prefetch[Made]:
        return self

    def __next__(self) -> Made:
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
        """End the thread, after the batch that it is making; batches that are ready are dropped.

        It is not waited for where there was `enough`: it may never get what it reads.
        """
        self._closed.set()
        self._room.release()
        self._thread.join(timeout=1 if self._enough() else None)
        self._made = queue.SimpleQueue()

    def __enter__(self) -> Prefetch[Made]:
        return self

    def __exit__(self, *exception) -> None:
        self.close()


def _read(tokens: Tokens, rows: np.ndarray, sequence: int) -> dict[str, np.ndarray]:
    """Tokens [n, S] of these rows and the tokens after them; a row of -1 has tokens 0 and labels -1.

    Where documents are apart nothing foretells the first token of the next one: its label is -1 too.
    """
    windows = np.zeros((rows.size, sequence + 1), np.int32)
    windows[rows >= 0] = tokens.window(rows[rows >= 0], sequence)
    ids = np.ascontiguousarray(windows[:, :-1])
    labels = np.where(rows[:, None] >= 0, windows[:, 1:], np.int32(IGNORED))
    if tokens.end is None:
        return {"tokens": ids, "labels": labels}
    labels[ids == tokens.end] = IGNORED
    return {"tokens": ids, "labels": labels, "starts": document_starts(ids, tokens.end)}


def _feistel(x: UInt64[np.ndarray, "..."], width: int, keys: UInt64[np.ndarray, " rounds"]) -> np.ndarray:
    """A bijection of the numbers of 2 x `width` bits: each round mixes one half into the other."""
    w, mask = np.uint64(width), np.uint64((1 << width) - 1)
    left, right = x >> w, x & mask
    for key in keys:
        left, right = right, left ^ (splitmix64(right + key) >> (np.uint64(64) - w))
    return (left << w) | right


def _round_keys(seed: int, epoch: int) -> UInt64[np.ndarray, " rounds"]:
    word = lambda number: np.array([number % 2**64], np.uint64)
    state = splitmix64(splitmix64(word(seed)) + word(epoch))
    return splitmix64(state + np.arange(1, ROUNDS + 1, dtype=np.uint64))
