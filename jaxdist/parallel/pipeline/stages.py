"""Which layers each chunk of a pipeline holds: [L, ...] cut into v*S chunks, as [v, S, depth, ...].

Chunk g = virtual_index * S + rank has layers in logical order, so that where all have as many this is a reshape. Where
they do not, each is padded with zeros to `depth`, the largest; the executor passes over what is padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int


@dataclass(frozen=True)
class Stages:
    ranks: int
    """S."""
    virtual: int
    """v: chunks on each rank."""
    sizes: tuple[int, ...]
    """Layers of chunk 0, 1, ..., v*S - 1."""

    @property
    def depth(self) -> int:
        return max(self.sizes)

    @property
    def padded(self) -> bool:
        return min(self.sizes) < self.depth

    @cached_property
    def layer(self) -> Int[np.ndarray, "v S depth"]:
        """Which layer stands where; in padding, one that there is."""
        first = np.concatenate([[0], np.cumsum(self.sizes)[:-1]])
        last = first + np.asarray(self.sizes) - 1
        index = np.minimum(first[:, None] + np.arange(self.depth), last[:, None])
        return index.reshape(self.virtual, self.ranks, self.depth)

    @cached_property
    def valid(self) -> Bool[np.ndarray, "v S depth"]:
        """Where a layer stands, and not padding."""
        there = np.arange(self.depth) < np.asarray(self.sizes)[:, None]
        return there.reshape(self.virtual, self.ranks, self.depth)

    def fold(self, a: Array) -> Array:
        """[L, ...] -> [v, S, depth, ...]."""
        lead = self.virtual, self.ranks, self.depth
        if not self.padded:
            return a.reshape(*lead, *a.shape[1:])
        valid = self.valid.reshape(*lead, *(1 for _ in a.shape[1:]))
        return jnp.where(valid, a[self.layer], jnp.zeros((), a.dtype))

    def unfold(self, a: Array) -> Array:
        """[v, S, depth, ...] -> [L, ...], without the padding."""
        flat = a.reshape(-1, *a.shape[3:])
        return flat[np.flatnonzero(self.valid)] if self.padded else flat

    def shape(self, a: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        """That of `fold(a)`."""
        return jax.ShapeDtypeStruct((self.virtual, self.ranks, self.depth, *a.shape[1:]), a.dtype)


def split(costs: Sequence[float], chunks: int) -> tuple[int, ...]:
    """Sizes of `chunks` contiguous runs of layers, none empty, whose most expensive one costs the least.

    By dynamic programming over (runs, layers), as PipeDream does (Narayanan et al. 2019, section 3.1); of equals, the
    one whose first runs are the longest. Raises `ValueError` for more chunks than layers.
    """
    layers = len(costs)
    if not 1 <= chunks <= layers:
        raise ValueError(f"{layers} layer(s) do not make {chunks} chunk(s) of at least one; ask for at most {layers}")
    total = np.concatenate([[0.0], np.cumsum(costs)])
    best = total.copy()  # of the first n layers in one run
    cuts = []
    for run in range(1, chunks):
        new, cut = np.full(layers + 1, np.inf), np.zeros(layers + 1, int)
        for n in range(run + 1, layers + 1):
            starts = np.arange(run, n)
            worst = np.maximum(best[starts], total[n] - total[starts])
            cut[n] = starts[len(starts) - 1 - int(np.argmin(worst[::-1]))]
            new[n] = worst.min()
        best, cuts = new, [*cuts, cut]
    ends = [layers]
    for cut in reversed(cuts):
        ends.append(int(cut[ends[-1]]))
    return tuple(np.diff([0, *reversed(ends)]).tolist())
