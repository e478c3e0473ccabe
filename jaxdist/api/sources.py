"""Batches of `jaxdist.fit` that follow from the step: those of a function, of a sequence, and rows in random order."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import xxhash

from jaxdist.api.request import Batch
from jaxdist.data.order import global_rows
from jaxdist.sharding import Tree, named

SAMPLED = 64
"""Rows by which arrays are recognized."""


class Source(ABC):
    """Batches in an order that a run can take up again."""

    about: str
    """What they are, for the summary."""
    can_resume = True
    """Whether a run that resumes gets the batches that it would have got."""

    def identity(self) -> dict[str, Any]:
        """Return what must be the same in a run that goes on, by name; JSON can hold it."""
        return {}

    @abstractmethod
    def batch_after(self, step: int) -> Batch:
        """Return the batch of the step that follows `step` steps; called for one step after the other."""

    def go_on(self, step: int, facts: Mapping[str, Any]) -> None:  # noqa: B027  # most know by the step where to go on
        """Go on after `step` steps, from the facts of that checkpoint. Raises `RequestError`."""

    def facts(self, step: int) -> dict[str, Any]:
        """Return what a checkpoint of `step` keeps; all processes call it."""
        return {}


class Function(Source):
    """A function of the step."""

    about = "a function of the step"

    def __init__(self, batches: Callable[[int], Batch]):
        self.function = batches

    def batch_after(self, step: int) -> Batch:
        """Return the batch of that step."""
        return self.function(step)


class Batches(Source):
    """A sequence of batches, in its order, again and again."""

    def __init__(self, batches: Sequence[Batch]):
        if not len(batches):
            raise ValueError("batches is empty; give one batch or more")
        self.batches = batches
        self.about = f"{len(batches):,} batches of a {type(batches).__name__}, in their order"

    def identity(self) -> dict[str, Any]:
        """Return the number of batches."""
        return {"batches": len(self.batches)}

    def batch_after(self, step: int) -> Batch:
        """Return the batch of that step."""
        return as_arrays(self.batches[step % len(self.batches)])


class Rows(Source):
    """Rows in an order that follows from (seed, step); each epoch is another permutation of all."""

    def __init__(self, count: int, size: int, seed: int, kind: str):
        if not count:
            raise ValueError("batches has no rows; give one row or more")
        if size > count:
            raise ValueError(f"batch_size is {size}, and batches has {count:,} rows; give a size from 1 to {count:,}")
        self.count = count
        self.size = size
        self.seed = seed
        self.about = f"{count:,} rows of {kind}, in an order that follows from seed {seed}"

    def identity(self) -> dict[str, Any]:
        """Return what the order of the rows follows from."""
        return {"rows": self.count, "batch_size": self.size, "seed": self.seed}

    def batch_after(self, step: int) -> Batch:
        """Return the rows of that step."""
        return self.read(self.rows_after(step))

    def rows_after(self, step: int) -> np.ndarray:
        """Return the numbers of the rows of that step."""
        return global_rows(self.seed, step, self.size, self.count)

    @abstractmethod
    def read(self, rows: np.ndarray) -> Batch:
        """Return these rows as arrays that have them first."""


class RowsOfArrays(Rows):
    """The rows of a tree of arrays."""

    def __init__(self, arrays: Tree, size: int, seed: int):
        arrays = jax.tree.map(lambda a: a if isinstance(a, np.ndarray) else np.asarray(a), arrays)
        counts = {name or "it": len(a) if a.ndim else 0 for name, a in named(arrays).items()}
        if len(set(counts.values())) != 1:
            listed = ", ".join(f"{name} has {count}" for name, count in counts.items()) or "there is no array"
            raise ValueError(f"the arrays of batches share no number of rows: {listed}; give arrays that do")
        super().__init__(next(iter(counts.values())), size, seed, "arrays")
        self.arrays = arrays

    def identity(self) -> dict[str, Any]:
        """Return also a digest of some of the rows."""
        digest = xxhash.xxh3_64()
        for name, a in sorted(named(self.arrays).items()):
            digest.update(f"{name} {a.dtype} {a.shape}".encode())
            digest.update(np.ascontiguousarray(a[:: max(1, self.count // SAMPLED)]).tobytes())
        return super().identity() | {"digest of batches": digest.hexdigest()}

    def read(self, rows: np.ndarray) -> Batch:
        """Return these rows."""
        return jax.tree.map(lambda a: a[rows], self.arrays)


class RowsOfSequence(Rows):
    """The items of a sequence, each a row."""

    def __init__(self, items: Any, size: int, seed: int):
        super().__init__(len(items), size, seed, f"a {type(items).__name__}")
        self.items = items
        self.fingerprint = getattr(items, "fingerprint", getattr(items, "_fingerprint", None))
        """Of rows that `jaxdist.data` has opened, and of a `datasets.Dataset`."""

    def identity(self) -> dict[str, Any]:
        """Return also the fingerprint of the data, if they have one."""
        known = {"fingerprint of batches": self.fingerprint} if isinstance(self.fingerprint, str) else {}
        return super().identity() | known

    def read(self, rows: np.ndarray) -> Batch:
        """Return these items, stacked."""
        numbers = [int(row) for row in rows]
        together = getattr(self.items, "__getitems__", None)
        found = together(numbers) if together else [self.items[number] for number in numbers]
        items = [as_arrays(item) for item in found]
        try:
            return jax.tree.map(lambda *values: np.stack(values), *items)
        except ValueError as error:
            raise ValueError(f"rows of batches cannot be stacked: {error}; give rows whose arrays are alike") from error


def as_arrays(item: Tree) -> Tree:
    """Return a row, or a batch, with arrays in the place of numbers, lists of them, and arrays of other libraries."""

    def array(leaf: Any) -> Any:
        return leaf if isinstance(leaf, jax.Array) else np.asarray(leaf)

    return jax.tree.map(array, item, is_leaf=_is_list_of_numbers)


def _is_list_of_numbers(value: Any) -> bool:
    while isinstance(value, list):
        if not value:
            return False
        if isinstance(value[0], bool | int | float | str):
            return True
        value = value[0]
    return False
