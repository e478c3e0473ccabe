"""Which layers each chunk of a pipeline holds: [L, ...] cut into v*S chunks, as [v, S, depth, ...].

Chunk g = virtual_index * S + rank has layers in logical order, so that this is a reshape where all chunks have equally
many. Where they do not, each is padded with zeros to `depth`, the largest; the executor skips the padding. Where layers
are of several kinds that repeat in a period, chunks are cut between periods, so that place p of a chunk has a layer of
kind p % period, on every rank.

Where layers have different parameters (`config.stacks`), every chunk has places for layers of each form, as all ranks
run one program: those of the first form, then those of the next. The first chunk alone fills the places of all forms
but the last, whose layers are dealt evenly.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import islice
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import P
from jaxtyping import Array, Bool, Int

from jaxdist.config.stacks import stacks_of, why_no_stages
from jaxdist.mesh import PIPELINE
from jaxdist.mesh.split import Split
from jaxdist.output.units import counted
from jaxdist.parallel.placement import Placement, Placements
from jaxdist.parallel.placing import is_axes
from jaxdist.sharding import LAYERS, STAGES, Tree

BLOCKS = "blocks"
"""The name of the stacked layers among the parameters; the others are the model's tops."""


@dataclass(frozen=True)
class Stages:
    """How many layers each chunk has, and where each layer stands."""

    ranks: int
    """S."""
    virtual: int
    """v: chunks on each rank."""
    sizes: tuple[int, ...]
    """Layers of chunk 0, 1, ..., v*S - 1."""
    period: int = 1
    """Kinds of layers that repeat in this order. Every chunk begins with the first."""
    forms: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """Where layers have different parameters: each stack of them, first to last, with its layers of these chunks."""
    first: int = 0
    """The number in the model of the first of these layers."""

    @classmethod
    @cache
    def cut(cls, layers: int, ranks: int, virtual: int, period: int = 1) -> Stages:
        """Return the stages of layers that all cost the same. Raises `ValueError` for more chunks than periods."""
        costs = [period] * (layers // period)
        if layers % period:
            costs.append(layers % period)
        runs = split(costs, ranks * virtual, "layer" if period == 1 else "period")
        of_costs = iter(costs)
        return cls(ranks, virtual, tuple(sum(islice(of_costs, run)) for run in runs), period)

    @classmethod
    def of_stacks(cls, layers: Mapping[str, int], ranks: int, virtual: int) -> Stages:
        """Return the stages of stacks with these numbers of layers. Raises `ValueError` as `cut` does.

        The first chunk has all layers of the stacks before the last one.
        """
        *before, last = layers
        others = (0,) * (ranks * virtual - 1)
        forms = [(name, (layers[name], *others)) for name in before]
        forms.append((last, cls.cut(layers[last], ranks, virtual).sizes))
        sizes = tuple(map(sum, zip(*(of_form for _, of_form in forms), strict=True)))
        return cls(ranks, virtual, sizes, forms=tuple(forms))

    @cached_property
    def stacks(self) -> dict[str, Stages]:
        """The stages of each stack of layers, as if the model had no others, by its name; empty for the only one."""
        if not self.forms:
            return {"": self}
        found = {}
        first = self.first
        for name, sizes in self.forms:
            found[name] = replace(self, sizes=sizes, forms=(), first=first)
            first += sum(sizes)
        return found

    @cached_property
    def depth(self) -> int:
        """Places of a chunk: the layers of the largest one, of each form."""
        if self.forms:
            return sum(stack.depth for stack in self.stacks.values())
        return max(self.sizes)

    @property
    def padding(self) -> int:
        """Places of all chunks that hold no layer."""
        return len(self.sizes) * self.depth - sum(self.sizes)

    @property
    def padded(self) -> bool:
        """Whether some chunk has fewer layers than places."""
        return self.padding > 0

    def places_of(self, kind: int) -> int:
        """Return how many places of a chunk are for layers of a kind, given by its number in the period."""
        return len(range(kind, self.depth, self.period))

    def among_its_kind(self, place: Int[Array, ""]) -> Int[Array, ""]:
        """Return where a place of a chunk stands among those for layers of its kind."""
        return place if self.period == 1 else place // self.period

    @cached_property
    def layer(self) -> Int[np.ndarray, "v S depth"]:
        """Which of the layers, all of one form, is in each place; in padding, the last one of the chunk or before."""
        first = np.concatenate([[0], np.cumsum(self.sizes)[:-1]])
        last = first + np.asarray(self.sizes) - 1
        index = np.minimum(first[:, None] + np.arange(self.depth), last[:, None])
        # JAX keeps what it makes of a NumPy array: int32 is the same with and without x64, and int64 is not.
        return index.reshape(self.virtual, self.ranks, self.depth).astype(np.int32)

    @cached_property
    def valid(self) -> Bool[np.ndarray, "v S depth"]:
        """Whether each place holds a layer, and not padding."""
        there = np.arange(self.depth) < np.asarray(self.sizes)[:, None]
        return there.reshape(self.virtual, self.ranks, self.depth)

    def fold(self, tree: Tree) -> Tree:
        """Fold layers [L, ...] -> [v, S, depth, ...], in parameters or in what has their names: an optimizer state."""
        return self._of_layers(lambda stack, a: stack._fold(a), tree)

    def folded(self, tree: Tree) -> Tree:
        """Fold arrays on a mesh, and put each stage on its rank."""

        def spec(dims: tuple[Any, ...]) -> P:
            return P(None, PIPELINE, None, *dims[1:])

        return self._of_layers(lambda stack, a: _relaid(a, stack._fold, spec), tree)

    def unfolded(self, tree: Tree) -> Tree:
        """Return the inverse of `folded`, without the padding: as checkpoints hold it."""

        def unfolded(stack: Stages, a: Array) -> Array:
            # Layers that do not divide over the ranks lie whole on all of them.
            even = sum(stack.sizes) % stack.ranks == 0
            return _relaid(a, stack._unfold, lambda dims: P(PIPELINE if even else None, *dims[3:]))

        return self._of_layers(unfolded, tree)

    def _of_layers(self, f: Callable[[Stages, Any], Any], tree: Tree) -> Tree:
        """Apply `f(stages of its stack, a)` to every `a` that belongs to layers."""

        def apply(path: tuple[Any, ...], a: Any) -> Any:
            names = names_in(path)
            if BLOCKS not in names:
                return a
            stack = names[names.index(BLOCKS) + 1] if self.forms else ""
            return f(self.stacks[stack], a)

        return jax.tree.map_with_path(apply, tree)

    def _fold(self, a: Array) -> Array:
        lead = self.virtual, self.ranks, self.depth
        if not self.padded:
            return a.reshape(*lead, *a.shape[1:])
        # Padding is zero: its gradients are zero as well, so that an update leaves it so.
        valid = self.valid.reshape(*lead, *(1 for _ in a.shape[1:]))
        return jnp.where(valid, a[self.layer], jnp.zeros((), a.dtype))

    def _unfold(self, a: Array) -> Array:
        flat = a.reshape(-1, *a.shape[3:])
        if not self.padded:
            return flat
        return flat[np.flatnonzero(self.valid)]

    def abstract(self, tree: Tree) -> Tree:
        """Return the shapes of `fold(tree)`, from shapes."""

        def of(stack: Stages, a: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((stack.virtual, stack.ranks, stack.depth, *a.shape[1:]), a.dtype)

        return self._of_layers(of, tree)

    def places(self, tree: Placements) -> Placements:
        """Return the placements of parameters that are folded, whose update rule then knows where padding is."""

        def place(stack: Stages, one: Placement) -> Placement:
            layers = tuple(stack.layer.ravel().tolist()) if stack.padded else ()
            return replace(one, role=replace(one.role, layers=layers))

        return self._of_layers(place, tree)

    def axes(self, tree: Tree) -> Tree:
        """Return the logical axes of `fold(tree)`, from logical axes.

        Virtual stages are layers too: nothing but a layer itself may be split over data, whatever divides v.
        """
        blocks = jax.tree.map(lambda axes: (LAYERS, STAGES, *axes), tree[BLOCKS], is_leaf=is_axes)
        return tree | {BLOCKS: blocks}


def of_layers(f: Callable[[Any], Any], tree: Tree) -> Tree:
    """Apply `f` to everything that belongs to layers, and leave the rest as it is."""
    return jax.tree.map_with_path(lambda path, a: f(a) if BLOCKS in names_in(path) else a, tree)


def names_in(path: tuple[Any, ...]) -> list[Any]:
    """Return the keys of dicts on the way to a leaf of a tree."""
    return [getattr(key, "key", None) for key in path]


def of_stack(name: str, blocks: Tree) -> Tree:
    """Return what belongs to a stack, of what belongs to all layers; the name of the only stack is empty."""
    return blocks[name] if name else blocks


def _relaid(a: Array, f: Callable[[Array], Array], spec: Callable[[tuple[Any, ...]], P]) -> Array:
    """Return `f(a)`, laid out by `spec` of the dims of `a`."""
    return jax.sharding.auto_axes(f, out_sharding=spec(jax.typeof(a).sharding.spec.partitions))(a)


def stages_of(asked: Split) -> Stages | None:
    """Return how a mesh cuts the layers of a model; None without a pipeline.

    All ranks share the embedding and the head. Raises `ValueError` as `Stages.cut` does.
    """
    if not asked.pipelined:
        return None
    config = asked.config
    if problem := why_no_stages(config.model):
        raise ValueError(problem)
    ranks, virtual = asked.size(PIPELINE), config.pipeline.virtual
    stacks = {name: stack.layers for name, stack in stacks_of(config.model).items()}
    if len(stacks) > 1:
        return Stages.of_stacks(stacks, ranks, virtual)
    return Stages.cut(config.model.layers, ranks, virtual, len(config.model.kinds))


def largest_chunk(layers: int, chunks: Int[np.ndarray, "..."], period: int) -> Int[np.ndarray, "..."]:
    """Return the depth of stages with each of these numbers of `chunks`, without cutting them."""
    whole, rest = divmod(layers, period)
    # The last chunk holds the rest: beside as many periods as the others have, or in the place of one.
    return period * -(-whole // chunks) + np.where(whole % chunks == 0, rest, 0)


def split(costs: Sequence[float], chunks: int, what: str = "layer") -> tuple[int, ...]:
    """Return sizes of `chunks` contiguous runs of layers, none empty, whose most expensive one costs the least.

    By dynamic programming over (runs, layers), as in PipeDream (Narayanan et al. 2019, section 3.1); among equals, the
    one whose first runs are the longest. Raises `ValueError` for more chunks than layers, called `what`.
    """
    layers = len(costs)
    if not 1 <= chunks <= layers:
        raise ValueError(f"{counted(layers, what)} cannot make {counted(chunks, 'chunk')}; ask for at most {layers}")
    total = np.concatenate([[0.0], np.cumsum(costs)])
    # best[n]: the cost of the most expensive run, with the first n layers in the runs so far.
    best = total.copy()
    cuts = []
    for run in range(1, chunks):
        new = np.full(layers + 1, np.inf)
        cut = np.zeros(layers + 1, int)
        for n in range(run + 1, layers + 1):
            starts = np.arange(run, n)
            worst = np.maximum(best[starts], total[n] - total[starts])
            # The last of equal starts: the first runs are the longest.
            cut[n] = starts[len(starts) - 1 - int(np.argmin(worst[::-1]))]
            new[n] = worst.min()
        best = new
        cuts.append(cut)
    ends = [layers]
    for cut in reversed(cuts):
        ends.append(int(cut[ends[-1]]))
    return tuple(np.diff([0, *reversed(ends)]).tolist())
