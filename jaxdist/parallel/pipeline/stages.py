"""Which layers each chunk of a pipeline holds: [L, ...] cut into v*S chunks, as [v, S, depth, ...].

Chunk g = virtual_index * S + rank has layers in logical order, so that where all have as many this is a reshape. Where
they do not, each is padded with zeros to `depth`, the largest; the executor passes over what is padding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import P
from jaxtyping import Array, Bool, Int

from jaxdist.config import Config
from jaxdist.mesh import PIPELINE
from jaxdist.parallel.zero import is_axes
from jaxdist.sharding import LAYERS, STAGES

BLOCKS = "blocks"
"""The name of the stacked layers among the parameters; the others are the model's tops."""

Tree = Any
"""Nested dicts of arrays."""


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

    def fold(self, tree: Tree) -> Tree:
        """Layers [L, ...] -> [v, S, depth, ...], of parameters or of what has their names: an optimizer's state."""
        return of_layers(self._fold, tree)

    def folded(self, tree: Tree) -> Tree:
        """`fold` of arrays on a mesh, each stage where it belongs."""
        layers = lambda dims: P(None, PIPELINE, None, *dims[1:])
        return of_layers(lambda a: _relaid(a, self._fold, layers), tree)

    def unfolded(self, tree: Tree) -> Tree:
        """The inverse of `folded`, without the padding: as checkpoints hold it."""
        even = sum(self.sizes) % self.ranks == 0
        layers = lambda dims: P(PIPELINE if even else None, *dims[3:])
        return of_layers(lambda a: _relaid(a, self._unfold, layers), tree)

    def _fold(self, a: Array) -> Array:
        lead = self.virtual, self.ranks, self.depth
        if not self.padded:
            return a.reshape(*lead, *a.shape[1:])
        valid = self.valid.reshape(*lead, *(1 for _ in a.shape[1:]))
        return jnp.where(valid, a[self.layer], jnp.zeros((), a.dtype))

    def _unfold(self, a: Array) -> Array:
        flat = a.reshape(-1, *a.shape[3:])
        return flat[np.flatnonzero(self.valid)] if self.padded else flat

    def abstract(self, tree: Tree) -> Tree:
        """Shapes of `fold(tree)`, from shapes."""
        lead = self.virtual, self.ranks, self.depth
        return of_layers(lambda a: jax.ShapeDtypeStruct((*lead, *a.shape[1:]), a.dtype), tree)

    def axes(self, tree: Tree) -> Tree:
        """Logical axes of `fold(tree)`, from logical axes.

        Virtual stages are layers too: nothing but a layer itself may be split over data, whatever divides v.
        """
        return tree | {BLOCKS: jax.tree.map(lambda a: (LAYERS, STAGES, *a), tree[BLOCKS], is_leaf=is_axes)}


def of_layers(f: Callable[[Any], Any], tree: Tree) -> Tree:
    """`f` of all that belongs to layers."""
    of_layers = lambda path: any(getattr(key, "key", None) == BLOCKS for key in path)
    return jax.tree.map_with_path(lambda path, a: f(a) if of_layers(path) else a, tree)


def _relaid(a: Array, f: Callable[[Array], Array], layers: Callable[[tuple], P]) -> Array:
    """`f(a)`, which lies as `layers` says of how `a` does."""
    return jax.sharding.auto_axes(f, out_sharding=layers(jax.typeof(a).sharding.spec.partitions))(a)


def stages_of(config: Config, shape: Mapping[str, int]) -> Stages | None:
    """How a mesh of `shape` cuts the layers of `config`'s model; None without a pipeline.

    All layers cost the same, and all ranks share the embedding and the head. Raises `ValueError` as `split` does.
    """
    ranks, virtual = shape[PIPELINE], config.pipeline.virtual
    if ranks == 1:
        return None
    return Stages(ranks, virtual, _even(config.model.layers, ranks * virtual))


@cache
def _even(layers: int, chunks: int) -> tuple[int, ...]:
    return split([1.0] * layers, chunks)


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
